"""Captioning with equal search: soft attention, Bayesian variants, the paper's ablations and a control, eight settings each.

Settings are scored on the validation images by a seed that is not reported, by NLL per word of the deterministic model.
The best one is trained with seeds 0, 1, …, and its captions of the test images are scored.
"""

import dataclasses
from functools import lru_cache
from pathlib import Path
from typing import get_args

from bayesattn.cli.registry import Request
from bayesattn.evaluation.threads import one_thread
from bayesattn_recipes.baselines.grids import SHAPES, SPREADS, crossed
from bayesattn_recipes.captioning.data import CaptionData, DatasetName, load_data
from bayesattn_recipes.captioning.scoring import NO_PACKAGE, has_package, score
from bayesattn_recipes.captioning.train import caption_split, fit, kept_row, load_config, search_options
from bayesattn_recipes.common.search import Key, Kind, Study, config_loader
from bayesattn_recipes.common.tables import Column, choose

_DROPOUTS = ("dropout", (0, 0.1, 0.2, 0.3))
# soft attention with its own dropout rate for the weights
_SOFT = ("attention.variant=mc-dropout",)
# the eighth is the paper's own (App. C.3)
_PAPER = ("attention.weibull_k=10", "attention.gamma_beta=1e-6")
_WEIBULL = (*SHAPES, _PAPER)
KINDS = {
    "soft": Kind("soft", "mean", crossed(_DROPOUTS, ("attention.attention_dropout", (0, 0.1))), _SOFT),
    "BAM-NOKL": Kind("nokl", "mean", (*SHAPES, ("attention.weibull_k=1000",))),
    "BAM-LF": Kind("lf", "mean", SPREADS),
    "BAM-LC": Kind("lc", "mean", SPREADS),
    "BAM-WF": Kind("wf", "mean", _WEIBULL),
    "BAM-WC": Kind("wc", "mean", _WEIBULL),
    "BAM-WC, paper's k and β": Kind("wc", "mean", (_PAPER,)),
    "BAM-WC, KL at a draw": Kind("sampled-kl", "mean", _WEIBULL),
    "Gaussian weights": Kind(
        "gaussian-weights",
        "mean",
        crossed(("attention.gaussian_sigma", (0.03, 0.1, 0.3, 1)), ("training.kl_schedule.final", (0.0002, 0.02))),
    ),
    "exact marginal": Kind("exact", "mean", crossed(_DROPOUTS, ("attention.top_keys", (2, 16)))),
    "uniform": Kind("uniform", "mean", crossed(_DROPOUTS, ("learning_rate", (4e-3, 8e-3)))),
}
SEARCH_SEEDS = (1001,)
MEASURES = ("BLEU-4", "CIDEr", "ROUGE-L", "validation_nll")
COLUMNS = (Column("BLEU-4", "BLEU-4"), Column("CIDEr", "CIDEr"), Column("NLL", "validation_nll", digits=3))
_config = config_loader(load_config)


def compare(request: Request) -> Path:
    """Search, train and measure what is missing, and write the table; on shapes unless data sets are named."""
    study = Study(run_cell, lambda key: {"config": dataclasses.asdict(_config(key))}, (request.data,), request)
    if not has_package():
        raise ValueError(f"a search scores captions by CIDEr, which {NO_PACKAGE}")
    datasets = choose("datasets", request.names, get_args(DatasetName), ["shapes"])
    return study.table("captioning-tuned", KINDS, datasets, MEASURES, COLUMNS, search_seeds=SEARCH_SEEDS, prefix=True)


@lru_cache(maxsize=1)
def _data(dataset: DatasetName, data: Path | None) -> CaptionData:
    return load_data(dataset, data)


@one_thread()
def run_cell(key: Key, data: Path | None) -> dict[str, dict[str, float]]:
    """Train a model, and return the scores of its captions."""
    config = _config(key)
    images = _data(config.dataset, None if config.dataset == "shapes" else data)
    model, log = fit(config, images)
    split = images.splits["test"]
    captions = caption_split(model.eval(), images, split, **search_options(config))
    # the plain tokenizer: the same numbers with and without Java
    values = score(captions, split.captions, use_java=False).values
    return {"mean": {**values, "validation_nll": kept_row(config, log)["validation_nll"]}}
