"""The page of language results shows what its CSV holds."""

import csv
import json
import re
from collections import defaultdict
from pathlib import Path
from statistics import fmean

import pytest

from bayesattn.evaluation.aggregate import over_runs
from bayesattn_recipes.common.tables import paired, show
from bayesattn_recipes.language.train import CONFIGS

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


@pytest.mark.parametrize("variant", ["soft", "dropout", "post-hoc", "BAM-WC", "BAM-WC+dropout"])
def test_table_of_tasks_at_hand_in_part_is_that_of_the_csv(variant):
    values = read_values()
    text = (RESULTS / "language.md").read_text()
    shown = rows_of(text, "| | MNLI |")[variant]
    (seeds,) = re.findall(r"^Five seeds in every row, but (.*)\.$", text, re.MULTILINE)
    for task in ("MNLI", "QNLI", "QQP", "WNLI"):
        found = values.get((task.lower(), variant, "accuracy", variant != "soft"))
        assert shown[task] == ("–" if found is None else show(over_runs(found), 100.0, 1))
        # what the line below the table does not name has five
        named = re.search(rf"(?:(?<!\+){re.escape(variant)} of {task}|(?<!of ){task}) (\d)", seeds)
        assert found is None or len(found) == (5 if named is None else int(named[1]))


@pytest.mark.parametrize("task", ["MRPC", "RTE"])
@pytest.mark.parametrize("variant", ["BAM-NOKL", "BAM-LF", "BAM-LC", "BAM-WF", "BAM-WC"])
def test_table_of_the_other_variants_is_that_of_the_csv(task, variant):
    row = rows_of((RESULTS / "language.md").read_text(), "| task, variant |")[f"{task}, {variant}"]
    for heading, metric, scale, digits in (
        ("accuracy %", "accuracy", 100.0, 1),
        ("NLL", "nll", 1.0, 3),
        ("ECE %", "ece", 100.0, 1),
    ):
        found = read_values()[task.lower(), variant, metric, True]
        assert row[heading] == show(over_runs(found), scale, digits)
        assert row["seeds"] == str(len(found))


def read_by_seed(split, metric="nll"):
    """Return the values of a shifted set by config, variant and seed."""
    values = defaultdict(dict)
    with (RESULTS / "language.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if (row["split"], row["metric"]) == (split, metric) and (row["draws"] == "True" or row["variant"] == "soft"):
                values[row["config"], row["variant"]][int(row["seed"])] = float(row["value"])
    return values


def test_noise_in_training_lowers_the_nll_of_shifted_texts_as_the_page_says():
    shifts = {
        "mrpc": ["qqp"], "cola": [], "rte": ["mnli"], "qnli": ["rte"], "qqp": ["mrpc"],
    }  # fmt: skip
    below_dropout, differences = [], []
    for config, related in shifts.items():
        for split in ("characters-1", "words-1", *related):
            values = read_by_seed(split)
            ours, soft, dropout = (values[config, variant] for variant in ("BAM-WC", "soft", "dropout"))
            compared = paired(ours, soft)
            assert compared.p_value <= 0.04
            differences.append(compared.difference.value)
            found = paired(ours, dropout)
            if found.p_value < 0.05:
                below_dropout.append(found.difference.value)
            assert fmean(ours.values()) < fmean(values[config, "ensemble"].values())
    assert (len(differences), round(max(differences), 2), round(min(differences), 2)) == (14, -0.05, -0.31)
    assert (len(below_dropout), round(max(below_dropout), 2), round(min(below_dropout), 2)) == (11, -0.03, -0.15)


def test_attention_of_the_lognormal_variants_becomes_uniform():
    first, last = defaultdict(list), defaultdict(list)
    with (RESULTS / "language-variants.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if float(row["kl_weight"]) == 1e-5:
                family = "lognormal" if row["variant"] in ("BAM-LF", "BAM-LC") else "weibull"
                for epoch, found in ((0, first), (5, last)):
                    if int(row["epoch"]) == epoch:
                        found[family].append(round(float(row["attention_entropy"]), 2))
    assert (min(first["lognormal"]), max(first["lognormal"])) == (0.61, 0.63)
    assert (min(last["lognormal"]), max(last["lognormal"])) == (0.93, 0.98)
    assert (min(last["weibull"]), max(last["weibull"])) == (0.64, 0.7)


def test_gradients_of_the_kl_are_those_of_their_file():
    found = json.loads((RESULTS / "language-gradient.json").read_text())["results"]
    norms = {case: [round(x) for x in values["kl"]["norms"]] for case, values in found.items()}
    lognormal = [round(x, -2) for x in (*norms["BAM-LF"], *norms["BAM-LC"])]
    assert (min(lognormal), max(lognormal)) == (19_800, 37_200)
    assert (min(norms["detach_keys true"]), max(norms["detach_keys true"])) == (58, 62)
    assert (min(norms["BAM-WF"]), max(norms["BAM-WF"])) == (272, 309)
    likelihood = [x for case, values in found.items() if case != "detach_keys false" for x in values["nll"]["norms"]]
    assert (round(min(likelihood), 1), round(max(likelihood), 1)) == (0.4, 1.3)


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
