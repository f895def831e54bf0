"""The search for settings: it sees validation texts only, goes on where it stopped, and chooses by its rule."""

import dataclasses
import io
import json
from collections import Counter

import pytest
from language_files import GLUE, sentiment_data, write_glue, write_squad
from rich.console import Console

from bayesattn_recipes.common.tables import write_cell
from bayesattn_recipes.language import grids
from bayesattn_recipes.language import search as searching
from bayesattn_recipes.language.grids import GRIDS, Trial, grid_settings, trials
from bayesattn_recipes.language.search import TOLERANCE, rank, search
from bayesattn_recipes.language.train import load_config

TINY = ["encoder=tiny", "training.steps=2", "max_length=16", "train_size=64"]
SMALL = {"soft": {"training.learning_rate": [1e-5, 1e-3]}, "BAM-WC": {"training.kl_schedule.final": [1e-4, 1e-3]}}


def run_search(out, monkeypatch, **options):
    monkeypatch.setattr(grids, "GRIDS", SMALL)
    options = {"num_seeds": 1, "data": sentiment_data(), "out": out, "console": Console(file=io.StringIO())} | options
    return search(["own"], list(SMALL), settings=TINY, **options)


def test_search_predicts_validation_texts_only(tmp_path, monkeypatch):
    seen = []
    predict = searching.Predictor.predict

    def look(self, splits, **options):
        seen.extend(splits)
        return predict(self, splits, **options)

    monkeypatch.setattr(searching.Predictor, "predict", look)
    rows = run_search(tmp_path, monkeypatch)
    assert set(seen) == {"validation"}
    assert [row["variant"] for row in rows] == ["BAM-WC", "BAM-WC", "soft", "soft"]
    assert sum(row["chosen"] for row in rows) == 2
    assert (tmp_path / "search.md").read_text().count("\n") == 6
    cell = json.loads(next((tmp_path / "cells").glob("own-BAM-WC-*")).read_text())["measures"]["methods"]
    assert list(cell) == ["mean", "attention", "attention+dropout"]

    def train_again(*args, **kwargs):
        raise AssertionError("trained again")

    monkeypatch.setattr(searching, "train_model", train_again)
    assert run_search(tmp_path, monkeypatch) == rows


def test_grids_are_of_equal_size():
    assert {len(grid_settings(grid)) for grid in GRIDS.values()} == {8}


def test_trials_take_turns_between_the_grids(tmp_path):
    found = trials(["rte", "mrpc"], ["soft", "BAM-WC"], 2, TINY, tmp_path)
    assert [(t.variant, t.config.task) for t in found[:4]] == [
        ("soft", "rte"), ("soft", "mrpc"), ("BAM-WC", "rte"), ("BAM-WC", "mrpc"),
    ]  # fmt: skip
    assert len({trial.path for trial in found}) == len(found) == 64
    assert {trial.config.seed for trial in found} == {100, 101}


def test_part_of_the_grids_is_what_has_all_the_settings(tmp_path):
    only = ["training.learning_rate=5e-05", "training.epochs=6"]
    found = trials(["rte"], list(GRIDS), 1, TINY, tmp_path, only)
    assert Counter(trial.variant for trial in found) == {"soft": 2, "BAM-NOKL": 2, "BAM-WC": 4}
    assert all(set(only) <= set(trial.settings) for trial in found)
    with pytest.raises(ValueError, match=r"only is \['seed=1'\], which no setting has; allowed, for instance: training"):
        trials(["rte"], list(GRIDS), 1, TINY, tmp_path, ["seed=1"])


def fake_trial(folder, rate, task, accuracy, nll):
    config = load_config(task, [*TINY, f"training.learning_rate={rate}"])
    trial = Trial("soft", (f"training.learning_rate={rate}",), dataclasses.replace(config, seed=100), folder)
    values = {"accuracy": accuracy, "nll": nll, "ece": 0.1, "aurc": 0.1, "main": accuracy}
    write_cell(trial.path, trial.identity, {"methods": {"mean": values}})
    return trial


def test_lowest_nll_among_the_accurate_is_chosen(tmp_path):
    found = [
        fake_trial(tmp_path, rate, task, accuracy, nll)
        for rate, accuracy, nll in ((1e-5, 0.80, 0.60), (2e-5, 0.80 - TOLERANCE / 2, 0.50), (3e-5, 0.70, 0.40))
        for task in ("rte", "mrpc")
    ]
    # tried on one task only: it cannot be compared
    found.append(fake_trial(tmp_path, 4e-5, "rte", 0.99, 0.01))
    rows = rank(found, num_tasks=2)
    assert [row["settings"] for row in rows if row["chosen"]] == ["training.learning_rate=2e-05"]
    assert len(rows) == 3


@pytest.mark.parametrize("task", ["stsb", "squad1"])
def test_scores_and_answers_are_searched_by_their_own_measures(task, tmp_path):
    write_glue(tmp_path / "data", {**GLUE, "STS-B/train.tsv": GLUE["STS-B/train.tsv"] + scores(7)})
    write_squad(tmp_path / "data")
    rows = search(
        [task], ["BAM-LF"], num_seeds=1, data=tmp_path / "data", out=tmp_path, console=Console(file=io.StringIO()),
        settings=["encoder=tiny", "training.steps=2", "max_length=64"], grid={"attention.sigma_q": ["0.5", "2"]},
    )  # fmt: skip
    assert {row["settings"] for row in rows} == {"attention.sigma_q=0.5", "attention.sigma_q=2"}
    assert sum(row["chosen"] for row in rows) == 1
    quality = "pearson" if task == "stsb" else "exact_match"
    best = max(row[quality] for row in rows)
    assert all(row[quality] >= best - TOLERANCE for row in rows if row["chosen"])
    heading = {"stsb": "| Pearson % | RMSE |", "squad1": "| EM % | NLL |"}[task]
    assert heading in (tmp_path / "search.md").read_text()


def scores(count):
    return "".join(f"{i}\tg\tf\t2012\t{i}\tn\tn\tMan {i}.\tDog {i}.\t{i % 5}.5\n" for i in range(count))


@pytest.mark.parametrize(
    ("tasks", "variants", "message"),
    [
        (["stsb", "rte"], ["soft"], r"tasks has \['stsb', 'rte'\] of the kinds .*; allowed: tasks of one kind"),
        (["rte"], ["hard"], r"variants has \['hard'\]"),
    ],
)
def test_what_cannot_be_searched_is_an_error(tasks, variants, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        search(tasks, variants, num_seeds=1, data=tmp_path, out=tmp_path, console=Console())
