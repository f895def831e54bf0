"""The rows of docs/results/graph.csv are those of its seeds."""

import csv
from pathlib import Path

import pytest

pytest.importorskip("torch_geometric")

from bayesattn.evaluation.aggregate import over_runs
from bayesattn_recipes.graph.reproduce import DATASETS, PAPER, VARIANTS

FOLDER = Path(__file__).parents[2] / "docs" / "results"


def read(name: str) -> list[dict[str, str]]:
    with (FOLDER / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("dataset", DATASETS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_means_are_those_of_the_seeds_and_the_paper_is_quoted_right(dataset, variant):
    (row,) = [row for row in read("graph.csv") if (row["dataset"], row["variant"]) == (dataset, variant)]
    seeds = [r for r in read("graph-seeds.csv") if (r["dataset"], r["variant"]) == (dataset, variant)]
    assert len(seeds) == int(row["num_seeds"]) == (10 if dataset == "pubmed" else 20)
    assert float(row["paper_accuracy"]) == PAPER[variant][DATASETS.index(dataset)]
    for name, scale in (("accuracy", 100.0), ("nll", 1.0), ("scaled_nll", 1.0), ("scaled_ece", 1.0)):
        # the seeds are rounded to five digits
        expected = scale * over_runs([float(r[name]) for r in seeds]).value
        assert float(row[name]) == pytest.approx(expected, abs=scale * 1e-5)
