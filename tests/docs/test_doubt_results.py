"""The pages of the study of doubt say what its CSV files say."""

import csv
import math
import re
from pathlib import Path

import pytest
from scipy import stats

from bayesattn.evaluation.aggregate import over_runs
from bayesattn_recipes.common.tables import holm
from bayesattn_recipes.doubt import elsewhere, table
from bayesattn_recipes.doubt.rankings import BASELINE, FLAGSHIP

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "results"
PAGE, ELSEWHERE = ((FOLDER / f"{name}.md").read_text(encoding="utf-8") for name in ("doubt", "doubt-elsewhere"))
# the sentences of the pages, without their line breaks
SAID, SAID_ELSEWHERE = (" ".join(page.split()) for page in (PAGE, ELSEWHERE))
ROWS = table.read_rows(FOLDER / "doubt.csv")
POOLED = {row.ranking: row for row in table.pool(ROWS)}
FITTED, ENSEMBLE = "closed form, scale fitted", "ensemble of 3"


def read_elsewhere():
    """Return the rows of the other tasks."""
    with (FOLDER / "doubt-elsewhere.csv").open(encoding="utf-8") as file:
        return [{**r, "seed": int(r["seed"]), "value": float(r["value"])} for r in csv.DictReader(file)]


def values(name, measure):
    """Return a measure of a row by task and seed."""
    return {(row["task"], row["seed"]): row[measure] for row in ROWS if row["row"] == name}


def over_tasks(differences):
    """Return the mean difference of every task."""
    tasks = list(dict.fromkeys(task for task, _ in differences))
    return [over_runs([d for (task, _), d in differences.items() if task == name]).value for name in tasks]


def logs(name, other):
    """Return the logarithm of the ratio of two rankings' AURC, by task and seed."""
    ours, theirs = values(name, "aurc"), values(other, "aurc")
    return {run: math.log(ours[run] / theirs[run]) for run in ours}


def less(first, second):
    """Return the difference of two rows' measures, each given as (row, measure), by task and seed."""
    ours, theirs = values(*first), values(*second)
    return {run: ours[run] - theirs[run] for run in ours}


def p(differences):
    """Return the p-value of a paired t-test."""
    return float(stats.ttest_1samp(list(differences), 0.0)[1])


def percent(differences):
    """Return the mean change and its interval as the pages write them."""
    found = over_runs(list(differences))
    return [f"{100 * math.expm1(end):+.1f}".replace("-", "−") for end in (found.value, found.low, found.high)]


def test_tables_are_those_of_the_files():
    # the page leaves out rows, but not of the default method, nor of what it is compared with
    for whole in (table.ranking_table(ROWS), table.probability_table(ROWS)):
        header, rule, *lines = whole.splitlines()
        shown = PAGE[PAGE.index(header) :].split("\n\n")[0].splitlines()
        assert shown == [header, rule, *(line for line in lines if line in shown)]
    for name in (BASELINE, FLAGSHIP, FITTED, "attention draws, 20: t", "MC dropout, 20: t", ENSEMBLE, "ensemble of 5"):
        assert f"\n| {name} | " in PAGE
    names = re.findall(r"^\| (.*?) \|", PAGE[PAGE.index("| AURC, per cent") :].split("\n\n")[0], re.M)[3:]
    assert table.task_table(ROWS, names) in PAGE
    for found in elsewhere.page_tables(read_elsewhere()):
        assert found in ELSEWHERE


def test_the_second_encoder_says_what_its_file_says():
    rows = table.read_rows(FOLDER / "doubt-minilm.csv")
    assert table.task_table(rows, [FLAGSHIP, ENSEMBLE]) in PAGE
    pooled = {row.ranking: row for row in table.pool(rows)}
    found = pooled[FLAGSHIP]
    change, low, high = (f"{100 * end:+.1f}".replace("-", "−") for end in (found.change, found.low, found.high))
    counts = f"in {found.lower_runs} of {found.num_runs} models"
    assert f"lowers AURC by {change.removeprefix('−')} % ({low} to {high}), {counts}" in SAID
    assert f"(p = {found.p_value:.3f} over models after Holm; over three tasks, p = {found.p_tasks:.2f})" in SAID
    controls = sorted(100 * row.change for name, row in pooled.items() if name.startswith("control"))
    assert f"between −{-controls[-1]:.1f} and −{-controls[0]:.1f} %" in SAID
    assert all(row.p_value > 0.05 for name, row in pooled.items() if name.startswith("last-layer Laplace"))
    overview = " ".join((FOLDER / "README.md").read_text(encoding="utf-8").split())
    assert (
        f"and {-100 * found.change:.0f} % over nine of another (p = {found.p_value:.3f} and {found.p_tasks:.2f})" in overview
    )


