"""The page of translation results, its configs and its cost table show what the committed CSV files hold."""

import csv
import itertools
import re
from collections import defaultdict
from pathlib import Path

import pytest

from bayesattn.evaluation.aggregate import over_runs
from bayesattn_recipes.common.tables import show, show_p
from bayesattn_recipes.translation.reproduce import VARIANTS
from bayesattn_recipes.translation.train import CONFIGS

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
NAMES = {
    "soft": "soft",
    "wc": "BAM-WC, k = 15",
    "nokl": "BAM-NOKL, k = 15",
    "lc": "BAM-LC",
    "wf": "BAM-WF, k = 15",
    "lf": "BAM-LF",
    "wc-default": "BAM-WC, library prior",
    "sampled-kl": "BAM-WC, library prior, sampled KL",
    "mc-dropout": "MC dropout, on the weights",
    "exact": "variational, exact marginal",
    "enum": "variational, Enum",
    "sample": "variational, Sample",
    "dirichlet": "variational, Dirichlet (relaxed)",
    "gumbel": "hard, Gumbel",
    "hard": "hard, REINFORCE",
    "gaussian": "Gaussian context",
}


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


def table(header, path=RESULTS / "translation.md"):
    """Return the cells of the table with this header, by the name of the row."""
    text = path.read_text(encoding="utf-8")
    lines = text[text.index(header) :].split("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return {row[0]: row[1:] for row in cells}


def shown(rows, name, digits=2, *, sign=False):
    """Return what a cell says of its runs: mean and interval of three, the values themselves of fewer."""
    values = [float(row[name]) for row in rows]
    if len(values) < 3:
        text = ", ".join(f"{value:{'+' if sign else ''}.{digits}f}" for value in values) or "–"
    else:
        text = ("+" if sign and over_runs(values).value >= 0.0 else "") + show(over_runs(values), digits=digits)
    return text.replace("-", "−")


@pytest.mark.parametrize("variant", NAMES)
def test_row_of_multi30k_is_that_of_the_runs(variant):
    runs = grouped(read("multi30k.csv"), "variant", "test")[variant, "test-2016"]
    compared = grouped(read("multi30k-comparisons.csv"), "variant")[(variant,)]
    p_values = ", ".join(show_p(float(row["bootstrap_p"])) for row in compared) or "–"
    assert table("| attention | seeds | test 2016 |")[NAMES[variant]][:7] == [
        str(len(runs)),
        shown(runs, "bleu"),
        shown(compared, "difference", sign=True),
        p_values,
        shown(runs, "chrf"),
        shown(runs, "perplexity"),
        shown(runs, "token_ece", 3),
    ]


def test_every_variant_of_multi30k_has_a_row_of_three_seeds():
    assert {*NAMES, "gaussian-weights"} == set(VARIANTS)
    assert {cells[0] for cells in table("| attention | seeds | test 2016 |").values()} == {"3"}


@pytest.mark.parametrize("variant", NAMES)
def test_row_of_the_other_tests_is_that_of_the_runs(variant):
    runs = grouped(read("multi30k.csv"), "variant", "test")
    tests = ("test-2017", "test-mscoco", "test-2018", "iwslt14-test")
    expected = [shown(runs[variant, test], "bleu") if (variant, test) in runs else "not measured" for test in tests]
    assert table("| attention | 2017 | MSCOCO |")[NAMES[variant]] == expected


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_header_of_a_config_has_the_bleu_of_its_runs(path):
    dataset, _, variant = path.stem.partition("-")
    found = re.findall(r"# Measured \(docs/results/translation.md\): (.*) BLEU", path.read_text(encoding="utf-8"))
    runs = [] if dataset == "iwslt14" else grouped(read(f"{dataset}.csv"), "variant", "test")
    test = {"multi30k": "test-2016", "tatoeba": "test"}.get(dataset)
    expected = [f"{float(row['bleu']):.2f}" for row in runs[variant, test]] if runs else []
    assert re.findall(r"[\d.]+", "".join(found)) == expected


def test_cost_table_is_that_of_the_benchmark():
    with (ROOT / "benchmarks" / "results" / "h200" / "translation.csv").open(newline="") as file:
        rows = {(row["provider"], row["mode"]): row for row in csv.DictReader(file)}
    written, soft = table("| attention | decoder as a CUDA graph"), float(rows["soft", "train step"]["peak_mib"])
    assert {(name, mode) for name in written for mode in ("train step", "train step, cuda-graph")} == set(rows)
    for name, cells in written.items():
        graph, plain = rows[name, "train step, cuda-graph"], rows[name, "train step"]
        median, low, high = (float(graph[part]) for part in ("median_ms", "p20_ms", "p80_ms"))
        ratios = [float(graph["ratio"]), float(plain["ratio"]), float(plain["peak_mib"]) / soft]
        assert cells == [f"{median:.1f} ms ({low:.1f}–{high:.1f})", *(f"{ratio:.2f}" for ratio in ratios)]


@pytest.mark.parametrize(("variant", "name"), [("soft", "soft"), ("wc", "BAM-WC")])
def test_row_of_tatoeba_is_that_of_the_runs(variant, name):
    runs = grouped(read("tatoeba.csv"), "variant", "test")
    compared = grouped(read("tatoeba-comparisons.csv"), "variant")[(variant,)]
    assert table("| attention | seeds | test | − soft |")[name] == [
        str(len(runs[variant, "test"])),
        shown(runs[variant, "test"], "bleu"),
        shown(compared, "difference", sign=True),
        ", ".join(show_p(float(row["bootstrap_p"])) for row in compared) or "–",
        shown(runs[variant, "iwslt14-test"], "bleu"),
        shown(runs[variant, "test"], "chrf"),
        shown(runs[variant, "test"], "perplexity"),
        shown(runs[variant, "test"], "token_ece", 3),
    ]


DRAWS = {
    "soft, none": ("soft", "mean"),
    "soft, MC dropout": ("soft", "dropout"),
    "BAM-WC, none": ("wc", "mean"),
    "BAM-WC, attention": ("wc", "attention"),
    "BAM-WC, attention and dropout": ("wc", "attention+dropout"),
    "MC dropout on the weights, none": ("mc-dropout", "mean"),
    "MC dropout on the weights, all dropout": ("mc-dropout", "dropout"),
}


def test_table_of_draws_is_that_of_the_runs():
    written = table("| attention, draws | Multi30k: perplexity |")
    assert set(written) == set(DRAWS)
    found = [grouped(read(f"{dataset}-calibration.csv"), "variant", "draws") for dataset in ("multi30k", "tatoeba")]
    for name, key in DRAWS.items():
        expected = [
            shown(runs[key], column, digits) if key in runs else ""
            for runs in found
            for column, digits in (("perplexity", 2), ("token_ece", 3))
        ]
        assert written[name] == expected


SIGNALS = {"entropy": "entropy", "−ln p": "nll", "mutual information": "mutual_information", "disagreement": "disagreement"}


def test_table_of_uncertainties_is_that_of_the_runs():
    written = table("| attention, draws, signal | Multi30k: chrF |")
    assert len(written) == 14
    found = [grouped(read(f"{dataset}-uncertainty.csv"), "variant", "signal") for dataset in ("multi30k", "tatoeba")]
    for rows in found:
        for row in itertools.chain.from_iterable(rows.values()):
            row["gain"] = float(row["bleu_20%_withheld"]) - float(row["bleu_0%_withheld"])
    for name, cells in written.items():
        draws, _, signal = name.rpartition(", ")
        variant, method = DRAWS.get(draws, ("mc-dropout", "dropout"))
        key = (variant, f"{method} {SIGNALS[signal]}")
        assert cells == [
            shown(runs[key], column, digits) if key in runs else ""
            for runs in found
            for column, digits in (("spearman_chrf", 3), ("spearman_bleu", 3), ("gain", 2))
        ]
