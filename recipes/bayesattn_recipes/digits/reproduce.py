"""A small encoder trained on few images: soft attention, its rivals and a control, each with the same search effort.

Every kind gets sixteen settings. They are scored on the validation images by two seeds that are not reported, by NLL after
a temperature. The best one is trained with seeds 0, 1, …, and measured on the test images and their shifts.
"""

import dataclasses
import itertools
from pathlib import Path
from typing import Any, get_args

import torch

from bayesattn.cli.registry import Request
from bayesattn.evaluation.threads import one_thread
from bayesattn_recipes.baselines.grids import crossed
from bayesattn_recipes.common.search import Key, Kind, Study, best_setting, config_loader, cross_fitted_nll, measure_scaled
from bayesattn_recipes.common.tables import choose, write_csv
from bayesattn_recipes.digits.data import SHIFTS, DatasetName, evaluation_splits
from bayesattn_recipes.digits.evaluate import draw
from bayesattn_recipes.digits.train import fit, load_config

_HIDDEN = ("dropout", (0.0, 0.1, 0.2, 0.3))
_SHAPES = ("attention.weibull_k", (1, 2, 5, 10))
_SOFT_GRID = crossed(_HIDDEN, ("attention.attention_dropout", (0.0, 0.1, 0.2, 0.3)))
_UNIFORM_GRID = crossed(_HIDDEN, ("weight_decay", (1e-3, 1e-2, 3e-2, 1e-1)))
# soft attention with its own dropout rate for the weights
_SOFT = ("attention.variant=mc-dropout",)
KINDS = {
    "soft": Kind("soft", "mean", _SOFT_GRID, _SOFT),
    "MC dropout": Kind("soft", "dropout", _SOFT_GRID, _SOFT),
    "ensemble of 3": Kind("soft", "mean", _SOFT_GRID, _SOFT, members=3),
    "BAM-NOKL": Kind("nokl", "attention", crossed(_SHAPES, _HIDDEN)),
    "BAM-WC": Kind("wc", "attention", crossed(_SHAPES, ("attention.gamma_beta", (0.1, 1)), ("dropout", (0.1, 0.2)))),
    "uniform": Kind("soft", "mean", _UNIFORM_GRID, ("attention.variant=uniform",)),
}
DATASETS = get_args(DatasetName)
SEARCH_SEEDS = (1001, 1002)
NUM_SAMPLES = 20
NOISE = 1.0
CONDITIONS = ("test", f"noise-{NOISE:g}", *SHIFTS)
MEASURES = ("accuracy", "nll", "aurc", "scaled_nll", "scaled_ece")
# the effect of single settings, around the chosen ones of BAM-WC
SENSITIVITY = (
    *crossed(("attention.weibull_k", (1, 2, 5, 10, 20, 50, 100))),
    *crossed(("attention.gamma_beta", (0.01, 0.1, 1, 10))),
    *crossed(("attention.prior_hidden_dim", (1, 5, 20, 50))),
)
SENSITIVITY_SEEDS = 5
_config = config_loader(load_config)


def reproduce(request: Request) -> Path:
    """Search, train and measure what is missing, and write the table as Markdown and its runs as CSV.

    Args:
        request: `names` are of `DATASETS`, by default the digits; files are named after the data set. `variants` must be
            None: all kinds are compared. `data` is not used: the images come with scikit-learn, or are generated.

    Raises:
        RunError: There was no time for all runs of the search.
    """
    if request.variants is not None:
        raise ValueError("leave out --variants: digits always compares all kinds")
    study = Study(
        run_cell,
        lambda key: {"settings": dataclasses.asdict(_config(key)), "seeds": list(key.seeds), "num_samples": NUM_SAMPLES},
        (),
        request,
    )
    for dataset in choose("datasets", request.names, DATASETS, DATASETS[:1]):
        table = _compare(dataset, study)
    return table


def _compare(dataset: str, study: Study) -> Path:
    """Run the search, the chosen settings and the changes around them, and write the files of one data set."""
    # the default is left out: the names of its cells stay as they were
    shared = () if dataset == DATASETS[0] else (f"dataset={dataset}",)
    search, rows = study.compare(
        KINDS,
        [dataset],
        search_seeds=SEARCH_SEEDS,
        measures=lambda found: [{"condition": name, **{m: found[name][m] for m in MEASURES}} for name in CONDITIONS],
        shared=shared,
    )
    kind = KINDS["BAM-WC"]
    chosen = best_setting(row for row in search if row["kind"] == "BAM-WC").split()
    changed = {
        (change, seed): Key(kind.config, (*kind.fixed, *chosen, *shared, *study.request.settings, change), (seed,))
        for (change,), seed in itertools.product(SENSITIVITY, range(SENSITIVITY_SEEDS))
    }
    found = study.cells(changed.values())
    around = [
        {"changed": change, "seed": seed, **{name: round(found[key]["attention"]["test"][name], 6) for name in MEASURES}}
        for (change, seed), key in changed.items()
        if key in found
    ]
    if around:
        write_csv(study.request.out / f"{dataset}-sensitivity.csv", around)
    return study.write(dataset, search, rows, shown=[row for row in rows if row["condition"] == "test"])


@one_thread()
def run_cell(key: Key) -> dict[str, dict[str, Any]]:
    """Train the networks of a cell, and return the measures of their mean and of their draws."""
    config = _config(key)
    models = [fit(dataclasses.replace(config, seed=seed))[0].cpu() for seed in key.seeds]
    splits = {
        name: split
        for name, split in evaluation_splits(config.train_size, (NOISE,), config.dataset).items()
        if name in ("validation", *CONDITIONS)
    }
    labels = {name: split.labels for name, split in splits.items() if split.labels is not None}
    cell: dict[str, dict[str, Any]] = {}
    drawn = {"mc-dropout": ("mean", "dropout"), "uniform": ("mean",)}
    for method in drawn.get(config.attention.variant, ("attention",)):
        samples = {
            name: torch.cat([draw(model, split.images, method, NUM_SAMPLES, seed=0) for model in models])
            for name, split in splits.items()
        }
        cell[method] = {condition: measure_scaled(samples, labels, condition) for condition in CONDITIONS}
        cell[method]["validation_nll"] = cross_fitted_nll(samples["validation"], labels["validation"])
    return cell
