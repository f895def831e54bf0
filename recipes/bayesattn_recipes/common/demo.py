"""A demo of a recipe: its runs, one per core at a time, and tables of their means over the seeds."""

import dataclasses
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from bayesattn.cli import registry
from bayesattn.evaluation.aggregate import Summary, over_runs
from bayesattn.evaluation.report import measure_run
from bayesattn.evaluation.report.names import method_name
from bayesattn.evaluation.runs import write_predictions
from bayesattn.files import RunError, write_json
from bayesattn.scalars import check_count
from bayesattn_recipes.common.parallel import run_all
from bayesattn_recipes.common.progress import show_runs

# headings of the usual metrics
QUALITY = {"accuracy": "accuracy ↑", "nll": "NLL ↓", "ece": "ECE ↓", "pavpu_05": "PAvPU ↑"}


class Column(NamedTuple):
    """A column of a table: its heading, and the test sets over which a metric is averaged."""

    heading: str
    metric: str
    splits: tuple[str, ...]


def columns(prefix: str, splits: Sequence[str], headings: Mapping[str, str]) -> dict[str, Column]:
    """Return a column for every metric of `headings` over some test sets; its key begins with `prefix`."""
    return {prefix + metric: Column(heading, metric, tuple(splits)) for metric, heading in headings.items()}


def plan(
    recipe: str,
    names: Sequence[str],
    out: Path,
    *,
    num_seeds: int,
    num_samples: int,
    epochs: int | None,
    noise: tuple[float, ...] = (),
    num_methods: int | None = None,
) -> dict[str, tuple[Any, ...]]:
    """Return the runs of a demo by the names that the console shows: arguments of `train_and_predict`.

    Args:
        recipe: Its name.
        names: Configs; each is trained with seeds 0, 1, …
        out: Folder for the run folders.
        num_seeds: Runs per config.
        num_samples: Draws per prediction.
        epochs: Overrides the configs' number of epochs.
        noise: Strengths of the noisy test sets.
        num_methods: How many of the recipe's methods are predicted with; None for all.
    """
    check_count("num_seeds", num_seeds)
    load_config = registry.find(recipe).load("train").load_config
    settings = [] if epochs is None else [f"training.epochs={epochs}"]
    work = {}
    for name, seed in itertools.product(names, range(num_seeds)):
        config = load_config(name, [*settings, f"seed={seed}"])
        shown = f"{recipe}: {config.attention.variant}, seed {seed}"
        work[shown] = (recipe, config, out / f"{name}-{seed}", num_samples, noise, num_methods)
    return work


def train_and_predict(
    recipe: str, config: Any, folder: Path, num_samples: int, noise: tuple[float, ...], num_methods: int | None
) -> None:
    """Train one model, in place of a run that is in the folder, and write its predictions."""
    found = registry.find(recipe)
    found.load("train").train_run(config, folder, overwrite=True)
    evaluate = found.load("evaluate")
    methods = evaluate.available_methods(config)[:num_methods]
    write_predictions(folder, evaluate.predict_run(folder, num_samples=num_samples, noise=noise, methods=methods))


def run_side_by_side(
    function: Callable[..., Any],
    work: Mapping[str, tuple[Any, ...]],
    console: Console,
    on_end: Callable[[str], Any] = lambda name: None,
) -> None:
    """Call `function(*arguments)` for every entry; each call computes with one thread and writes its own files.

    Args:
        function: A function of a module, which other processes can import.
        work: Arguments by name; the names are shown.
        console: Where to show progress.
        on_end: Called with the name of an entry that has finished or failed.

    Raises:
        RunError: A call failed.
    """

    def end(name: str) -> None:
        display.end(name)
        on_end(name)

    with show_runs(console, len(work)) as display:
        outcome = run_all(
            function,
            work,
            num_processes=min(len(work), os.cpu_count() or 1),
            on_begin=display.begin,
            on_end=end,
        )
    if outcome.failures:
        raise RunError(f"the demo is not complete: {outcome.reasons()}\n\n{next(iter(outcome.failures.values()))}")


def summarize(folders: Sequence[Path], chosen: Mapping[str, Column], out: Path) -> dict[str, dict[str, Summary]]:
    """Measure runs; return the columns of every variant and method over the runs, and write them as `summary.json`.

    Test sets are averaged inside each run before the mean over runs.
    """
    rows: dict[str, dict[str, list[float]]] = {}
    for run in [measure_run(folder, num_resamples=0) for folder in folders]:
        for method, result in run["methods"].items():
            row = rows.setdefault(f"{run['variant']}, {method_name(method)}", {})
            for key, column in chosen.items():
                found = [result["splits"][split]["metrics"].get(column.metric) for split in column.splits]
                if None not in found:
                    row.setdefault(key, []).append(sum(value["value"] for value in found) / len(found))
    summaries = {name: {key: over_runs(values) for key, values in row.items()} for name, row in rows.items()}
    plain = {row: {key: dataclasses.asdict(cell) for key, cell in cells.items()} for row, cells in summaries.items()}
    write_json(out / "summary.json", plain)
    return summaries


def print_table(
    title: str,
    chosen: Mapping[str, Column],
    summaries: dict[str, dict[str, Summary]],
    console: Console,
    *,
    first: str = "attention, prediction",
    space: int = 1,
) -> None:
    """Print some of the columns; `first` is the heading of the rows, `space` widens the columns."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, space, 0, 0), pad_edge=False)
    table.add_column(first, no_wrap=True)
    for column in chosen.values():
        table.add_column(column.heading, justify="right", no_wrap=True)
    for name, row in summaries.items():
        table.add_row(name, *(str(row[key]) if key in row else "–" for key in chosen))
    console.print(title, style="bold", highlight=False)
    console.print(table)


def mean_over(num_seeds: int) -> str:
    """Return what the numbers of the tables are, to begin the note below them."""
    return "Mean over " + ("1 seed" if num_seeds == 1 else f"{num_seeds} seeds ± half a 95 % t-interval")
