"""The tables of docs/results/graph.md are what the committed CSV files give."""

import csv
import json
from pathlib import Path

import pytest

pytest.importorskip("torch_geometric")

from bayesattn.evaluation.aggregate import over_runs
from bayesattn_recipes.common.tables import paired, show, show_p
from bayesattn_recipes.graph import reproduce

FOLDER = Path(__file__).parents[2] / "docs" / "results"
PAGE = (FOLDER / "graph.md").read_text(encoding="utf-8")
MEASURES = {
    "accuracy": "accuracy",
    "NLL scaled": "scaled_nll",
    "AURC": "aurc",
    "accuracy of the surest 80 %": "selective_accuracy_80",
}
USUAL = "soft, dropout 0.6"


def read(name: str) -> list[dict[str, str]]:
    with (FOLDER / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def table(header: str) -> list[list[str]]:
    """Return the cells of the page's table whose header begins so."""
    lines = iter(PAGE.splitlines())
    next(line for line in lines if line.startswith(header))
    next(lines)
    found = []
    for line in lines:
        if not line.startswith("|"):
            return found
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def by_seed(rows: list[dict[str, str]], dataset: str, situation: str, series: str, measure: str) -> dict[int, float]:
    def words(row: dict[str, str]) -> str:
        return ", ".join(part for part in (row["trained"], row["predicted"]) if part != "clean") or "clean"

    wanted = (dataset, situation, series)
    return {int(row["seed"]): float(row[measure]) for row in rows if (row["dataset"], words(row), row["series"]) == wanted}


def difference(ours: dict[int, float], theirs: dict[int, float]) -> str:
    common = ours.keys() & theirs.keys()
    if len(common) < 2:
        return "–"
    found = paired({seed: ours[seed] for seed in common}, {seed: theirs[seed] for seed in common})
    return f"{found.difference.value:+.4f} ({show_p(found.p_value)})"


def test_the_page_has_the_papers_table_as_reproduce_writes_it():
    rows = json.loads((FOLDER / "graph.json").read_text(encoding="utf-8"))["rows"]
    assert reproduce.render(rows).strip() in PAGE
    for row, written in zip(rows, read("graph.csv"), strict=True):
        assert float(written["accuracy"]) == row["accuracy"]
        of_seed = [
            100 * float(one["accuracy"])
            for one in read("graph-seeds.csv")
            if (one["dataset"], one["variant"]) == (row["dataset"], row["variant"])
        ]
        assert row["accuracy"] == pytest.approx(sum(of_seed) / len(of_seed))


@pytest.mark.parametrize("variant", ["soft", "wc"])
def test_the_page_has_the_spot_check_beside_the_tables_row(variant):
    seeds = [100 * float(row["accuracy"]) for row in read("graph-spot-check-seeds.csv") if row["variant"] == variant]
    assert len(seeds) == 10
    assert show(over_runs(seeds)) in PAGE
    row = next(row for row in read("graph-spot-check.csv") if row["variant"] == variant)
    assert float(row["accuracy"]) == pytest.approx(sum(seeds) / 10)
    # no sign that the two layers differ: the intervals overlap
    old = next(row for row in read("graph.csv") if (row["dataset"], row["variant"]) == ("cora", variant))
    assert float(row["accuracy_low"]) < float(old["accuracy_high"])
    assert float(old["accuracy_low"]) < float(row["accuracy_high"])


def test_the_page_has_the_answers_of_the_new_seeds():
    first, new = read("graph-robustness.csv"), read("graph-again.csv")
    columns = [("soft", first), ("soft", new), ("soft", [*first, *new]), ("dropout", [*first, *new]), (USUAL, new)]
    written = table("| data set | situation | variant | measure | – soft, first 20 seeds")
    assert len(written) == 20
    for dataset, situation, variant, measure, *cells in written:
        series = {"BAM-NOKL, mean": "nokl-mean", "BAM-WC, mean": "wc-mean"}[variant]
        for cell, (baseline, rows) in zip(cells, columns, strict=True):
            about = (dataset, situation)
            ours, theirs = (by_seed(rows, *about, name, MEASURES[measure]) for name in (series, baseline))
            assert cell == difference(ours, theirs), (dataset, situation, variant, measure, baseline)


def test_the_page_has_the_papers_settings_as_the_rival():
    names = {
        "soft, tuned": "soft", "BAM-NOKL, mean": "nokl-mean", "BAM-WC, mean": "wc-mean", "BAM-NOKL, draws": "nokl",
        "BAM-WC, draws": "wc",
    }  # fmt: skip
    study, usual = read("graph-robustness.csv"), read("graph-usual.csv")
    written = table("| data set | – soft with the paper's settings | accuracy")
    assert len(written) == 9
    for dataset, variant, *cells in written:
        for cell, measure in zip(cells, MEASURES.values(), strict=True):
            theirs = {int(row["seed"]): float(row[measure]) for row in usual if row["dataset"] == dataset}
            assert cell == difference(by_seed(study, dataset, "clean", names[variant], measure), theirs)


def test_the_comparisons_are_those_of_the_rows():
    study = read("graph-robustness.csv")
    # every eleventh: all of them take a while
    for row in read("graph-comparisons.csv")[::11]:
        values = [
            by_seed(study, row["dataset"], row["situation"], row[side], row["measure"]) for side in ("series", "baseline")
        ]
        found = paired(*values)
        assert float(row["difference"]) == pytest.approx(found.difference.value)
        assert float(row["p_value"]) == pytest.approx(found.p_value)
