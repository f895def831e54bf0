"""Random splits of the citation graphs: soft attention, its rivals and a control, each with the same search effort.

Every kind gets eight settings. They are scored on the validation nodes of the splits in `SEARCH_SPLITS`, which are not
reported, by NLL after a temperature. The best one is trained on splits 1, 2, …, and measured on their test nodes.
"""

import dataclasses
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch

from bayesattn.cli.registry import Request
from bayesattn.evaluation.threads import one_thread
from bayesattn_recipes.baselines.grids import crossed
from bayesattn_recipes.common.search import Key, Kind, Study, config_loader, cross_fitted_nll
from bayesattn_recipes.graph.data import Graph, load_graph, random_split
from bayesattn_recipes.graph.evaluate import draw, measure_draws
from bayesattn_recipes.graph.inputs import neighborhood
from bayesattn_recipes.graph.train import fit, load_config

_DECAY = ("weight_decay", (5e-4, 2e-3))
_SOFT_GRID = crossed(("dropout", (0.2, 0.4, 0.6, 0.8)), _DECAY)
_NOISE_GRID = crossed(("attention.weibull_k", (0.5, 5)), ("dropout", (0.4, 0.6)), _DECAY)
_SPREAD_GRID = crossed(("attention.sigma_p", (3, 30, 300, 1000)), _DECAY)
_SPREAD = ("attention.sigma_q=0.3", "dropout=0.6")
KINDS = {
    "soft": Kind("soft-tuned", "mean", _SOFT_GRID),
    "MC dropout": Kind("soft-tuned", "dropout", _SOFT_GRID),
    "ensemble of 3": Kind("soft-tuned", "mean", _SOFT_GRID, members=3),
    "BAM-NOKL": Kind("nokl-tuned", "mean", _NOISE_GRID),
    "BAM-LF": Kind("wc-tuned", "mean", _SPREAD_GRID, ("attention.variant=BAM-LF", *_SPREAD)),
    "BAM-LC": Kind("wc-tuned", "mean", _SPREAD_GRID, ("attention.variant=BAM-LC", *_SPREAD)),
    "BAM-WF": Kind("wc-tuned", "mean", _NOISE_GRID, ("attention.variant=BAM-WF",)),
    "BAM-WC": Kind("wc-tuned", "mean", _NOISE_GRID),
    "uniform": Kind("soft-tuned", "mean", _SOFT_GRID, ("attention.variant=uniform",)),
}
# the best epoch of these graphs comes early
SHARED = ("training.epochs=200", "training.patience=50")
SEARCH_SPLITS = (1001, 1002)
NUM_SAMPLES = 20
MEASURES = ("accuracy", "nll", "ece", "aurc", "scaled_nll", "scaled_ece")
# the members of an ensemble have their own seeds, and the split of the single networks they are compared with
_config = config_loader(load_config, lambda key: [f"split={key.seeds[0] // len(key.seeds)}"])


def reproduce_splits(request: Request, datasets: Sequence[str], splits: int) -> Path:
    """Search, train and measure what is missing, and write the table as Markdown and its runs as CSV.

    Args:
        request: What was asked for; instead of seeds there are splits.
        datasets: Some of Cora, Citeseer and PubMed.
        splits: Random splits, with numbers 1, 2, …

    Raises:
        RunError: There was no time for all runs of the search.
    """
    study = Study(
        run_cell,
        lambda key: {"settings": dataclasses.asdict(_config(key)), "seeds": list(key.seeds), "num_samples": NUM_SAMPLES},
        (request.data,),
        request,
    )
    options = {"search_seeds": SEARCH_SPLITS, "seeds": range(1, splits + 1), "prefix": True, "shared": SHARED}
    return study.table("graph-splits", KINDS, datasets, MEASURES, **options)


@lru_cache(maxsize=3)
def _public_graph(dataset: str, data: Path | None) -> Graph:
    return load_graph(dataset, data)


@one_thread()
def run_cell(key: Key, data: Path | None) -> dict[str, dict[str, float]]:
    """Train the networks of a cell, and return the measures of their mean and of their draws."""
    config = _config(key)
    assert config.split is not None
    graph = random_split(_public_graph(config.dataset, data), config.split)
    models = [fit(dataclasses.replace(config, seed=seed), graph)[0] for seed in key.seeds]
    parts = [graph.splits["validation"], graph.splits["test"]]
    labels, sizes = [graph.labels[nodes] for nodes in parts], [len(nodes) for nodes in parts]
    inputs = neighborhood(graph, torch.cat(parts)).to(next(models[0].parameters()).device)
    cell = {}
    for method in ("mean", "attention" if config.attention.is_stochastic else "dropout"):
        drawn = [draw(model, inputs, method, NUM_SAMPLES, seed=0)[:, : sum(sizes)].cpu() for model in models]
        validation, test = torch.cat(drawn).split(sizes, dim=1)
        cell[method] = measure_draws(validation, labels[0], test, labels[1])
        cell[method]["validation_nll"] = cross_fitted_nll(torch.softmax(validation, dim=-1), labels[0])
    return cell
