"""Visual question answering with equal search: soft attention, Bayesian variants and a control, eight settings each.

Settings are scored on the validation questions by a seed that is not reported, by NLL. The best one is trained with seeds
0, 1, …, and its deterministic answers to the test questions are measured, on clean and on noisy features.
"""

import dataclasses
from pathlib import Path
from typing import get_args

from bayesattn.cli.registry import Request
from bayesattn.evaluation.threads import one_thread
from bayesattn_recipes.baselines.grids import SHAPES, SPREADS, crossed
from bayesattn_recipes.common.search import Key, Kind, Study, config_loader
from bayesattn_recipes.common.tables import Column, choose
from bayesattn_recipes.vqa.data import DatasetName, load_splits
from bayesattn_recipes.vqa.evaluate import Condition, choose_device, tabulate, training_precision
from bayesattn_recipes.vqa.train import fit, load_config

_DROPOUTS = ("model.dropout", (0, 0.05, 0.1, 0.2))
_SOFT = crossed(_DROPOUTS, ("model.attention_dropout", (0, 0.1)))
# the eighth is the paper's own (App. C.2)
_PAPER = ("attention.weibull_k=1000", "attention.gamma_beta=1e-6")
_WEIBULL = (*SHAPES, _PAPER)
KINDS = {
    "soft": Kind("soft", "mean", _SOFT),
    "BAM-NOKL": Kind("nokl", "mean", (*SHAPES, _PAPER[:1])),
    "BAM-LF": Kind("lf", "mean", SPREADS),
    "BAM-LC": Kind("lc", "mean", SPREADS),
    "BAM-WF": Kind("wf", "mean", _WEIBULL),
    "BAM-WC": Kind("wc", "mean", _WEIBULL),
    "BAM-WC, paper's k and β": Kind("wc", "mean", (_PAPER,)),
    "uniform": Kind("uniform", "mean", crossed(_DROPOUTS, ("learning_rate", (1e-3, 2e-3)))),
}
SEARCH_SEEDS = (1001,)
NOISE = 1.0
MEASURES = ("accuracy", "noisy_accuracy", "nll")
COLUMNS = (
    Column("accuracy", "accuracy", 100.0),
    Column("under noise", "noisy_accuracy", 100.0),
    Column("NLL", "nll", digits=3),
)
_config = config_loader(load_config)


def compare(request: Request) -> Path:
    """Search, train and measure what is missing, and write the table; on shapes unless data sets are named."""
    study = Study(
        run_cell, lambda key: {"config": dataclasses.asdict(_config(key)), "noise": NOISE}, (request.data,), request
    )
    datasets = choose("datasets", request.names, get_args(DatasetName), ["shapes"])
    return study.table("vqa-tuned", KINDS, datasets, MEASURES, COLUMNS, search_seeds=SEARCH_SEEDS, prefix=True)


@one_thread()
def run_cell(key: Key, data: Path | None) -> dict[str, dict[str, float]]:
    """Train a model, and return the measures of its deterministic answers."""
    config = _config(key)
    splits = load_splits(config.data, data)
    model = fit(config, data)[0].to(choose_device()).eval()
    found = {}
    with training_precision(config):
        for name, split, variance in (
            ("validation", splits["validation"], 0.0),
            ("test", splits["test"], 0.0),
            ("noisy", splits["test"], NOISE * splits["test"].regions.variance),
        ):
            found[name] = tabulate(model, Condition(name, split, variance), ["mean"], 1, seed=0)["mean"]
    return {
        "mean": {
            "accuracy": float(found["test"].accuracy.mean()),
            "noisy_accuracy": float(found["noisy"].accuracy.mean()),
            "nll": float(found["test"].nll.mean()),
            "validation_nll": float(found["validation"].nll.mean()),
        }
    }
