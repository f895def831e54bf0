"""Comparisons that were asked again with new seeds, and with soft attention at the paper's settings as the rival.

    python -m bayesattn_recipes.graph.again docs/results

Reads `graph-robustness.csv` (the study), `graph-again.csv` (the seeds after it) and `graph-usual.csv` (the first table's
soft runs) from a folder, writes `graph-again-comparisons.csv` there and prints both tables of docs/results/graph.md. Trains
nothing.
"""

import argparse
import csv
import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bayesattn.evaluation.runs import write_csv
from bayesattn_recipes.common import tables as _tables
from bayesattn_recipes.graph.compare import HEADINGS, SERIES, Chosen, by_seed, read_chosen, read_rows
from bayesattn_recipes.graph.robustness import CLEAN

Rows = Sequence[dict[str, Any]]
# soft attention with the paper's settings, in graph-again.csv
USUAL = "soft, dropout 0.6"
ASKED = (
    ("cora", "a quarter of the labels"),
    ("citeseer", CLEAN),
    ("citeseer", "edges removed 25 %"),
    ("citeseer", "edges removed 50 %"),
)
ASKED_OF = ("nokl-mean", "wc-mean")
ACTED_ON = ("accuracy", "scaled_nll", "aurc", "selective_accuracy_80")


@dataclass(frozen=True)
class Answer:
    """One difference, paired by seed.

    Attributes:
        dataset: Name.
        situation: How training or test graph was changed.
        measure: Name.
        series: The variant.
        baseline: What it is compared with.
        seeds: `first`, those of the study; `new`; or `all`.
        num_seeds: How many both have.
        difference: Of the means.
        low: Lower end of its 95 % interval.
        high: Upper end.
        p_value: Paired t-test.
    """

    dataset: str
    situation: str
    measure: str
    series: str
    baseline: str
    seeds: str
    num_seeds: int
    difference: float
    low: float | None
    high: float | None
    p_value: float | None


def ask_again(first: Rows, new: Rows) -> list[Answer]:
    """Return every comparison for which there are at least two common seeds."""
    groups = {"first": first, "new": new, "all": [*first, *new]}
    answers = []
    asked = itertools.product(ASKED, ACTED_ON, ASKED_OF, ("soft", "dropout", USUAL), groups)
    for (dataset, situation), measure, series, baseline, seeds in asked:
        ours, theirs = (by_seed(groups[seeds], dataset, situation, name, measure) for name in (series, baseline))
        common = sorted(ours.keys() & theirs.keys())
        if len(common) < 2:
            continue
        found = _tables.paired(*({seed: part[seed] for seed in common} for part in (ours, theirs)))
        interval = (found.difference.value, found.difference.low, found.difference.high)
        key = (dataset, situation, measure, series, baseline, seeds)
        answers.append(Answer(*key, len(common), *interval, found.p_value))
    return answers


def answers_table(answers: Sequence[Answer]) -> str:
    """Return the answers of the new seeds beside those of the first ones."""
    known = {(a.dataset, a.situation, a.series, a.measure, a.baseline, a.seeds): a for a in answers}

    def cell(*key: str) -> str:
        found = known.get(key)  # type: ignore[arg-type]
        return "–" if found is None else f"{found.difference:+.4f} ({_tables.show_p(found.p_value)})"

    columns = [("soft", "first"), ("soft", "new"), ("soft", "all"), ("dropout", "all"), (USUAL, "new")]
    rows = [
        [dataset, situation, SERIES[series], HEADINGS[measure][0]]
        + [cell(dataset, situation, series, measure, *column) for column in columns]
        for dataset, situation in ASKED
        for series in ASKED_OF
        for measure in ACTED_ON
        if (dataset, situation, series, measure, "soft", "new") in known
    ]
    header = ["– soft, first 20 seeds", "– soft, new seeds", "– soft, all", "– MC dropout, all"]
    header.append("– soft with the paper's settings, new seeds")
    return _tables.markdown(["data set", "situation", "variant", "measure", *header], rows)


def usual_table(first: Rows, usual: Rows, chosen: Chosen) -> str:
    """Return how tuned networks compare with soft attention at the paper's settings, on the graphs as they are."""
    rows = []
    for dataset in dict.fromkeys(row["dataset"] for row in usual):
        for series in ("soft", *chosen[dataset]):
            cells = []
            for measure in ACTED_ON:
                theirs = {int(row["seed"]): float(row[measure]) for row in usual if row["dataset"] == dataset}
                found = _tables.paired(by_seed(first, dataset, CLEAN, series, measure), theirs)
                cells.append(f"{found.difference.value:+.4f} ({_tables.show_p(found.p_value)})")
            rows.append([dataset, SERIES[series] + (", tuned" if series == "soft" else ""), *cells])
    measures = [HEADINGS[measure][0] for measure in ACTED_ON]
    return _tables.markdown(["data set", "– soft with the paper's settings", *measures], rows)


def main() -> None:
    """Write the comparisons and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the three CSV files and graph-search/chosen.json are")
    folder = parser.parse_args().folder
    first, new = (read_rows([folder / name]) for name in ("graph-robustness.csv", "graph-again.csv"))
    with (folder / "graph-usual.csv").open(newline="", encoding="utf-8") as file:
        usual = list(csv.DictReader(file))
    answers = ask_again(first, new)
    write_csv(folder / "graph-again-comparisons.csv", [asdict(answer) for answer in answers])
    print(answers_table(answers))
    print(usual_table(first, usual, read_chosen(folder / "graph-search" / "chosen.json")))


if __name__ == "__main__":
    main()
