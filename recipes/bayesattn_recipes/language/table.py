"""Tables and calibration plots of finished cells: mean ± 95 % interval over seeds, paired with soft, beside the paper's."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from bayesattn.evaluation.runs import read_predictions
from bayesattn.files import write_bytes
from bayesattn.metrics import tabulate_predictions
from bayesattn.plots import plot_reliability
from bayesattn_recipes.common.figures import write_figure
from bayesattn_recipes.common.tables import Column, difference_table, markdown, mean_table, print_tables, write_csv
from bayesattn_recipes.language.calibration_figure import plot_calibration
from bayesattn_recipes.language.measure import read_answers, sureness
from bayesattn_recipes.language.tasks import PAPER_F1, Task, find_task

TABLE_FILE = "table.md"
CALIBRATION_FOLDER = "calibration"
# means over the draws of a run
MEANS_FOLDER = "means"
# rows whose cells share runs: their numbers are not independent and have no interval or test
SHARING_ROWS = ("ensemble",)
# of classes; scaled: after the temperature that fits the validation texts best
UNCERTAINTY = {
    "nll": ("NLL", 1.0, 3), "scaled_nll": ("NLL, scaled", 1.0, 3), "ece": ("ECE %", 100.0, 1),
    "aurc": ("AURC %", 100.0, 2), "pavpu_05": ("PAvPU %", 100.0, 1),
}  # fmt: skip
# of answers: the confidence in the given one
ANSWERS = {
    "answer_nll": ("NLL", 1.0, 3), "answer_ece": ("ECE %", 100.0, 1), "answer_aurc": ("AURC %", 100.0, 2),
}  # fmt: skip
SPREAD = {"rmse": ("RMSE", 1.0, 3), "mean_deviation": ("spread of draws", 1.0, 3)}
# by kind of task and metric: heading, factor, digits
_EXTRA = {"classification": UNCERTAINTY, "spans": ANSWERS, "regression": SPREAD}
_NAMES = {
    "accuracy": "accuracy", "f1": "F1", "matthews": "Matthews", "pearson": "Pearson", "spearman": "Spearman",
    "exact_match": "EM",
}  # fmt: skip
_VERBS = {"train": "to train on", "validation": "for validation", "test": "for test"}

Cell = dict[str, Any]


def write_tables(out: Path, cells: Sequence[Cell], tasks: dict[str, str], console: Console) -> Path:
    """Write `table.md`, `cells.csv` and the calibration plots, and print the table.

    Args:
        out: Their folder.
        cells: From `reproduce`.
        tasks: Name of the task by config name.
        console: Where to print.
    """
    sections, panels = [], {}
    for name, task_name in tasks.items():
        mine = [cell for cell in cells if cell["name"] == name]
        if not mine:
            continue
        sections.append(section(name, find_task(task_name), mine))
        if find_task(task_name).kind != "regression":
            panels[name] = _draw_calibration(out / CALIBRATION_FOLDER, name, find_task(task_name), mine)
    if panels:
        write_figure(out / CALIBRATION_FOLDER / "all.png", plot_calibration(panels, num_bins=6))
    write_csv(out / "cells.csv", [row for cell in cells for row in _csv_rows(cell)])
    text = "\n".join(sections)
    write_bytes(out / TABLE_FILE, text.encode())
    print_tables(console, text)
    return out / TABLE_FILE


def section(name: str, task: Task, cells: Sequence[Cell]) -> str:
    """Return the part of one config: the test set, what differs from soft, then shifted test sets."""
    rows = list(dict.fromkeys(cell["row"] for cell in cells))
    by_row = {row: {cell["seed"]: cell for cell in cells if cell["row"] == row} for row in rows}
    main = task.metrics[0]
    extra = _EXTRA[task.kind]
    columns = [_column(f"{_NAMES[metric]}, no draws", metric, 100.0, 2, part="plain") for metric in task.metrics]
    columns.append(_column(f"{_NAMES[main]}, draws", main, 100.0, 2, part="drawn"))
    columns += [_column(heading, metric, scale, digits) for metric, (heading, scale, digits) in extra.items()]
    text = f"### {name}\n\n{_examples(cells[0]['run'])}\n\n" + mean_table(
        by_row, columns, first="variant", more={"paper": lambda row: _paper(task, row)}, sharing=SHARING_ROWS
    )
    compared = [_column(_NAMES[metric], metric, 100.0, 2) for metric in task.metrics if metric in (main, "accuracy")]
    compared += [_column(form[0], m, *form[1:]) for m, form in extra.items() if m not in ("pavpu_05", "mean_deviation")]
    # a Bayesian row has to beat what soft attention gives for free
    for baseline, others in (("soft", rows), ("dropout", [row for row in rows if row.startswith("BAM")])):
        found = difference_table(
            by_row, compared, first=f"minus {baseline}, paired", baseline=baseline, variants=others, sharing=SHARING_ROWS
        )
        text += "\n" + found if found else ""
    shifted = [split for split in next(iter(cells))["plain"]["splits"] if split not in ("validation", "test")]
    return text + (_shifted(by_row, shifted, main) if shifted else "")


def _column(heading: str, metric: str, scale: float, digits: int, *, part: str = "best", split: str = "test") -> Column:
    """Return the column of a metric: without draws (`plain`), with them (`drawn`), or with them where the row has any."""

    def read(cell: Mapping[str, Any]) -> float | None:
        source = (cell["drawn"] or cell["plain"]) if part == "best" else cell[part]
        return None if source is None else source["splits"].get(split, {}).get(metric)

    return Column(heading, read, scale, digits)


def _examples(run: dict[str, Any]) -> str:
    """Describe the examples behind the numbers: how many, which part of the task, and what was truncated."""
    counts = ", ".join(f"{run['num_examples'][split]:,} {verb}" for split, verb in _VERBS.items())
    part = f"; {run['data_note']}" if run["data_note"] else ""
    cut = sum(run["num_truncated"].values())
    return f"Examples: {counts}{part}." + (f" {cut:,} were longer than the model reads and lost their end." if cut else "")


def _paper(task: Task, row: str) -> str:
    if task.paper is None or row not in ("soft", "BAM-WC"):
        return "–"
    place = 0 if row == "soft" else 1
    second = f"/{PAPER_F1[task.name][place]:.2f}" if task.name in PAPER_F1 else ""
    return f"{task.paper[place]:.2f}{second}"


def _shifted(by_row: dict[str, dict[int, Cell]], splits: Sequence[str], main: str) -> str:
    is_spans = main == "exact_match"
    forms = {
        main: (_NAMES[main], 100.0, 2),
        "answer_nll" if is_spans else "nll": ("NLL", 1.0, 3),
        **({} if is_spans else {"ece": ("ECE %", 100.0, 1)}),
        "ood_auroc_entropy": ("OOD AUROC %", 100.0, 1),
        "ood_auroc_mutual_information": ("by MI %", 100.0, 1),
    }
    if is_spans:
        forms["answer_ece"] = ("ECE %", 100.0, 1)
        forms |= {"ood_auroc_answer": ("by answer %", 100.0, 1), "ood_auroc_null_score": ("by null score %", 100.0, 1)}
    lines = []
    for split in splits:
        columns = [
            _column(heading, metric, scale, digits, split=split) for metric, (heading, scale, digits) in forms.items()
        ]
        likelihood = columns[1]
        for row, found in by_row.items():
            is_independent = row not in SHARING_ROWS
            numbers = [column.show(found, interval=is_independent) for column in columns]
            baseline = {} if row == "soft" else by_row.get("soft", {})
            difference = likelihood.show_difference(found, baseline, interval=is_independent)
            lines.append([split, row, *numbers, *difference])
    header = ["shifted test set", "variant", *(form[0] for form in forms.values()), "NLL minus soft, paired", "p"]
    return "\n" + markdown(header, lines)


def _csv_rows(cell: Cell) -> list[dict[str, Any]]:
    rows = []
    for part in ("plain", "drawn"):
        for split, metrics in (cell[part] or {"splits": {}})["splits"].items():
            for metric, value in metrics.items():
                rows.append(
                    {"config": cell["name"], "variant": cell["row"], "seed": cell["seed"], "draws": part == "drawn"}
                    | {"split": split, "metric": metric, "value": value}
                )
    return rows


def _draw_calibration(folder: Path, name: str, task: Task, cells: Sequence[Cell]) -> dict[str, tuple[Tensor, Tensor]]:
    """Draw one calibration plot per row, the test predictions of all seeds together; return confidences and accuracies."""
    curves = {}
    for row in dict.fromkeys(cell["row"] for cell in cells):
        tables = []
        for cell in cells:
            if cell["row"] == row:
                tables.append(_sureness(task, cell))
        curves[row] = torch.cat([found[0] for found in tables]), torch.cat([found[1] for found in tables])
        write_figure(folder / f"{name}-{row}.png", plot_reliability(*curves[row], title=f"{name}, {row}"))
    return curves


def _sureness(task: Task, cell: Cell) -> tuple[Tensor, Tensor]:
    """Return the confidence of every prediction of the test set, and whether it is right."""
    if task.kind == "spans":
        return sureness(read_answers(cell["folder"])["test"][cell["method"]])
    split = read_predictions(cell["folder"] / MEANS_FOLDER).splits["test"]
    assert split.labels is not None
    found = tabulate_predictions(split.samples[cell["method"]], split.labels)
    return found.confidence, found.accuracy
