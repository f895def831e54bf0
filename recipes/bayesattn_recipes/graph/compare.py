"""Tables and figures of the robustness study, from the rows it wrote; needs no GPU and trains nothing.

    python -m bayesattn_recipes.graph.compare runs/robustness/*.csv --chosen runs/search/chosen.json --out docs/results

Every comparison is paired by seed. Each BAM variant, predicting as validation nodes chose (by its mean or by draws), is
compared with soft attention and with MC dropout, in every measure a user acts on and every situation; Holm's correction
is over all these comparisons of one data set.
"""

import argparse
import csv
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bayesattn.evaluation.aggregate import Summary, over_runs
from bayesattn.evaluation.runs import write_bytes, write_csv, write_json
from bayesattn.plots.style import COLORS, MARKERS, new_figure, plain, title
from bayesattn_recipes.common import tables as _tables
from bayesattn_recipes.graph.robustness import CLEAN, MEASURES

# series: name in tables
SERIES = {
    "soft": "soft",
    "dropout": "MC dropout",
    "nokl-mean": "BAM-NOKL, mean",
    "nokl": "BAM-NOKL, draws",
    "nokl-attention": "BAM-NOKL, draws of attention alone",
    "wc-mean": "BAM-WC, mean",
    "wc": "BAM-WC, draws",
    "wc-attention": "BAM-WC, draws of attention alone",
    "ensemble": "ensemble of 5",
}
BASELINES = ("soft", "dropout")
VARIANTS = ("nokl", "wc")
# by data set: the series of each variant that validation nodes chose
Chosen = dict[str, list[str]]
# what a user acts on: heading, whether larger is better, digits
ACTED_ON = {
    "accuracy": ("accuracy", True),
    "scaled_nll": ("NLL scaled", False),
    "aurc": ("AURC", False),
    "selective_accuracy_80": ("accuracy of the surest 80 %", True),
    "ood_auroc": ("OOD AUROC", True),
}
HEADINGS = {
    **ACTED_ON,
    "nll": ("NLL", False),
    "ece": ("ECE", False),
    "scaled_ece": ("ECE scaled", False),
    "pavpu_05": ("PAvPU", True),
}
LEVEL = 0.01


@dataclass(frozen=True)
class Comparison:
    """One measure of a variant against one baseline.

    Attributes:
        dataset: Name.
        situation: How training or test graph was changed.
        measure: Name.
        series: The variant.
        baseline: What it is compared with.
        difference: Of the means, with its interval.
        is_better: Whether the difference is in the measure's good direction.
        p_value: Paired t-test.
        holm: Corrected for all comparisons of the data set.
    """

    dataset: str
    situation: str
    measure: str
    series: str
    baseline: str
    difference: Summary
    is_better: bool
    p_value: float
    holm: float

    def to_row(self) -> dict[str, Any]:
        """Return plain values for a table."""
        names = ("dataset", "situation", "measure", "series", "baseline", "is_better", "p_value", "holm")
        interval = {"difference": self.difference.value, "low": self.difference.low, "high": self.difference.high}
        return {name: getattr(self, name) for name in names} | interval


