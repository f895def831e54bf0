"""The paper's first table: every data set and variant, many seeds, the paper's number beside the result."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bayesattn.cli.registry import Request
from bayesattn.evaluation.aggregate import over_runs
from bayesattn.evaluation.runs import environment
from bayesattn.evaluation.threads import one_thread
from bayesattn.files import write_bytes, write_json
from bayesattn_recipes.common import tables as _tables
from bayesattn_recipes.common.reproduce import collect
from bayesattn_recipes.graph.config import GraphConfig, load_config, load_config_graph
from bayesattn_recipes.graph.data import Graph
from bayesattn_recipes.graph.evaluate import available_methods, draw, measure_draws
from bayesattn_recipes.graph.inputs import neighborhood
from bayesattn_recipes.graph.splits import reproduce_splits
from bayesattn_recipes.graph.train import fit

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


def reproduce(request: Request, *, splits: int | None = None) -> Path:
    """Train and measure what is missing, write the table as Markdown, CSV and JSON, and print it.

    Args:
        request: `names` are of `DATASETS`, `variants` of `VARIANTS`. Differences are to `soft`, which is always run.
        splits: Number of random splits in place of the public one; soft attention, rivals and a control (`splits.py`).
    """
    datasets = _tables.choose("datasets", request.names, DATASETS)
    if splits is not None:
        if request.variants is not None:
            given = ",".join(request.variants)
            raise ValueError(f"leave out variants with random splits, which compare all kinds, got {given!r}")
        return reproduce_splits(request, datasets, splits)
    variants = _tables.choose("variants", request.variants, VARIANTS)
    variants = variants if "soft" in variants else ["soft", *variants]
    cells = {
        dataset: collect(request, dataset, variants, GraphRuns(dataset, request.data, request.settings), required="soft")
        for dataset in datasets
    }
    out = request.out
    rows = [row for dataset, by_variant in cells.items() for row in table_rows(dataset, by_variant)]
    text = render(rows)
    _tables.write_csv(out / "graph.csv", rows)
    _tables.write_csv(
        out / "graph-seeds.csv",
        [
            row
            for dataset, found in cells.items()
            for variant, runs in found.items()
            for row in seed_rows(dataset, variant, runs)
        ],
    )
    write_json(out / "graph.json", {"rows": rows, "num_seeds": request.num_seeds, "environment": environment()})
    write_bytes(out / "graph.md", text.encode())
    _tables.print_tables(request.console, text)
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


def seed_rows(dataset: str, variant: str, cells: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per seed: state of the training, and the measures of the posterior mean."""
    rows = []
    for seed, cell in cells.items():
        about = {name: cell[name] for name in ("kept_epoch", "num_epochs", "validation_accuracy", "train_cpu_seconds")}
        found = {
            name: round(cell["methods"]["mean"][name], 5) for name in ("accuracy", "nll", "ece", "scaled_nll", "scaled_ece")
        }
        rows.append({"dataset": dataset, "variant": variant, "seed": seed, **about, **found})
    return rows


def table_rows(dataset: str, cells: dict[str, dict[int, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return one row per variant: the paper's accuracy, ours with its interval, the paired difference to soft, the rest."""
    rows = []
    baseline = {seed: cell["methods"]["mean"]["accuracy"] for seed, cell in cells["soft"].items()}
    for variant, of_seed in cells.items():
        accuracy = over_runs([cell["methods"]["mean"]["accuracy"] for cell in of_seed.values()])
        difference = _tables.paired({seed: cell["methods"]["mean"]["accuracy"] for seed, cell in of_seed.items()}, baseline)
        paper = PAPER[variant][DATASETS.index(dataset)]
        row = {
            "dataset": dataset,
            "variant": variant,
            "num_seeds": len(of_seed),
            "paper_accuracy": paper,
            "accuracy": 100 * accuracy.value,
            "accuracy_low": None if accuracy.low is None else 100 * accuracy.low,
            "accuracy_high": None if accuracy.high is None else 100 * accuracy.high,
            "difference_to_soft": 100 * difference.difference.value,
            "difference_low": None if difference.difference.low is None else 100 * difference.difference.low,
            "difference_high": None if difference.difference.high is None else 100 * difference.difference.high,
            "p_value": difference.p_value,
        }
        methods = list(next(iter(of_seed.values()))["methods"])
        # the second method draws attention (soft: dropout masks) alone, the last is the published protocol
        for method, names in (("mean", ("nll", "ece", "scaled_nll", "scaled_ece")), (methods[1], ("pavpu_05",))):
            for name in names:
                row[name] = over_runs([cell["methods"][method][name] for cell in of_seed.values()]).value
        row["pavpu_05_with_dropout"] = over_runs(
            [cell["methods"][methods[-1]]["pavpu_05"] for cell in of_seed.values()]
        ).value
        row["train_cpu_seconds"] = over_runs([cell["train_cpu_seconds"] for cell in of_seed.values()]).value
        rows.append(row)
    return rows


def render(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table in Markdown."""
    header = [
        "data set, variant", "seeds", "paper", "ours", "difference to soft", "p", "NLL", "ECE", "NLL scaled", "ECE scaled",
        "PAvPU attention", "PAvPU + dropout",
    ]  # fmt: skip
    lines = []
    for row in rows:
        half = {name: _half(row[f"{name}_low"], row[f"{name}_high"]) for name in ("accuracy", "difference")}
        is_soft = row["variant"] == "soft"
        lines.append(
            [
                f"{row['dataset']} {row['variant']}",
                str(row["num_seeds"]),
                f"{row['paper_accuracy']:.2f}",
                f"{row['accuracy']:.2f}{half['accuracy']}",
                "–" if is_soft else f"{row['difference_to_soft']:+.2f}{half['difference']}",
                "–" if is_soft else _tables.show_p(row["p_value"]),
                f"{row['nll']:.3f}",
                f"{row['ece']:.3f}",
                f"{row['scaled_nll']:.3f}",
                f"{row['scaled_ece']:.3f}",
                "–" if is_soft else f"{100 * row['pavpu_05']:.1f}",
                f"{100 * row['pavpu_05_with_dropout']:.1f}",
            ]
        )
    note = (
        "Test accuracy in percent, mean over seeds ± half a 95 % t-interval; difference and p of a paired t-test over "
        "seeds. NLL and ECE of the posterior mean, as it is and after temperature scaling on the validation nodes. PAvPU in "
        f"percent, {NUM_SAMPLES} draws, paired t-test on the logits, threshold 0.05: attention alone drawn, and with "
        "dropout as in the authors' code.\n"
    )
    return _tables.markdown(header, lines) + "\n" + note


def _half(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f" ± {(high - low) / 2:.2f}"
