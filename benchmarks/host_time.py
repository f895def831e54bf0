"""How long the host is busy with Weibull attention, next to torch's own.

    python benchmarks/host_time.py benchmarks/results/h200/host.csv

A stream of calls, forward and backward, until the GPU has nothing left to do: at 64 keys the host is the limit, at 512 the
longer of the two. Alone and as a stack of twelve, autograd in a thread of its own and in the caller's. The calls take turns,
because a host's speed may change by a factor of two within a minute; the ratio is the median over the turns.
"""

import csv
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch.nn.attention import SDPBackend

from bayesattn.bench.attention import LAYERS, Calls
from bayesattn.bench.harness import measure_in_turn, versions

SHAPES = [(2, 12, 64, 64), (16, 12, 512, 64)]
NUM_CALLS, ROUNDS = 60, 11
COLUMNS = ["shape", "layers", "thread of the backward pass", "provider", "microseconds of a layer", "ratio", "commit"]


def host_time(call: Callable[[], object], num_calls: int) -> float:
    """Return milliseconds of a call in a stream of them."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(num_calls):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / num_calls * 1e3


def main(path: Path) -> None:
    """Measure and write."""
    rows = []
    for shape in SHAPES:
        for layers in (1, LAYERS):
            calls = Calls(shape, "cuda", torch.bfloat16, layers)
            providers = {"sdpa flash": calls.soft(SDPBackend.FLASH_ATTENTION), "BAM-WC": calls.bayesian("auto")}
            for where in ("autograd's", "the caller's"):
                with torch.autograd.set_multithreading_enabled(where == "autograd's"):
                    times = measure_in_turn(
                        list(providers.values()), rounds=ROUNDS, clock=lambda call, n=NUM_CALLS // layers: host_time(call, n)
                    )
                for provider, found in zip(providers, times, strict=True):
                    ratio = median(x / base for x, base in zip(found, times[0], strict=True))
                    microseconds = round(1e3 * median(found) / layers)
                    rows.append(["x".join(map(str, shape)), layers, where, provider, microseconds, f"{ratio:.3f}"])
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows([*row, versions("cuda")["commit"]] for row in rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
