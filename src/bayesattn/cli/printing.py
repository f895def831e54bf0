"""Rich tables for the terminal."""

from collections.abc import Iterable
from typing import Any

from rich import box
from rich.columns import Columns
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from bayesattn.cli.registry import Recipe

SHOWN = {"accuracy": "accuracy", "nll": "NLL", "ece": "ECE", "pavpu_05": "PAvPU", "ood_auroc_entropy": "OOD AUROC"}
# shown where a task has them
TASK_METRICS = {
    "exact_match": "EM", "f1": "F1", "matthews": "Matthews", "pearson": "Pearson", "spearman": "Spearman", "rmse": "RMSE",
}  # fmt: skip


def recipe(found: Recipe) -> Group:
    """Return a recipe and its configs, one line per data set (the part of a config's name before the first dash)."""
    lines: dict[str, list[str]] = {}
    for config in found.config_names:
        dataset, dash, _ = config.partition("-")
        lines.setdefault(dataset if dash else "", []).append(config)
    parts: list[Any] = [Text.assemble((found.name, "bold"), f": {found.summary}")]
    for dataset, names in lines.items():
        is_free = not found.needs_files or (found.generated is not None and dataset == found.generated[1])
        note = Text("(needs no files)", style="dim")
        # users copy the names, so keep each whole and on one line
        shown = Columns([*map(Text, names), *([note] if is_free else [])], padding=(0, 2))
        parts.append(Padding(shown, (0, 0, 0, 4)))
    return Group(*parts, "")


def last_row(row: dict[str, Any]) -> Text:
    """Return the last line of a training log."""
    shown = (f"{value:.4g}" if isinstance(value, int | float) else str(value) for value in row.values())
    return Text("  ".join(f"{key} {value}" for key, value in zip(row, shown)))


def metrics(measured: dict[str, Any]) -> Group:
    """Return a table for each method: the main metrics of every split, with half the width of their intervals."""
    from bayesattn.evaluation.report.names import TEST_NAMES, method_name

    parts: list[Any] = []
    for method, result in measured["methods"].items():
        parts.append(Text(f"{measured['variant']}, seed {measured['seed']}, {method_name(method)}", style="bold"))
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        table.add_column("split", no_wrap=True)
        found = {name for values in result["splits"].values() for name in values["metrics"]}
        shown = {name: heading for name, heading in (TASK_METRICS | SHOWN).items() if name in found}
        for heading in shown.values():
            table.add_column(heading, justify="right", no_wrap=True)
        for split, values in result["splits"].items():
            table.add_row(Text(split), *(_cell(values["metrics"].get(name)) for name in shown))
        parts.append(table)
    found = [
        metric
        for result in measured["methods"].values()
        for split in result["splits"].values()
        for name, metric in split["metrics"].items()
        if name in TASK_METRICS | SHOWN
    ]
    notes = []
    if any(metric["low"] is not None for metric in found):
        notes.append("± half a 95 % bootstrap interval over examples")
    tests = dict.fromkeys(TEST_NAMES[metric["test"]] for metric in found if "test" in metric)
    if tests:
        notes.append(f"PAvPU: {' and '.join(tests)}, threshold 0.05")
    return Group(*parts, *([Text("; ".join(notes))] if notes else []))


def environment(found: dict[str, Any]) -> Table:
    """Return versions and devices; a missing optional package is shown as missing."""
    table = Table("what", "found")
    table.add_row("python", found["python"])
    table.add_row("platform", found["platform"])
    table.add_row("devices", ", ".join(found["devices"]))
    table.add_row("threads", str(found["threads"]))
    for package, version in found["packages"].items():
        table.add_row(package, version or "[dim]not installed[/dim]")
    return table


def backends(found: Iterable[tuple[str, str, dict[str, str]]]) -> Table:
    """Return a row for every operation and backend, with a column for every device."""
    rows = list(found)
    table = Table("operation", "backend", *(f"on {device}" for device in rows[0][2]))
    for previous, (operation, backend, states) in zip(["", *(row[0] for row in rows)], rows):
        table.add_row(operation if operation != previous else "", backend, *map(Text, states.values()))
    return table


def _cell(metric: dict[str, Any] | None) -> str:
    from bayesattn.evaluation.aggregate import Summary

    return "–" if metric is None else str(Summary(metric["value"], metric["low"], metric["high"], num_runs=1))