def test_rankings_that_the_table_leaves_out_are_in_the_pooled_file():
    with (FOLDER / "doubt-pooled.csv").open(encoding="utf-8") as file:
        assert [row["ranking"] for row in csv.DictReader(file)] == list(POOLED)
    assert f"Holm's correction is over all {len(POOLED)} rankings" in SAID
    # of methods with several rankings, the table has the one with the lowest AURC
    for start in ("attention draws, 20", "MC dropout", "last-layer Laplace"):
        best = min((name for name in POOLED if name.startswith(start)), key=lambda name: POOLED[name].change)
        assert f"\n| {best} | " in PAGE


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
    assert f"p = {found.p_value:.4f} over models after Holm, {found.lower_runs} of {found.num_runs} models" in SAID


def test_tasks_are_the_unit_where_the_page_says_so():
    found = logs(FLAGSHIP, BASELINE)
    by_task = over_tasks(found)
    _, low, high = percent(by_task)
    assert f"over tasks, {low} to {high} %, p = {p(by_task):.3f}." in SAID
    corrected = dict(zip(POOLED, holm([row.p_tasks for row in POOLED.values()]), strict=True))
    ensemble = f"{POOLED[ENSEMBLE].p_tasks:.3f} for an ensemble of three (uncorrected; {corrected[ENSEMBLE]:.3f} after Holm)"
    assert f"p = {POOLED[FLAGSHIP].p_tasks:.3f} for the closed form and {ensemble}" in SAID
    mrpc = sum(log for (task, _), log in found.items() if task == "mrpc")
    assert f"MRPC supplies {100 * mrpc / sum(found.values()):.0f} % of the closed form's gain" in SAID
    others = {run: log for run, log in found.items() if run[0] != "mrpc"}
    assert f"the change is {percent(others.values())[0]} % (p = {p(over_tasks(others)):.3f} over tasks)" in SAID


def test_closed_form_and_ensemble_differ_as_the_page_says():
    found = logs(ENSEMBLE, FLAGSHIP).values()
    change, low, high = percent(found)
    assert f"an AURC {change.removeprefix('−')} % lower ({low} to {high} %, p = {p(found):.2f})" in SAID
    better = less((ENSEMBLE, "accuracy"), (BASELINE, "accuracy")).values()
    assert f"answers {100 * over_runs(list(better)).value:.1f} points better (p = {p(better):.3f}, uncorrected)" in SAID
    draws = [p(logs(name, FLAGSHIP).values()) for name in ("attention draws, 20: t", "MC dropout, 20: t")]
    assert "no difference from the closed form is seen (p = {:.2f} and {:.2f})".format(*draws) in SAID


def test_one_scale_is_compared_with_a_temperature():
    nll = less((FITTED, "nll"), (BASELINE, "nll_scaled"))
    models, tasks = p(nll.values()), p(over_tasks(nll))
    assert f"(p = {models:.3f} over models, {tasks:.2f} over tasks, uncorrected; higher on CoLA)" in SAID
    assert [task for task, mean in zip(POOLED[FLAGSHIP].by_task, over_tasks(nll), strict=True) if mean > 0.0] == ["cola"]
    ece = p(less((FITTED, "ece"), (BASELINE, "ece_scaled")).values())
    assert f"No difference in ECE is seen (4.8 against 4.4, p = {ece:.2f})" in SAID
    both = less((FITTED, "nll_scaled"), (BASELINE, "nll_scaled"))
    assert p(both.values()) < 1e-4
    assert f"(p < 0.0001 over models, {p(over_tasks(both)):.3f} over tasks)" in SAID
    five, three, dropout = (
        p(less((name, "nll_scaled"), (FITTED, "nll_scaled")).values())
        for name in ("ensemble of 5", ENSEMBLE, "MC dropout, 20: mean")
    )
    assert f"ensemble of five has a lower NLL (p = {five:.4f})" in SAID
    assert f"an ensemble of three (p = {three:.2f}) or MC dropout (p = {dropout:.2f})" in SAID


