"""What an optimiser step of the language recipe takes, everything included: batches, KL, clipping, checks, AdamW.

    python benchmarks/fine_tuning.py benchmarks/results/h200/fine_tuning.csv

The recipe's own loop on random tokens, half of the examples a quarter shorter than the others; encoders from their configs
with their dropout of hidden states, but none of attention weights. `soft` keeps the encoder's SDPA. Once as on any GPU, with
recorded launches, and once without. Each step waits for its gradient's norm, so its time on the clock is all of it.
"""

import csv
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from bayesattn.bench.conversion import ALBERT_BASE, SMALL, Case
from bayesattn.convert import bayesianize
from bayesattn_recipes.common.config import seed_everything
from bayesattn_recipes.common.loop import train
from bayesattn_recipes.language.features import Collator
from bayesattn_recipes.language.fit import FineTuning
from bayesattn_recipes.language.model import set_up
from bayesattn_recipes.language.prepare import Split
from bayesattn_recipes.language.tasks import TASKS
from bayesattn_recipes.language.train import load_config

CASES = [
    Case("albert-base", "albert", ALBERT_BASE, batch=16, length=512, padding=128),
    Case("e5-small", "bert", SMALL, batch=32, length=128, padding=32),
]
VARIANTS = ("soft", "BAM-NOKL", "BAM-WC")
# the first steps load kernels and record
NUM_STEPS, NUM_FIRST = 60, 20


def make_rows(case: Case) -> list[dict[str, Any]]:
    """Return random texts, every second one shorter."""
    lengths = [case.length - case.padding * (i % 2) for i in range(4 * case.batch)]
    return [{"input_ids": torch.randint(5, 30_000, (n,)).tolist(), "labels": i % 2} for i, n in enumerate(lengths)]


def step_times(case: Case, variant: str, *, is_recorded: bool) -> list[float]:
    """Return the milliseconds of each step."""
    seed_everything(0)
    config = load_config("mrpc", [f"attention.variant={variant}", "training.precision=bf16"])
    model = cast(PreTrainedModel, case.build())
    set_up(model.config, "classification", 2, config.dropout_rates)
    # the rates are read when a model is made
    model = bayesianize(type(model)(model.config), config.attention)
    splits = {"train": Split(make_rows(case)), "validation": Split(make_rows(case)[: case.batch])}
    training = replace(config.training, steps=NUM_STEPS, batch_size=case.batch, group_by_length=False)
    experiment = FineTuning(model, TASKS["mrpc"], splits, Collator(0, max_length=case.length), training)
    experiment.is_recordable = experiment.is_recordable and is_recorded
    ends = []
    train(experiment, training, seed=0, on_progress=lambda done, total: ends.append(time.perf_counter()))
    # an epoch of four steps ends with a look at the validation texts, and its first step is not recorded
    inside = [(b - a) * 1e3 for i, (a, b) in enumerate(pairwise(ends), start=1) if i % 4]
    return inside[NUM_FIRST * 3 // 4 :]


def main(path: Path) -> None:
    """Measure and write."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["case", "launches", "variant", "median_ms", "p20_ms", "p80_ms", "ratio", "device", "torch"])
        for case in CASES:
            for is_recorded in (True, False) if torch.cuda.is_available() else (False,):
                first = None
                for variant in VARIANTS:
                    times = torch.tensor(step_times(case, variant, is_recorded=is_recorded), dtype=torch.float64)
                    median, low, high = (float(times.quantile(q)) for q in (0.5, 0.2, 0.8))
                    first = first or median
                    name = f"{case.name} b{case.batch} n{case.length} padded {case.padding}"
                    numbers = [f"{median:.3f}", f"{low:.3f}", f"{high:.3f}", f"{median / first:.3f}"]
                    launches = "recorded" if is_recorded else "plain"
                    writer.writerow([name, launches, variant, *numbers, device, torch.__version__])
                    file.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
