"""The paper's first table: every data set and variant, many seeds, the paper's number beside the result."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bayesattn.cli.registry import Request
from bayesattn.evaluation.aggregate import Summary, over_runs
from bayesattn.evaluation.threads import one_thread
from bayesattn.files import write_bytes
from bayesattn_recipes.common.reproduce import collect
from bayesattn_recipes.common.tables import (
    Cells,
    Column,
    choose,
    difference_table,
    mean_table,
    paired,
    print_tables,
    write_csv,
)
from bayesattn_recipes.graph.config import GraphConfig, load_config_graph
from bayesattn_recipes.graph.data import Graph
from bayesattn_recipes.graph.evaluate import available_methods, draw, measure_draws
from bayesattn_recipes.graph.inputs import neighborhood
from bayesattn_recipes.graph.splits import reproduce_splits
from bayesattn_recipes.graph.train import fit, load_config

DATASETS = ("cora", "citeseer", "pubmed")
VARIANTS = ("soft", "nokl", "lf", "lc", "wf", "wc")
# test accuracy in percent: Table 1 of the paper, five runs each
PAPER = {
    "soft": (83.00, 72.50, 77.26),
    "nokl": (83.39, 72.91, 78.50),
    "lf": (83.24, 72.86, 78.30),
    "lc": (83.34, 73.04, 78.76),
    "wf": (83.48, 73.18, 78.50),
    "wc": (83.81, 73.52, 78.82),
}
NUM_SAMPLES = 20
DRAW_SEED = 0


def _read(place: int, name: str) -> Callable[[Mapping[str, Any]], float]:
    return lambda cell: list(cell["methods"].values())[place][name]


# the first method draws nothing, the second attention alone (soft: dropout masks), and the last is the published protocol
MEASURES = {
    **{name: _read(0, name) for name in ("accuracy", "nll", "ece", "scaled_nll", "scaled_ece")},
    "pavpu_05": _read(1, "pavpu_05"),
    "pavpu_05_with_dropout": _read(-1, "pavpu_05"),
    "train_cpu_seconds": lambda cell: cell["train_cpu_seconds"],
}
COLUMNS = (
    Column("accuracy", MEASURES["accuracy"], 100.0),
    Column("NLL", MEASURES["nll"], digits=3),
    Column("ECE", MEASURES["ece"], digits=3),
    Column("NLL scaled", MEASURES["scaled_nll"], digits=3),
    Column("ECE scaled", MEASURES["scaled_ece"], digits=3),
    Column("PAvPU attention", lambda cell: cell["methods"].get("attention", {}).get("pavpu_05"), 100.0, 1),
    Column("PAvPU + dropout", MEASURES["pavpu_05_with_dropout"], 100.0, 1),
)
NOTE = (
    "Mean over seeds ± half a 95 % t-interval, accuracy in percent; p of a paired t-test over seeds. NLL and ECE of the "
    "posterior mean, as it is and after temperature scaling on the validation nodes. PAvPU in percent, "
    f"{NUM_SAMPLES} draws, paired t-test on the logits, threshold 0.05: attention alone drawn, and with dropout as in the "
    "authors' code.\n"
)


def reproduce(request: Request, *, splits: int | None = None) -> Path:
    """Train and measure what is missing, write the table as Markdown and CSV, and print it.

    Args:
        request: `names` are of `DATASETS`, `variants` of `VARIANTS`. Differences are to `soft`, which is always run.
        splits: Number of random splits in place of the public one; soft attention, rivals and a control (`splits.py`).
    """
    datasets = choose("datasets", request.names, DATASETS)
    if splits is not None:
        if request.variants is not None:
            given = ",".join(request.variants)
            raise ValueError(f"leave out variants with random splits, which compare all kinds, got {given!r}")
        return reproduce_splits(request, datasets, splits)
    variants = choose("variants", request.variants, VARIANTS)
    variants = variants if "soft" in variants else ["soft", *variants]
    cells = {
        dataset: collect(request, dataset, variants, GraphRuns(dataset, request.data, request.settings), required="soft")
        for dataset in datasets
    }
    out = request.out
    text = "".join(render(dataset, by_variant) for dataset, by_variant in cells.items()) + NOTE
    write_csv(out / "graph.csv", [row for dataset, found in cells.items() for row in mean_rows(dataset, found)])
    by_seed = [
        row
        for dataset, found in cells.items()
        for variant, runs in found.items()
        for row in seed_rows(dataset, variant, runs)
    ]
    write_csv(out / "graph-seeds.csv", by_seed)
    write_bytes(out / "graph.md", text.encode())
    print_tables(request.console, text)
    return out / "graph.md"


@dataclasses.dataclass(frozen=True)
class GraphRuns:
    """The runs of one data set."""

    dataset: str
    data: Path | None
    settings: Sequence[str] = ()

    def config(self, variant: str, seed: int) -> GraphConfig:
        """Return the config of a run."""
        return load_config(f"{self.dataset}-{variant}", [*self.settings, f"seed={seed}"])

    def identity(self, variant: str, seed: int) -> dict[str, Any]:
        """Return the config of a run, and the settings of its measurement."""
        settings = dataclasses.asdict(self.config(variant, seed))
        return {"config": f"{self.dataset}-{variant}", "settings": settings, "num_samples": NUM_SAMPLES}

    @one_thread()
    def run(self, variant: str, seed: int, folder: Path, on_progress: Callable[[int, int], Any]) -> dict[str, Any]:
        """Train and measure; no run folder is written, because a network trains in seconds."""
        config = self.config(variant, seed)
        return run_seed(config, load_config_graph(config, self.data), on_progress)


def run_seed(
    config: GraphConfig, graph: Graph, on_progress: Callable[[int, int], Any] = lambda done, total: None
) -> dict[str, Any]:
    """Train one network and return its measures."""
    cpu = time.process_time()
    model, log = fit(config, graph, on_progress)
    cpu_seconds = time.process_time() - cpu
    kept = next(row for row in reversed(log.rows) if row["is_best"])
    parts = {name: graph.splits[name] for name in ("validation", "test")}
    inputs = neighborhood(graph, torch.cat(list(parts.values()))).to(next(model.parameters()).device)
    sizes, labels = [len(nodes) for nodes in parts.values()], [graph.labels[nodes] for nodes in parts.values()]
    methods = {}
    for method in available_methods(config):
        logits = draw(model, inputs, method, NUM_SAMPLES, DRAW_SEED)[:, : sum(sizes)].cpu()
        validation, test = logits.split(sizes, dim=1)
        methods[method] = measure_draws(validation, labels[0], test, labels[1])
    return {
        "kept_epoch": kept["epoch"],
        "num_epochs": len(log.rows),
        "validation_accuracy": kept["validation_accuracy"],
        "validation_nll": kept["validation_nll"],
        "train_seconds": round(log.seconds, 3),
        "train_cpu_seconds": round(cpu_seconds, 3),
        "methods": methods,
    }


def seed_rows(dataset: str, variant: str, cells: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per seed: state of the training, and the measures of the posterior mean."""
    rows = []
    for seed, cell in cells.items():
        about = {name: cell[name] for name in ("kept_epoch", "num_epochs", "validation_accuracy", "train_cpu_seconds")}
        found = {name: round(MEASURES[name](cell), 5) for name in ("accuracy", "nll", "ece", "scaled_nll", "scaled_ece")}
        rows.append({"dataset": dataset, "variant": variant, "seed": seed, **about, **found})
    return rows


