"""The study's tables and its forest plot: every ranking against the model's own confidence, over tasks and seeds.

The unit is a fine-tuned model. Its AURC under a ranking is divided by that under its own confidence; the mean of the
logarithms over all models gives the pooled change. Models of one task share their test texts, so besides the paired t-test
over models there is one over tasks, each represented by the mean over its seeds. Holm's correction is over all rows.
"""

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console

from bayesattn.evaluation.aggregate import over_runs
from bayesattn.files import write_bytes
from bayesattn.plots import style
from bayesattn_recipes.common.figures import write_figure
from bayesattn_recipes.common.folders import write_csv
from bayesattn_recipes.common.tables import holm, markdown, p_of_mean, print_tables, show_p
from bayesattn_recipes.doubt.rankings import BASELINE, FLAGSHIP, PREDICTIVES, RANKINGS, Found, Run, measure

CSV_FILE, POOLED_FILE, TABLE_FILE, PLOT_FILE = "doubt.csv", "doubt-pooled.csv", "doubt-table.md", "doubt.png"
MEASURES = (
    "aurc", "auroc", "accuracy_80", "accuracy_90", "accuracy", "nll", "ece", "nll_scaled", "ece_scaled", "temperature",
    "outside_auroc",
)  # fmt: skip
Row = dict[str, Any]


@dataclass(frozen=True)
class Pooled:
    """One ranking against the model's own confidence, over all models.

    Attributes:
        ranking: Its name.
        change: Mean relative change of AURC; negative is better.
        low: Lower end of its 95 % interval over models.
        high: Upper end.
        p_value: Paired t-test over models, after Holm.
        p_tasks: The same over tasks, not corrected.
        lower_runs: Models whose AURC is lower.
        num_runs: Models.
        by_task: Relative change by task.
    """

    ranking: str
    change: float
    low: float
    high: float
    p_value: float
    p_tasks: float
    lower_runs: int
    num_runs: int
    by_task: dict[str, float]


def measure_all(found: Mapping[str, Sequence[Found]]) -> list[Row]:
    """Measure every ranking of every model; one row each."""
    rows: list[Row] = []
    for task, models in found.items():
        for seed in range(len(models)):
            # the ensemble of a seed: itself and the seeds that follow it
            others = [models[(seed + step) % len(models)] for step in range(len(models))]
            for name, measures in measure(Run(models[seed], others)).items():
                rows.append({"task": task, "seed": seed, "row": name, **{key: measures.get(key) for key in MEASURES}})
    return rows


def read_rows(path: Path) -> list[Row]:
    """Read `doubt.csv` back."""
    with path.open(newline="", encoding="utf-8") as file:
        return [
            {**row, "seed": int(row["seed"])} | {key: float(row[key]) if row[key] else None for key in MEASURES}
            for row in csv.DictReader(file)
        ]


def _values(rows: Iterable[Row], name: str, measure: str) -> dict[tuple[str, int], float]:
    return {(r["task"], r["seed"]): r[measure] for r in rows if r["row"] == name and r[measure] is not None}


def _p(differences: Sequence[float]) -> float:
    found = p_of_mean(differences)
    return 1.0 if found is None else found


def pool(rows: Sequence[Row]) -> list[Pooled]:
    """Compare every ranking with the model's own confidence."""
    own = _values(rows, BASELINE, "aurc")
    tasks = list(dict.fromkeys(task for task, _ in own))
    found, p_values = [], []
    for name in RANKINGS:
        values = _values(rows, name, "aurc")
        if name == BASELINE or not values:
            continue
        logs = {run: math.log(values[run] / own[run]) for run in own}
        by_task = {task: over_runs([v for (t, _), v in logs.items() if t == task]).value for task in tasks}
        summary = over_runs(list(logs.values()))
        p_values.append(_p([*logs.values()]))
        ends = (summary.value if end is None else end for end in (summary.value, summary.low, summary.high))
        change, low, high = (math.expm1(end) for end in ends)
        found.append(
            Pooled(
                name, change, low, high, 1.0, _p([*by_task.values()]),
                sum(v < 0.0 for v in logs.values()), len(logs), {task: math.expm1(v) for task, v in by_task.items()},
            )
        )  # fmt: skip
    return [Pooled(**{**vars(row), "p_value": p}) for row, p in zip(found, holm(p_values), strict=True)]


