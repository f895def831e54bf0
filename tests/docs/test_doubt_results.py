"""The page of the study of doubt says what its CSV files say."""

import csv
import re
from pathlib import Path

import pytest

from bayesattn_recipes.doubt import elsewhere, table
from bayesattn_recipes.doubt.rankings import BASELINE, FLAGSHIP

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "results"
PAGE = (FOLDER / "doubt.md").read_text(encoding="utf-8")
ROWS = table.read_rows(FOLDER / "doubt.csv")
POOLED = {row.ranking: row for row in table.pool(ROWS)}


def test_tables_are_those_of_the_files():
    assert table.ranking_table(ROWS) in PAGE
    assert table.probability_table(ROWS) in PAGE
    names = re.findall(r"^\| (.*?) \|", PAGE[PAGE.index("| AURC, per cent") :].split("\n\n")[0], re.M)[3:]
    assert table.task_table(ROWS, names) in PAGE
    with (FOLDER / "doubt-elsewhere.csv").open(encoding="utf-8") as file:
        rows = [{**r, "seed": int(r["seed"]), "value": float(r["value"])} for r in csv.DictReader(file)]
    for found in elsewhere.page_tables(rows):
        assert found in PAGE


def test_pooled_file_is_that_of_the_rows():
    with (FOLDER / "doubt-pooled.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            assert float(row["change"]) == pytest.approx(POOLED[row["ranking"]].change)
            assert float(row["p_value"]) == pytest.approx(POOLED[row["ranking"]].p_value)


def test_the_verdict_is_clear():
    found = POOLED[FLAGSHIP]
    assert found.change <= -0.06
    assert found.p_value < 0.01
    assert all(found.change < POOLED[name].change for name in POOLED if name.startswith("MC dropout"))
    assert max(found.by_task, key=lambda task: found.by_task[task]) == "qqp"
    assert f"{found.lower_runs} of {found.num_runs} models" in PAGE


def test_texts_of_another_kind_are_not_found():
    for name, shown in ((FLAGSHIP, "0.53 by doubt"), (BASELINE, "0.59 by own confidence")):
        values = [row["outside_auroc"] for row in ROWS if row["row"] == name]
        assert f"{sum(values) / len(values):.2f} by" in shown
        assert shown in PAGE


def test_readme_quotes_the_table():
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("−", "-").replace("**", "")
    for name in (FLAGSHIP, "attention draws, 20: t", "MC dropout, 20: t", "ensemble of 3", "last-layer Laplace: entropy"):
        row = POOLED[name]
        assert f"{100 * row.change:+.1f} % ({100 * row.low:+.1f} to {100 * row.high:+.1f})" in text
    assert len(re.sub(r"<!--.*?-->", "", text, flags=re.S).split()) <= 900
