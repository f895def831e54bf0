"""Weak scaling: examples per second on one and on two processes, each with the same number of examples, in one run.

    python benchmarks/scaling.py --out benchmarks/results/cpu/scaling.csv

It trains a transformer encoder with Bayesian attention, in which computing dominates, with the training loop of the
recipes. Rounds on one and on two processes alternate, one thread each, so that other load on the machine affects both
alike.
"""

import argparse
import os
import socket
import statistics
import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

import bayesattn as ba
from bayesattn_recipes.common.config import seed_everything
from bayesattn_recipes.common.folders import write_csv
from bayesattn_recipes.common.loop import Experiment, TrainingConfig, train

TOKENS, WIDTH, LAYERS, HEADS, CLASSES = 64, 256, 4, 4, 10
SHARE, WARM_UP, STEPS = 16, 2, 24


class Encoder(Experiment):
    """Random sequences with random labels."""

    def __init__(self, world: int) -> None:
        self.num_examples = SHARE * world * (WARM_UP + STEPS)
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(SHARE * world, TOKENS, WIDTH, generator=generator)
        self.labels = torch.randint(0, CLASSES, (SHARE * world,), generator=generator)
        layer = ba.nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, config=ba.AttentionConfig("BAM-WC")
        )
        self.model = nn.Sequential(nn.TransformerEncoder(layer, LAYERS), nn.Flatten(), nn.Linear(TOKENS * WIDTH, CLASSES))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def collate(self, indices: Tensor) -> dict[str, Tensor]:
        chosen = indices % len(self.inputs)
        return {"inputs": self.inputs[chosen], "labels": self.labels[chosen]}

    def nll(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["inputs"]), batch["labels"], reduction="sum")


def work(rank: int, world: int, port: int, result: str) -> None:
    """Train in one of `world` processes; the first writes the examples per second of all."""
    torch.set_num_threads(1)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in places.items()})
    # accelerate gives a lone process every core unless OMP_NUM_THREADS is set
    os.environ.update(ACCELERATE_USE_CPU="true", MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1")
    seed_everything(0)
    times = []
    config = TrainingConfig(epochs=1, batch_size=SHARE * world)
    train(Encoder(world), config, seed=0, on_progress=lambda done, total: times.append(time.perf_counter()))
    if rank == 0:
        seconds = times[-1] - times[WARM_UP - 1]
        Path(result).write_text(str(SHARE * world * STEPS / seconds))
    if world > 1:
        dist.barrier()
    # torch occasionally deadlocks while it destroys a DistributedDataParallel on gloo
    os._exit(0)


def measure(world: int, result: Path) -> float:
    """Return examples per second on `world` processes."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    mp.start_processes(work, (world, port, str(result)), nprocs=world, start_method="fork")
    return float(result.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    rows = []
    result = arguments.out.with_suffix(".partial")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for number in range(arguments.rounds):
        for world in (1, 2):
            rate = measure(world, result)
            rows.append({"round": number, "processes": world, "examples_per_second": round(rate, 2)})
            print(rows[-1], flush=True)
    result.unlink()
    write_csv(arguments.out, rows)
    one, two = ([row["examples_per_second"] for row in rows if row["processes"] == world] for world in (1, 2))
    ratios = [second / first for first, second in zip(one, two)]
    print(f"two processes / one: median {statistics.median(ratios):.2f}, rounds {', '.join(f'{x:.2f}' for x in ratios)}")
    plot(one, two, arguments.out.with_suffix(".png"))


def plot(one: list[float], two: list[float], path: Path) -> None:
    """Draw every round and the medians, with twice the rate of one process for comparison."""
    figure, axis = plt.subplots(figsize=(4.5, 3.2), layout="constrained")
    medians = [statistics.median(one), statistics.median(two)]
    axis.bar([1, 2], medians, width=0.5, color="#9ecae1")
    for world, values in ((1, one), (2, two)):
        axis.plot([world] * len(values), values, "o", color="#08519c", markersize=4)
    axis.plot([1, 2], [medians[0], 2 * medians[0]], "--", color="grey", label="ideal")
    axis.set_xticks([1, 2], ["1 process", "2 processes"])
    axis.set_ylabel("examples / second")
    ratio = statistics.median(second / first for first, second in zip(one, two))
    axis.set_title(f"Weak scaling: {ratio:.2f} ×, median of {len(one)} rounds", fontsize=10)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