def test_test_sets_have_the_sizes_that_the_page_gives():
    # accuracies are whole numbers of texts
    sizes = {"rte": 277, "mrpc": 408, "cola": 1043, "sst2": 872, "qqp": 650, "mnli": 2723, "qnli": 546}
    for (task, _), accuracy in values(BASELINE, "accuracy").items():
        assert accuracy * sizes[task] == pytest.approx(round(accuracy * sizes[task]), abs=1e-6)
    assert f"test sets have {min(sizes.values())} to {max(sizes.values()):,} texts" in SAID


def test_what_is_clear_elsewhere_is_so_after_holm():
    shown: dict[tuple[str, str, str], dict[int, float]] = {}
    for row in read_elsewhere():
        if row["task"] in ("squad2", "digits", "citeseer", "pubmed"):
            shown.setdefault((row["task"], row["measure"], row["row"]), {})[row["seed"]] = row["value"]
    tests = {}
    for (task, measure, name), ours in shown.items():
        for reference in (BASELINE, "null score"):
            theirs = shown.get((task, measure, reference))
            if theirs is not None and name not in ("all", BASELINE, reference):
                tests[task, measure, name, reference] = [100 * (ours[seed] - theirs[seed]) for seed in ours]
    assert f"After Holm over its {len(tests)} tests" in SAID_ELSEWHERE
    corrected = dict(zip(tests, holm([p(found) for found in tests.values()]), strict=True))

    def change(task, measure, name=FLAGSHIP, reference=BASELINE):
        key = task, measure, name, reference
        return sum(tests[key]) / len(tests[key]), corrected[key]

    value, p_value = change("squad2", "AURC")
    assert value > 0.0
    assert p_value < 0.01
    assert f"sorts the answers better (p = {p_value:.3f})" in SAID_ELSEWHERE
    value, p_value = change("squad2", "AUROC of unanswerable", FLAGSHIP, "null score")
    assert f"{-value:.1f} points better (p = {p_value:.3f}: not clear)" in SAID_ELSEWHERE
    value, p_value = change("digits", "AURC")
    assert f"AURC is {value:.2f} higher, not clearly (p = {p_value:.3f})" in SAID_ELSEWHERE
    everywhere, linked, pubmed = (
        change("citeseer", "AURC"), change("citeseer", "AURC of nodes with neighbors"), change("pubmed", "AURC")
    )  # fmt: skip
    p_values = sorted(found for _, found in (everywhere, linked, pubmed))
    assert p_values[0] > 0.01
    assert (
        f"AURC is {everywhere[0]:.1f} higher, on those with neighbors {-linked[0]:.2f} lower, on PubMed {-pubmed[0]:.2f} "
        f"lower; none is clear (p = {p_values[0]:.3f} to {p_values[-1]:.3f})"
    ) in SAID_ELSEWHERE


def test_texts_of_another_kind_are_not_found():
    for name, shown in ((FLAGSHIP, "0.53 by doubt"), (BASELINE, "0.59 by own confidence")):
        values = [row["outside_auroc"] for row in ROWS if row["row"] == name]
        assert f"{sum(values) / len(values):.2f} by" in shown
        assert shown in SAID_ELSEWHERE


def test_readme_quotes_the_table():
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("−", "-").replace("**", "")
    for name in (FLAGSHIP, "attention draws, 20: t", "MC dropout, 20: t", "ensemble of 3", "last-layer Laplace: entropy"):
        row = POOLED[name]
        assert f"{100 * row.change:+.1f} % ({100 * row.low:+.1f} to {100 * row.high:+.1f})" in text
    assert len(re.sub(r"<!--.*?-->", "", text, flags=re.S).split()) <= 900
