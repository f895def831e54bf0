"""The configs of the translation recipe show the BLEU of the committed runs."""

import csv
import re
from collections import defaultdict
from pathlib import Path

import pytest

from bayesattn_recipes.translation.train import CONFIGS

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def read(name):
    """Return the rows of a CSV, without the runs that diverged."""
    with (RESULTS / "translation" / name).open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if not row.get("diverged")]


def grouped(rows, *names):
    """Return rows by the values of some columns."""
    found = defaultdict(list)
    for row in rows:
        found[tuple(row[name] for name in names)].append(row)
    return found


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_header_of_a_config_has_the_bleu_of_its_runs(path):
    dataset, _, variant = path.stem.partition("-")
    found = re.findall(r"# Measured \(docs/results/translation.md\): (.*) BLEU", path.read_text(encoding="utf-8"))
    runs = [] if dataset == "iwslt14" else grouped(read(f"{dataset}.csv"), "variant", "test")
    test = {"multi30k": "test-2016", "tatoeba": "test"}.get(dataset)
    expected = [f"{float(row['bleu']):.2f}" for row in runs[variant, test]] if runs else []
    assert re.findall(r"[\d.]+", "".join(found)) == expected
