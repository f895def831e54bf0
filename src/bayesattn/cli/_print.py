"""Rich tables for the terminal."""

from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from bayesattn.report.aggregate import Summary
from bayesattn.report.names import TEST_NAMES, method_name

SHOWN = {"accuracy": "accuracy", "nll": "NLL", "ece": "ECE", "pavpu_05": "PAvPU", "ood_auroc_entropy": "OOD AUROC"}
# shown where a task has them
TASK_METRICS = {
    "exact_match": "EM", "f1": "F1", "matthews": "Matthews", "pearson": "Pearson", "spearman": "Spearman", "rmse": "RMSE",
}  # fmt: skip


def recipes(found: dict[str, tuple[str, list[str]]]) -> Table:
    """Return recipes, what they are, and their configs."""
    table = Table("recipe", "what it is", "configs")
    for name, (text, configs) in found.items():
        table.add_row(name, text, ", ".join(configs))
    return table


def last_row(row: dict[str, Any]) -> Text:
    """Return the last line of a training log."""
    shown = (f"{value:.4g}" if isinstance(value, int | float) else str(value) for value in row.values())
    return Text("  ".join(f"{key} {value}" for key, value in zip(row, shown)))


def metrics(measured: dict[str, Any]) -> Group:
    """Return the main metrics of every split, a table for each method, with half the width of their intervals."""
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
    found = (
        split["metrics"].get("pavpu_05") for result in measured["methods"].values() for split in result["splits"].values()
    )
    tests = dict.fromkeys(TEST_NAMES[metric["test"]] for metric in found if metric is not None)
    note = f"; PAvPU: {' and '.join(tests)}, threshold 0.05" if tests else ""
    return Group(*parts, Text(f"± half a 95 % bootstrap interval over examples{note}"))


def environment(found: dict[str, Any], backends: dict[str, str]) -> Table:
    """Return versions, devices and backends; a missing optional package is shown as missing."""
    table = Table("what", "found")
    table.add_row("python", found["python"])
    table.add_row("platform", found["platform"])
    table.add_row("devices", ", ".join(found["devices"]))
    table.add_row("threads", str(found["threads"]))
    for backend, state in backends.items():
        table.add_row(f"backend {backend}", Text(state))
    for package, version in found["packages"].items():
        table.add_row(package, version or "[dim]not installed[/dim]")
    return table


def _cell(metric: dict[str, Any] | None) -> str:
    return "–" if metric is None else str(Summary(metric["value"], metric["low"], metric["high"], num_runs=1))
