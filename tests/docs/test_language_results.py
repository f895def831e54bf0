"""The configs of the language recipe show what the CSV file holds."""

import csv
import re
from collections import defaultdict
from pathlib import Path

import pytest

from bayesattn.evaluation.aggregate import over_runs
from bayesattn_recipes.common.tables import show
from bayesattn_recipes.language.train import CONFIGS

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def read_values():
    """Return the test set's values by config, variant and metric, and by whether they are of draws."""
    values = defaultdict(list)
    with (RESULTS / "language.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["split"] == "test":
                key = (row["config"], row["variant"], row["metric"], row["draws"] == "True")
                values[key].append(float(row["value"]))
    return values


@pytest.mark.parametrize("config", sorted({config for config, *_ in read_values()}))
def test_config_says_what_was_measured_with_it(config):
    (line,) = (text for text in (CONFIGS / f"{config}.yaml").read_text().splitlines() if text.startswith("# Measured"))
    values = read_values()
    for variant, part in zip(("BAM-WC", "soft"), line.split("; ")):
        for name, shown in re.findall(r"(accuracy|Matthews|Pearson|EM|F1) ([\d.]+(?: ± [\d.]+)?) %", part):
            metric = {"EM": "exact_match"}.get(name, name.lower())
            assert shown == show(over_runs(values[config, variant, metric, variant != "soft"]), 100.0, 1)
        assert re.search(r"\d %", part)
