"""The demo's last part: soft and Bayesian graph attention on a generated graph, several seeds each."""

import dataclasses
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from bayesattn.cli.progress import progress
from bayesattn.evaluation.aggregate import Summary, over_runs
from bayesattn.evaluation.report import measure_run
from bayesattn.evaluation.report.names import method_name
from bayesattn.evaluation.runs import write_predictions
from bayesattn.evaluation.threads import one_thread
from bayesattn.files import write_json
from bayesattn.scalars import check_count
from bayesattn_recipes.common.progress import say_without_bar
from bayesattn_recipes.graph.config import load_config, load_config_graph
from bayesattn_recipes.graph.evaluate import available_methods, predict_run
from bayesattn_recipes.graph.train import train_run

CONFIG_NAMES = ("generated-soft", "generated-wc")
COLUMNS = {"accuracy": "accuracy ↑", "nll": "NLL ↓", "ece": "ECE ↓", "pavpu_05": "PAvPU ↑", "aurc": "AURC ↓"}


def run_demo(
    out: Path, *, num_seeds: int = 3, num_samples: int = 20, epochs: int | None = None, console: Console
) -> list[Path]:
    """Train, evaluate and print the comparison; returns the run folders, which the demo's report takes.

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
    folders, nodes, labeled = [], 0, 0
    with progress(console) as display, one_thread():
        for name in CONFIG_NAMES:
            config = load_config(name, settings)
            graph = load_config_graph(config, None)
            nodes, labeled = graph.num_nodes, len(graph.splits["train"])
            own = [out / f"{name}-{seed}" for seed in range(num_seeds)]
            task = display.add_task(f"training {config.attention.variant}", total=num_seeds)
            for seed, folder in enumerate(own):
                say_without_bar(console, f"graph: {config.attention.variant}, seed {seed}")
                train_run(
                    dataclasses.replace(config, seed=seed),
                    folder,
                    lambda at, of, seed=seed, task=task: display.update(task, completed=seed + at / of),
                    overwrite=True,
                )
                display.update(task, completed=seed + 1)
            task = display.add_task(f"predicting {config.attention.variant}", total=num_seeds)
            for folder in own:
                methods = available_methods(config)[:2]
                write_predictions(folder, predict_run(folder, num_samples=num_samples, noise=(), methods=methods))
                for method, result in measure_run(folder, num_resamples=0)["methods"].items():
                    row = rows.setdefault(f"{config.attention.variant}, {method_name(method)}", {})
                    for key in COLUMNS:
                        if key in result["splits"]["test"]["metrics"]:
                            row.setdefault(key, []).append(result["splits"]["test"]["metrics"][key]["value"])
                display.advance(task)
            folders += own
    summaries = {name: {key: over_runs(values) for key, values in row.items()} for name, row in rows.items()}
    print_table(summaries, nodes, labeled, num_seeds, num_samples, console)
    plain = {row: {key: dataclasses.asdict(cell) for key, cell in cells.items()} for row, cells in summaries.items()}
    write_json(out / "summary.json", plain)
    return folders


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