def mean_rows(dataset: str, cells: Cells) -> list[dict[str, Any]]:
    """Return one row per variant: the paper's accuracy, ours with its interval, the paired difference to soft, the rest."""
    rows = []
    for variant, by_seed in cells.items():
        means = {name: over_runs([read(cell) for cell in by_seed.values()]) for name, read in MEASURES.items()}
        difference = paired(COLUMNS[0].values(by_seed), COLUMNS[0].values(cells["soft"]))
        rows.append({
            "dataset": dataset, "variant": variant, "num_seeds": len(by_seed),
            "paper_accuracy": PAPER[variant][DATASETS.index(dataset)],
            **_percent(("accuracy", "accuracy_low", "accuracy_high"), means.pop("accuracy")),
            **_percent(("difference_to_soft", "difference_low", "difference_high"), difference.difference),
            "p_value": difference.p_value,
            **{name: mean.value for name, mean in means.items()},
        })  # fmt: skip
    return rows


def _percent(names: Sequence[str], summary: Summary) -> dict[str, float | None]:
    ends = (summary.value, summary.low, summary.high)
    return {name: None if end is None else 100 * end for name, end in zip(names, ends, strict=True)}


def render(dataset: str, cells: Cells) -> str:
    """Return the tables of a data set: means beside the paper's accuracy, and differences to soft."""
    paper = {"paper: accuracy": lambda variant: f"{PAPER[variant][DATASETS.index(dataset)]:.2f}"}
    differences = difference_table(cells, COLUMNS[:1], first="difference", label=lambda variant: f"{variant} − soft")
    return f"## {dataset}\n\n{mean_table(cells, COLUMNS, more=paper)}\n" + (f"{differences}\n" if differences else "")
