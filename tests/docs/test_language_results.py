"""The page of language results shows what its CSV holds."""

import csv
import re
from collections import defaultdict
from pathlib import Path

import pytest

from bayesattn.recipes._tables import show
from bayesattn.recipes.language.train import CONFIGS
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


@pytest.mark.parametrize("variant", ["soft", "dropout", "post-hoc", "BAM-NOKL", "BAM-WC", "BAM-WC+dropout"])
def test_first_table_is_the_mean_and_interval_of_the_csv(variant):
    values = read_values()
    shown = rows_of((RESULTS / "language.md").read_text(), "| | MRPC |")[variant]
    for task, metric in METRICS.items():
        found = values.get((task.lower().replace("-", ""), variant, metric, variant != "soft"))
        assert shown[task] == ("–" if found is None else show(over_runs(found), 100.0, 1))


@pytest.mark.parametrize("task", ["MRPC", "CoLA", "RTE", "SST-2", "MNLI", "QNLI", "QQP", "WNLI"])
def test_tables_by_task_are_those_of_the_csv(task):
    values = read_values()
    sections = re.split(r"(?m)^## ", (RESULTS / "language-table.md").read_text())
    text = next(part for part in sections if part.startswith(f"{task}\n"))
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


@pytest.mark.parametrize("version", ["1.1", "2.0"])
@pytest.mark.parametrize("variant", ["soft", "dropout", "BAM-WC", "BAM-WC+dropout"])
def test_table_of_squad_is_that_of_the_csv(variant, version):
    values = read_values()
    text = (RESULTS / "language.md").read_text()
    shown = rows_of(text[text.index(f"## SQuAD {version}") :], "| | seeds | EM |")[variant]
    for heading, metric, scale, digits in (
        ("EM", "exact_match", 100.0, 1),
        ("F1", "f1", 100.0, 1),
        ("NLL", "answer_nll", 1.0, 3),
        ("ECE %", "answer_ece", 100.0, 1),
        ("AURC %", "answer_aurc", 100.0, 1),
    ):
        assert shown[heading] == show(
            over_runs(values[f"squad{version[0]}", variant, metric, variant != "soft"]), scale, digits
        )


@pytest.mark.parametrize("task", ["QNLI", "QQP"])
def test_differences_of_one_seed_are_those_of_their_csv(task):
    shown = rows_of((RESULTS / "language.md").read_text(), "| seed 0 |")
    with (RESULTS / "language-one-seed.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["task"] == task.lower()]
    for heading, metric, scale, digits in (("accuracy %", "accuracy", 100.0, 1), ("NLL", "nll", 1.0, 3)):
        for second, name in (("soft:mean", "soft"), ("soft:dropout", "dropout")):
            row = next(r for r in rows if (r["first"], r["second"], r["metric"]) == ("BAM-WC:attention", second, metric))
            value, low, high = (f"{scale * float(row[key]):+.{digits}f}" for key in ("value", "low", "high"))
            expected = f"{value} ({low} to {high})".replace("-", "−")
            assert shown[f"{task}, {heading}"][f"BAM-WC − {name}"] == expected


def test_table_of_the_third_search_is_that_of_its_csv():
    shown = rows_of((RESULTS / "language.md").read_text(), "| validation | seeds |")
    values = defaultdict(list)
    with (RESULTS / "language-search-noise.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["method"] == "attention":
                for metric in ("pearson", "rmse", "exact_match", "answer_nll"):
                    values[metric, float(row["weibull_k"])].append(row[metric])
    for name, metric, scale, digits in (
        ("STS-B, Pearson %", "pearson", 100.0, 1),
        ("STS-B, RMSE", "rmse", 1.0, 3),
        ("SQuAD 1.1, EM %", "exact_match", 100.0, 1),
        ("SQuAD 1.1, NLL", "answer_nll", 1.0, 3),
    ):
        for k in (1, 5, 20):
            expected = ", ".join(f"{scale * float(value):.{digits}f}" for value in values[metric, k] if value)
            assert shown[name][f"k {k}"].strip("*") == expected


def test_costs_of_a_step_are_those_of_the_benchmark():
    text = (RESULTS / "language.md").read_text()
    shown = [list(row.values())[1:] for row in rows_of(text, "| encoder | BAM-NOKL |").values()]
    with (RESULTS.parents[1] / "benchmarks" / "results" / "h200" / "conversion.csv").open(newline="") as file:
        ratios = {
            (row["case"].split(" b")[0], row["mode"], row["provider"]): f"{float(row['ratio']):.2f}"
            for row in csv.DictReader(file)
        }
    expected = [
        [
            ratios.get((case, mode, provider), "–")
            for mode in ("train step", "train step, CUDA graph")
            for provider in ("BAM-NOKL", "BAM-WC with KL")
        ]
        for case in ("albert-base", "albert-base padded", "e5-small", "e5-small padded")
    ]
    assert shown == expected


@pytest.mark.parametrize("page", ["docs/results/language.md", "benchmarks/README.md"])
def test_costs_of_a_whole_step_are_those_of_the_benchmark(page):
    root = RESULTS.parents[1]
    shown = rows_of((root / page).read_text(), "| whole step,")
    with (root / "benchmarks" / "results" / "h200" / "fine_tuning.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = {(row["case"].split(" ")[0].lower(), row["launches"], row["variant"]): row for row in rows}
    for name, row in shown.items():
        case, launches = name.split(",")[0].lower(), name.split(", ")[-1]
        assert row["soft, ms"] == f"{float(found[case, launches, 'soft']['median_ms']):.1f}"
        for variant in ("BAM-NOKL", "BAM-WC"):
            cell = found.get((case, launches, variant))
            assert row[variant] == ("–" if cell is None else f"{float(cell['ratio']):.2f}")
    assert len(shown) == 4


@pytest.mark.parametrize("config", sorted({config for config, *_ in read_values()}))
def test_config_says_what_was_measured_with_it(config):
    (line,) = (text for text in (CONFIGS / f"{config}.yaml").read_text().splitlines() if text.startswith("# Measured"))
    values = read_values()
    for variant, part in zip(("BAM-WC", "soft"), line.split("; ")):
        for name, shown in re.findall(r"(accuracy|Matthews|Pearson|EM|F1) ([\d.]+(?: ± [\d.]+)?) %", part):
            metric = {"EM": "exact_match"}.get(name, name.lower())
            assert shown == show(over_runs(values[config, variant, metric, variant != "soft"]), 100.0, 1)
        assert re.search(r"\d %", part)
