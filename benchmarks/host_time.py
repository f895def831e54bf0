"""How long the host is busy with one call of Weibull attention at n = 512, next to torch's own.

    python benchmarks/host_time.py benchmarks/results/h200/host.csv

A stream of calls, forward and backward, without waiting for the GPU; autograd in a thread of its own, and in the caller's.
"""

import csv
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend

from bayesattn.bench.attention import Calls

SHAPE = (16, 12, 512, 64)
NUM_CALLS = 300


def host_time(call: Callable[[], object]) -> float:
    """Return microseconds of a call in a stream of them."""
    for _ in range(5):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(NUM_CALLS):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / NUM_CALLS * 1e6


def main(path: Path) -> None:
    """Measure and write."""
    calls = Calls(SHAPE, "cuda", torch.bfloat16)
    providers = {"sdpa flash": calls.soft(SDPBackend.FLASH_ATTENTION), "BAM-WC": calls.bayesian("auto")}
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["provider", "thread of the backward pass", "microseconds of a call"])
        for has_thread in (True, False):
            with torch.autograd.set_multithreading_enabled(has_thread):
                for provider, call in providers.items():
                    where = "autograd's" if has_thread else "the caller's"
                    writer.writerow([provider, where, round(host_time(call))])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
