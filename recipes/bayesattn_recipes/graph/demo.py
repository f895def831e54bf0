"""The demo's last part: soft and Bayesian graph attention on a generated graph, several seeds each."""

import dataclasses
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from bayesattn.evaluation.aggregate import Summary, over_runs
from bayesattn.evaluation.report import measure_run
from bayesattn.evaluation.report.names import method_name
from bayesattn.evaluation.runs import write_predictions
from bayesattn.files import write_json
from bayesattn.scalars import check_count
from bayesattn_recipes.common.demo import run_side_by_side
from bayesattn_recipes.graph.config import GraphConfig, load_config_graph
from bayesattn_recipes.graph.evaluate import available_methods, predict_run
from bayesattn_recipes.graph.train import load_config, train_run

CONFIG_NAMES = ("generated-soft", "generated-wc")
COLUMNS = {"accuracy": "accuracy ↑", "nll": "NLL ↓", "ece": "ECE ↓", "pavpu_05": "PAvPU ↑", "aurc": "AURC ↓"}


def run_demo(
    out: Path, *, num_seeds: int = 3, num_samples: int = 20, epochs: int | None = None, console: Console
) -> list[Path]:
    """Train, evaluate and print the comparison; return the run folders for the demo's report.

    Args:
        out: Folder for the run folders; runs of an earlier demo in it are replaced.
        num_seeds: Runs per variant.
        num_samples: Draws per prediction.
        epochs: Overrides the configs' number of epochs, for a quick look.
        console: Where to print.
    """
    check_count("num_seeds", num_seeds)
    settings = [] if epochs is None else [f"training.epochs={epochs}"]
    rows: dict[str, dict[str, list[float]]] = {}
    work: dict[str, tuple[GraphConfig, Path, int]] = {}
    for name in CONFIG_NAMES:
        config = load_config(name, settings)
        for seed in range(num_seeds):
            shown = f"graph: {config.attention.variant}, seed {seed}"
            work[shown] = (dataclasses.replace(config, seed=seed), out / f"{name}-{seed}", num_samples)
    run_side_by_side(train_and_predict, work, console)
    for config, folder, _ in work.values():
        for method, result in measure_run(folder, num_resamples=0)["methods"].items():
            row = rows.setdefault(f"{config.attention.variant}, {method_name(method)}", {})
            for key in COLUMNS:
                if key in result["splits"]["test"]["metrics"]:
                    row.setdefault(key, []).append(result["splits"]["test"]["metrics"][key]["value"])
    graph = load_config_graph(load_config(CONFIG_NAMES[0]), None)
    summaries = {name: {key: over_runs(values) for key, values in row.items()} for name, row in rows.items()}
    print_table(summaries, graph.num_nodes, len(graph.splits["train"]), num_seeds, num_samples, console)
    plain = {row: {key: dataclasses.asdict(cell) for key, cell in cells.items()} for row, cells in summaries.items()}
    write_json(out / "summary.json", plain)
    return [folder for _, folder, _ in work.values()]


def train_and_predict(config: GraphConfig, folder: Path, num_samples: int) -> None:
    """Train one model and write its predictions."""
    train_run(config, folder, overwrite=True)
    methods = available_methods(config)[:2]
    write_predictions(folder, predict_run(folder, num_samples=num_samples, noise=(), methods=methods))


def print_table(
    summaries: dict[str, dict[str, Summary]], nodes: int, labeled: int, num_seeds: int, num_samples: int, console: Console
) -> None:
    """Print the comparison on the test nodes."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("attention", no_wrap=True)
    for heading in COLUMNS.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for name, row in summaries.items():
        table.add_row(name, *(str(row[key]) if key in row else "–" for key in COLUMNS))
    console.print(f"A generated graph: {nodes} nodes, {labeled} with a label", style="bold", highlight=False)
    console.print(table)
    seeds = "1 seed" if num_seeds == 1 else f"{num_seeds} seeds ± half a 95 % t-interval"
    console.print(f"Mean over {seeds}, {num_samples} draws; test nodes.", highlight=False)