def ranking_table(rows: Sequence[Row]) -> str:
    """Return the pooled table: AURC against the model's own confidence, and the means of the other measures."""

    def mean(name: str, measure: str, digits: int) -> str:
        values = list(_values(rows, name, measure).values())
        return f"{100.0 * sum(values) / len(values):.{digits}f}"

    header = ["ranking by", "AURC, change", "p (Holm)", "lower in", "AURC", "AUROC of errors", "accuracy of 80 %", "of 90 %"]
    body = [[BASELINE, "0", "–", "–", *(mean(BASELINE, m, 2) for m in MEASURES[:4])]]
    for row in pool(rows):
        change = f"{100 * row.change:+.1f} % ({100 * row.low:+.1f} to {100 * row.high:+.1f})"
        numbers = [mean(row.ranking, m, 2) for m in MEASURES[:4]]
        body.append([row.ranking, change, show_p(row.p_value), f"{row.lower_runs} of {row.num_runs}", *numbers])
    return markdown(header, body)


def task_table(rows: Sequence[Row], names: Sequence[str]) -> str:
    """Return AURC by task, in percent, for the model's own confidence and some rankings."""
    own = _values(rows, BASELINE, "aurc")
    tasks = list(dict.fromkeys(task for task, _ in own))
    body = []
    for name in (BASELINE, *names):
        values = _values(rows, name, "aurc")
        means = [over_runs([v for (t, _), v in values.items() if t == task]).value for task in tasks]
        body.append([name, *(f"{100 * value:.2f}" for value in means)])
    return markdown(["AURC, per cent", *tasks], body)


def probability_table(rows: Sequence[Row]) -> str:
    """Return NLL and ECE of rows that give probabilities, before and after a temperature."""
    header = ["probabilities of", "accuracy", "NLL", "ECE", "NLL, scaled", "ECE, scaled"]
    body = []
    measured = {row["row"] for row in rows}
    for name in (name for name in PREDICTIVES if name in measured):
        cells = [name]
        for key in ("accuracy", "nll", "ece", "nll_scaled", "ece_scaled"):
            values = list(_values(rows, name, key).values())
            mean = sum(values) / len(values)
            cells.append(f"{mean:.4f}" if key.startswith("nll") else f"{100.0 * mean:.2f}")
        body.append(cells)
    return markdown(header, body)


def forest_plot(rows: Sequence[Row]) -> Figure:
    """Draw the pooled change of AURC of every ranking with its interval, and the tasks behind it as ticks."""
    pooled = sorted(pool(rows), key=lambda row: -row.change)
    figure, axes = style.new_figure(7.2, 0.26 * len(pooled) + 1.0)
    ax = axes[0, 0]
    for place, row in enumerate(pooled):
        color = style.BAD if row.ranking == FLAGSHIP else style.GOOD
        ax.plot([100 * row.low, 100 * row.high], [place, place], color=color, linewidth=2)
        ax.plot(100 * row.change, place, "o", color=color, markersize=5)
        ax.plot([100 * v for v in row.by_task.values()], [place] * len(row.by_task), "|", color=color, alpha=0.5)
    ax.axvline(0.0, color=style.NEUTRAL, linewidth=1)
    ax.set_yticks(range(len(pooled)), [row.ranking for row in pooled])
    for label in ax.get_yticklabels():
        label.set_fontweight("bold" if label.get_text() == FLAGSHIP else "normal")
    ax.set_xlabel("AURC against own confidence, %; left is better")
    style.plain(ax)
    return figure


def write(out: Path, rows: Sequence[Row], console: Console) -> Path:
    """Write the CSVs, the tables and the plot."""
    pooled = pool(rows)
    write_csv(out / CSV_FILE, rows)
    write_csv(
        out / POOLED_FILE, [{**{k: v for k, v in vars(row).items() if k != "by_task"}, **row.by_task} for row in pooled]
    )
    parts = [ranking_table(rows), task_table(rows, [row.ranking for row in pooled]), probability_table(rows)]
    text = "\n".join(parts)
    write_bytes(out / TABLE_FILE, text.encode())
    write_figure(out / PLOT_FILE, forest_plot(rows))
    print_tables(console, text)
    return out / TABLE_FILE
