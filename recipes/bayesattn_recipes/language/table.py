"""Tables and calibration plots of finished cells: mean ± 95 % interval over seeds, paired with soft, beside the paper's."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from bayesattn.evaluation.aggregate import Summary, over_runs
from bayesattn.evaluation.runs import read_predictions, write_bytes
from bayesattn.metrics import tabulate_predictions
from bayesattn.plots import plot_calibration, plot_reliability
from bayesattn_recipes.common.tables import markdown, paired, print_tables, show, show_p, write_csv
from bayesattn_recipes.language.measure import read_answers, sureness
from bayesattn_recipes.language.tasks import PAPER_F1, Task, find_task

TABLE_FILE = "table.md"
CALIBRATION_FOLDER = "calibration"
# beside the draws of a run, their means
MEANS_FOLDER = "means"
# rows whose cells share runs: numbers that are not independent have no interval and no test
SHARING_ROWS = ("ensemble",)
# metric: heading, factor, digits. Scaled: after the temperature that suits the validation texts best
UNCERTAINTY = {
    "nll": ("NLL", 1.0, 3), "scaled_nll": ("NLL, scaled", 1.0, 3), "ece": ("ECE %", 100.0, 1),
    "aurc": ("AURC %", 100.0, 2), "pavpu_05": ("PAvPU %", 100.0, 1),
}  # fmt: skip
# of answers: how sure the model is of the one it gives
ANSWERS = {
    "answer_nll": ("NLL", 1.0, 3), "answer_ece": ("ECE %", 100.0, 1), "answer_aurc": ("AURC %", 100.0, 2),
}  # fmt: skip
SPREAD = {"rmse": ("RMSE", 1.0, 3), "mean_deviation": ("spread of draws", 1.0, 3)}
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
        tasks: By config name, the name of its task.
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
        plot_calibration(panels, num_bins=6).savefig(out / CALIBRATION_FOLDER / "all.png")
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
    header = ["variant", "seeds", *(f"{_NAMES[m]}, no draws" for m in task.metrics), f"{_NAMES[main]}, draws"]
    header += [heading for heading, _, _ in extra.values()] + ["paper"]
    lines = []
    for row, found in by_row.items():
        numbers = [_summary(row, found, "plain", "test", metric, 100.0, 2) for metric in task.metrics]
        numbers.append(_summary(row, found, "drawn", "test", main, 100.0, 2))
        numbers += [_summary(row, found, "best", "test", metric, *form[1:]) for metric, form in extra.items()]
        lines.append([row, str(len(found)), *numbers, _paper(task, row)])
    text = f"### {name}\n\n{_examples(cells[0]['run'])}\n\n" + markdown(header, lines)
    forms = {name: (_NAMES[name], 100.0, 2) for name in task.metrics if name in (main, "accuracy")}
    forms |= {metric: form for metric, form in extra.items() if metric not in ("pavpu_05", "mean_deviation")}
    text += _against(by_row, "soft", [row for row in rows if row != "soft"], forms)
    # a Bayesian row has to beat what soft attention gives for nothing
    text += _against(by_row, "dropout", [row for row in rows if row.startswith("BAM")], forms)
    shifted = [split for split in next(iter(cells))["plain"]["splits"] if split not in ("validation", "test")]
    return text + (_shifted(by_row, shifted, main) if shifted else "")


def _examples(run: dict[str, Any]) -> str:
    """Say what the numbers are of: how many examples, which part of the task where it is not all, and what was cut."""
    counts = ", ".join(f"{run['num_examples'][split]:,} {verb}" for split, verb in _VERBS.items())
    part = f"; {run['data_note']}" if run["data_note"] else ""
    cut = sum(run["num_truncated"].values())
    return f"Examples: {counts}{part}." + (f" {cut:,} were longer than the model reads and lost their end." if cut else "")


def _values(found: dict[int, Cell], part: str, split: str, metric: str) -> dict[int, float] | None:
    """Return a measure by seed; `best` is with draws where the row has them. None where some cell has no such measure."""
    values = {}
    for seed, cell in found.items():
        source = (cell["drawn"] or cell["plain"]) if part == "best" else cell[part]
        value = None if source is None else source["splits"].get(split, {}).get(metric)
        if value is None:
            return None
        values[seed] = value
    return values


def _summary(row: str, found: dict[int, Cell], part: str, split: str, metric: str, scale: float, digits: int) -> str:
    values = _values(found, part, split, metric)
    return "–" if values is None else show(_mean(row, list(values.values())), scale, digits)


def _mean(row: str, values: Sequence[float]) -> Summary:
    summary = over_runs(values)
    return replace(summary, low=None, high=None) if row in SHARING_ROWS else summary


def _paper(task: Task, row: str) -> str:
    if task.paper is None or row not in ("soft", "BAM-WC"):
        return "–"
    place = 0 if row == "soft" else 1
    second = f"/{PAPER_F1[task.name][place]:.2f}" if task.name in PAPER_F1 else ""
    return f"{task.paper[place]:.2f}{second}"


def _against(
    by_row: dict[str, dict[int, Cell]], baseline: str, rows: Sequence[str], forms: dict[str, tuple[str, float, int]]
) -> str:
    """Return the paired differences of some rows to another; empty where one of them is not in the table."""
    if baseline not in by_row or not rows:
        return ""
    lines = [[row, *_differences(by_row, baseline, row, "test", forms)] for row in rows]
    header = [f"minus {baseline}, paired", *(part for heading, _, _ in forms.values() for part in (heading, "p"))]
    return "\n" + markdown(header, lines)


def _differences(
    by_row: dict[str, dict[int, Cell]], baseline: str, row: str, split: str, forms: dict[str, tuple[str, float, int]]
) -> list[str]:
    """Return, for every metric, by how much a row differs from another with the same seeds, and the p-value of that."""
    shown = []
    for metric, (_, scale, digits) in forms.items():
        ours, theirs = (_values(by_row.get(name, {}), "best", split, metric) for name in (row, baseline))
        seeds = sorted((ours or {}).keys() & (theirs or {}).keys())
        if ours is None or theirs is None or not seeds or row == baseline:
            shown += ["–", "–"]
        elif row in SHARING_ROWS:
            shown += [show(_mean(row, [ours[seed] - theirs[seed] for seed in seeds]), scale, digits), "–"]
        else:
            compared = paired({seed: ours[seed] for seed in seeds}, theirs)
            shown += [show(compared.difference, scale, digits), show_p(compared.p_value)]
    return shown


def _shifted(by_row: dict[str, dict[int, Cell]], splits: Sequence[str], main: str) -> str:
    likelihood = {"answer_nll" if main == "exact_match" else "nll": ("NLL", 1.0, 3)}
    forms = {main: (_NAMES[main], 100.0, 2), **likelihood, "ece": ("ECE %", 100.0, 1)}
    forms |= {"ood_auroc_entropy": ("OOD AUROC %", 100.0, 1), "ood_auroc_mutual_information": ("by MI %", 100.0, 1)}
    if main == "exact_match":
        forms["answer_ece"] = forms.pop("ece")
        forms |= {"ood_auroc_answer": ("by answer %", 100.0, 1), "ood_auroc_null_score": ("by null score %", 100.0, 1)}
    lines = [
        [
            split,
            row,
            *(_summary(row, found, "best", split, metric, scale, digits) for metric, (_, scale, digits) in forms.items()),
            *_differences(by_row, "soft", row, split, likelihood),
        ]
        for split in splits
        for row, found in by_row.items()
    ]
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
    """Draw one calibration plot a row, the test predictions of all seeds together; returns confidences and accuracies."""
    folder.mkdir(parents=True, exist_ok=True)
    curves = {}
    for row in dict.fromkeys(cell["row"] for cell in cells):
        tables = []
        for cell in cells:
            if cell["row"] == row:
                tables.append(_sureness(task, cell))
        curves[row] = torch.cat([found[0] for found in tables]), torch.cat([found[1] for found in tables])
        plot_reliability(*curves[row], title=f"{name}, {row}").savefig(folder / f"{name}-{row}.png")
    return curves


def _sureness(task: Task, cell: Cell) -> tuple[Tensor, Tensor]:
    """Return how sure every prediction of the test set is, and whether it is right."""
    if task.kind == "spans":
        return sureness(read_answers(cell["folder"])["test"][cell["method"]])
    split = read_predictions(cell["folder"] / MEANS_FOLDER).splits["test"]
    assert split.labels is not None
    found = tabulate_predictions(split.samples[cell["method"]], split.labels)
    return found.confidence, found.accuracy
