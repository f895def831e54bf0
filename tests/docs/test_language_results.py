"""The page of language results shows what its CSV holds."""

import csv
import re
from collections import defaultdict
from pathlib import Path

import pytest

from bayesattn.recipes._tables import show
from bayesattn.report.aggregate import over_runs

RESULTS = Path(__file__).parents[2] / "docs" / "results"
METRICS = {"MRPC": "accuracy", "CoLA": "matthews", "RTE": "accuracy", "SST-2": "accuracy", "STS-B": "pearson"}


def read_values():
    """Return the test set's values by config, variant and metric, and by whether they are of draws."""
    values = defaultdict(list)
    with (RESULTS / "language.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["split"] == "test":
                key = (row["config"], row["variant"], row["metric"], row["draws"] == "True")
                values[key].append(float(row["value"]))
    return values


def rows_of(text, header):
    """Return the cells of the first table whose header begins like this, by the name of the row."""
    lines = text[text.index(header) :].split("\n\n")[0].splitlines()
    names = [cell.strip() for cell in lines[0].strip("|").split("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return {row[0]: dict(zip(names, row)) for row in cells}


@pytest.mark.parametrize("variant", ["soft", "dropout", "post-hoc", "BAM-NOKL", "BAM-WC"])
def test_first_table_is_the_mean_and_interval_of_the_csv(variant):
    values = read_values()
    shown = rows_of((RESULTS / "language.md").read_text(), "| | MRPC |")[variant]
    for task, metric in METRICS.items():
        found = values.get((task.lower().replace("-", ""), variant, metric, variant != "soft"))
        assert shown[task] == ("–" if found is None else show(over_runs(found), 100.0, 1))


@pytest.mark.parametrize("task", ["MRPC", "CoLA", "RTE", "SST-2"])
def test_tables_by_task_are_those_of_the_csv(task):
    values = read_values()
    section = re.split(r"(?m)^### ", (RESULTS / "language.md").read_text())
    text = next(part for part in section if part.startswith(f"{task}\n"))
    for variant, row in rows_of(text, "| variant | seeds |").items():
        if variant == "ensemble":
            continue
        for metric, heading, scale, digits in (
            ("nll", "NLL", 1.0, 3),
            ("ece", "ECE %", 100.0, 1),
            ("aurc", "AURC %", 100.0, 2),
        ):
            found = values[task.lower().replace("-", ""), variant, metric, variant != "soft"]
            assert row[heading] == show(over_runs(found), scale, digits)
            assert row["seeds"] == str(len(found))