def read_rows(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Read what the study wrote; measures as numbers, None where there is none."""
    rows = []
    for path in paths:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                measures = {name: float(row[name]) if row.get(name) else None for name in MEASURES}
                rows.append({**row, **measures, "seed": int(row["seed"]), "situation": situation(row)})
    return rows


def situation(row: dict[str, Any]) -> str:
    """Return in words what is changed."""
    return ", ".join(part for part in (row["trained"], row["predicted"]) if part != CLEAN) or CLEAN


def read_chosen(path: Path) -> Chosen:
    """Read how each variant predicts, from what the search wrote."""
    chosen = json.loads(path.read_text(encoding="utf-8"))
    return {
        dataset: [kind if choices[kind]["method"] == "all" else f"{kind}-mean" for kind in VARIANTS if kind in choices]
        for dataset, choices in chosen.items()
    }


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number by Holm's step-down rule (1979)."""
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def by_seed(rows: Sequence[dict[str, Any]], dataset: str, where: str, series: str, measure: str) -> dict[int, float]:
    """Return a measure by seed."""
    return {
        row["seed"]: row[measure]
        for row in rows
        if (row["dataset"], row["situation"], row["series"]) == (dataset, where, series) and row[measure] is not None
    }


def compare(rows: Sequence[dict[str, Any]], chosen: Chosen) -> list[Comparison]:
    """Compare every variant, predicting as chosen, with every baseline, in all situations and measures a user acts on."""
    found = []
    for dataset in _names(rows, "dataset"):
        own = [row for row in rows if row["dataset"] == dataset]
        todo = []
        for where in _names(own, "situation"):
            for measure in ACTED_ON:
                challengers = chosen[dataset]
                values = {name: by_seed(own, dataset, where, name, measure) for name in (*BASELINES, *challengers)}
                for series in challengers:
                    for baseline in BASELINES:
                        if values[series] and values[series].keys() <= values[baseline].keys():
                            todo.append((where, measure, series, baseline, _tables.paired(values[series], values[baseline])))
        p_values = [1.0 if paired.p_value is None else paired.p_value for *_, paired in todo]
        for (where, measure, series, baseline, paired), p, corrected in zip(todo, p_values, holm(p_values)):
            is_better = paired.difference.value > 0 if ACTED_ON[measure][1] else paired.difference.value < 0
            about = (dataset, where, measure, series, baseline)
            found.append(Comparison(*about, paired.difference, is_better, p, corrected))
    return found


def wins(comparisons: Sequence[Comparison], *, better: bool = True) -> list[list[Comparison]]:
    """Return where a variant is better (or worse) than both baselines with p below `LEVEL`: one comparison with each."""
    groups: dict[tuple, list[Comparison]] = {}
    for one in comparisons:
        groups.setdefault((one.dataset, one.situation, one.measure, one.series), []).append(one)
    return [
        group
        for group in groups.values()
        if len(group) == len(BASELINES) and all(one.is_better == better and one.p_value < LEVEL for one in group)
    ]


def overview(rows: Sequence[dict[str, Any]], where: str = CLEAN) -> str:
    """Return a table of every data set and series in one situation: means with intervals."""
    measures = [name for name in HEADINGS if any(row[name] is not None for row in rows if row["situation"] == where)]
    header = ["data set", "prediction", *(HEADINGS[name][0] for name in measures)]
    lines = []
    for dataset in _names(rows, "dataset"):
        for series in (name for name in SERIES if any(row["series"] == name for row in rows)):
            values = [list(by_seed(rows, dataset, where, series, measure).values()) for measure in measures]
            if any(values):
                cells = [_tables.show(over_runs(cell), digits=3) if cell else "–" for cell in values]
                lines.append([dataset, SERIES[series], *cells])
    return _tables.markdown(header, lines)


def win_table(groups: Sequence[Sequence[Comparison]]) -> str:
    """Return a table of results against both baselines."""
    header = ["data set", "situation", "measure", "variant", "– soft (p; Holm)", "– MC dropout (p; Holm)"]
    lines = []
    for group in groups:
        one = group[0]
        cells = [
            f"{c.difference.value:+.4f} ({_tables.show_p(c.p_value)}; {_tables.show_p(c.holm)})"
            for c in sorted(group, key=lambda c: BASELINES.index(c.baseline))
        ]
        lines.append([one.dataset, one.situation, HEADINGS[one.measure][0], SERIES[one.series], *cells])
    return _tables.markdown(header, lines)


def plot(rows: Sequence[dict[str, Any]], measure: str, chosen: Chosen) -> Figure:
    """Draw one measure over the situations, a panel for each data set; error bars are 95 % intervals over seeds."""
    rows = [row for row in rows if row[measure] is not None]
    datasets = _names(rows, "dataset")
    situations = _names(rows, "situation")
    shown = ["soft", "MC dropout", "BAM-NOKL", "BAM-WC", "ensemble of 5"]
    columns = min(2, len(datasets))
    lines = math.ceil(len(datasets) / columns)
    figure, axes = new_figure(6.0 * columns, 2.6 * lines + 1.4, lines, columns, sharex=True)
    for ax in list(axes.flat)[len(datasets) :]:
        ax.set_visible(False)
    for ax, dataset in zip(axes.flat, datasets):
        for index, series in enumerate((*BASELINES, *chosen[dataset], "ensemble")):
            points = []
            for place, where in enumerate(situations):
                values = list(by_seed(rows, dataset, where, series, measure).values())
                if values:
                    summary = over_runs(values)
                    half = 0.0 if summary.high is None else summary.high - summary.value
                    points.append((place + 0.7 * ((index + 0.5) / len(shown) - 0.5), summary.value, half))
            if points:
                places, values, halves = zip(*points)
                style = {"color": COLORS[index], "fmt": MARKERS[index]}
                ax.errorbar(places, values, yerr=halves, markersize=4, capsize=2, label=shown[index], **style)
        title(ax, dataset)
        plain(ax)
        ax.set_xticks(range(len(situations)), situations, rotation=30, ha="right", fontsize=7)
        ax.tick_params(axis="x", labelbottom=True)
    heading, larger = HEADINGS[measure]
    figure.supylabel(f"{heading} ({'higher' if larger else 'lower'} is better)", fontsize=9)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", fontsize=8, ncols=len(shown), frameon=False)
    return figure


def _names(rows: Sequence[dict[str, Any]], column: str) -> list[str]:
    return list(dict.fromkeys(row[column] for row in rows))


def main() -> None:
    """Write tables (Markdown, CSV, JSON) and figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--chosen", type=Path, required=True, help="what `search choose` wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", default="graph", help="how the files begin")
    arguments = parser.parse_args()
    rows, chosen = read_rows(arguments.files), read_chosen(arguments.chosen)
    comparisons = compare(rows, chosen)
    better, worse = wins(comparisons), wins(comparisons, better=False)
    text = (
        f"{overview(rows)}\nBetter than both, p < {LEVEL:g}:\n\n{win_table(better)}\nWorse than both, p < {LEVEL:g}:\n\n"
        f"{win_table(worse)}"
    )
    start = str(arguments.out / f"{arguments.name}-robustness")
    write_bytes(Path(f"{start}.md"), text.encode())
    write_csv(Path(f"{start}.csv"), [{k: v for k, v in row.items() if k != "situation"} for row in rows])
    write_csv(arguments.out / f"{arguments.name}-comparisons.csv", [one.to_row() for one in comparisons])
    counts = {
        "comparisons": len(comparisons),
        "better_than_both": len(better),
        "worse_than_both": len(worse),
        "datasets_better": sorted({group[0].dataset for group in better}),
        "better": [[one.to_row() for one in group] for group in better],
    }
    write_json(Path(f"{start}.json"), counts)
    for measure in ("accuracy", "scaled_nll", "aurc"):
        plot(rows, measure, chosen).savefig(f"{start}-{measure}.png", dpi=110)
    print(text)


if __name__ == "__main__":
    main()
