"""How the configs were chosen: every setting of a grid, three seeds each, ranked by validation NLL. No test image is read.

    python -m bayesattn_recipes.digits.search soft --workers 2

First `soft` settles what all variants share (size, dropout, optimiser), on the soft model's own NLL, so that the
baseline gets the settings that suit it best; then each Bayesian grid settles its noise and prior.
"""

import argparse
import itertools
import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from bayesattn.evaluation.runs import write_bytes
from bayesattn.metrics.calibration import expected_calibration_error
from bayesattn_recipes.digits.data import load_splits
from bayesattn_recipes.digits.evaluate import draw
from bayesattn_recipes.digits.train import DigitsConfig, fit, load_config

SEEDS = (100, 101, 102)
GRIDS: dict[str, dict[str, list[Any]]] = {
    "soft": {
        "num_layers": [1, 2],
        "dropout": [0.1, 0.2],
        "training.epochs": [60, 100],
        "learning_rate": [3e-3, 5e-3],
    },
    "nokl": {"attention.weibull_k": [0.5, 1, 2, 5, 10]},
    "wc": {
        "attention.weibull_k": [1, 2, 5, 10],
        "attention.gamma_beta": [1e-2, 1e-1, 1],
        "attention.kl_reduction": ["sum", "row_mean", "mean"],
    },
    "wf": {
        "attention.weibull_k": [1, 2, 5, 10],
        # with log-softmax scores β is without influence on a fixed prior's gradient
        "attention.gamma_alpha": [1e-2, 1e-1],
    },
    "lc": {"attention.sigma_q": [0.1, 0.3, 1, 2], "attention.sigma_p": [1, 10, 100]},
    "lf": {"attention.sigma_q": [0.1, 0.3, 1, 2], "attention.sigma_p": [1, 10, 100]},
}


def measure(config: DigitsConfig) -> dict[str, float]:
    """Train one model and return its validation NLL, calibration error and accuracy, plain and with 20 draws."""
    model, log = fit(config)
    split = load_splits(config.train_size)["validation"]
    assert split.labels is not None
    result = {"train_kl": log.rows[-1]["train_kl"]}
    sampled = "attention" if config.attention.is_stochastic else "dropout"
    for name, method in (("plain", "mean"), ("sampled", sampled)):
        mean = draw(model, split.images, method, 20, seed=0).mean(dim=0)
        confidence, answer = mean.max(dim=-1)
        result[f"{name}_nll"] = float(F.nll_loss(mean.log(), split.labels))
        result[f"{name}_ece"] = float(expected_calibration_error(confidence, answer == split.labels))
        result[f"{name}_accuracy"] = float((answer == split.labels).double().mean())
    return result


def _measure_settings(job: tuple[str, list[str]]) -> dict[str, float]:
    torch.set_num_threads(1)
    name, settings = job
    return measure(load_config(name, settings))


def search(name: str, grid: dict[str, list[Any]], workers: int) -> list[dict[str, Any]]:
    """Return one row per setting, averaged over `SEEDS`, best first."""
    settings = [[f"{key}={value}" for key, value in zip(grid, values)] for values in itertools.product(*grid.values())]
    jobs = [(name, [*setting, f"seed={seed}"]) for setting in settings for seed in SEEDS]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        results = list(pool.map(_measure_settings, jobs))
    rows = []
    for index, setting in enumerate(settings):
        runs = results[index * len(SEEDS) : (index + 1) * len(SEEDS)]
        rows.append({"settings": setting, **{key: sum(run[key] for run in runs) / len(runs) for key in runs[0]}})
    return sorted(rows, key=lambda row: row["plain_nll" if name == "soft" else "sampled_nll"])


def main() -> None:
    """Run one grid, print its table and optionally write it as JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grid", choices=list(GRIDS))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = search(arguments.grid, GRIDS[arguments.grid], arguments.workers)
    for row in rows:
        numbers = "  ".join(f"{key} {value:.3f}" for key, value in row.items() if key != "settings")
        print(f"{' '.join(row['settings']):80s} {numbers}")
    if arguments.out:
        write_bytes(arguments.out, "".join(json.dumps(row) + "\n" for row in rows).encode())


if __name__ == "__main__":
    main()
