"""The tables of docs/results/graph.md that were asked again with new seeds are what the committed CSV files give."""

import csv
from pathlib import Path

import pytest

pytest.importorskip("torch_geometric")

from bayesattn_recipes.graph import again, compare

FOLDER = Path(__file__).parents[2] / "docs" / "results"


def rows(name: str) -> list[dict[str, str]]:
    with (FOLDER / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def study():
    return [compare.read_rows([FOLDER / name]) for name in ("graph-robustness.csv", "graph-again.csv")]


def test_the_page_has_the_answers_of_the_new_seeds(study):
    answers = again.ask_again(*study)
    page = (FOLDER / "graph.md").read_text(encoding="utf-8")
    assert again.answers_table(answers).strip() in page
    written = rows("graph-again-comparisons.csv")
    assert [float(row["p_value"]) for row in written] == pytest.approx([answer.p_value for answer in answers])


def test_the_page_has_the_papers_settings_as_the_rival(study):
    chosen = compare.read_chosen(FOLDER / "graph-search" / "chosen.json")
    page = (FOLDER / "graph.md").read_text(encoding="utf-8")
    assert again.usual_table(study[0], rows("graph-usual.csv"), chosen).strip() in page
