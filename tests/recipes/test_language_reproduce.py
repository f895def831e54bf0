"""The table: rows share their runs, cells are not repeated, and numbers are those of the cells."""

import csv
import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from language_files import call, sentiment_data
from rich.console import Console

from bayesattn.cli.registry import Recipe, Request
from bayesattn.evaluation.report.gather import group_runs, read_runs
from bayesattn.files import RunError
from bayesattn_recipes.language import reproduce as reproducing
from bayesattn_recipes.language.reproduce import ROWS, LanguageRuns, members, plan_runs, reproduce, row_seeds
from bayesattn_recipes.language.table import section
from bayesattn_recipes.language.tasks import TASKS
from bayesattn_recipes.language.train import load_config

TINY = ["encoder=tiny", "training.steps=2", "max_length=16", "train_size=64"]
VARIANTS = ["soft", "dropout", "post-hoc", "ensemble", "BAM-WC", "BAM-WC+dropout"]
CONSOLE = Console(file=io.StringIO())


@pytest.fixture(scope="module")
def sentiment():
    return sentiment_data()


def run_table(out, sentiment, variants, num_seeds=1, settings=TINY, noise=(), **options):
    options = {"data": sentiment, "out": out, "console": CONSOLE, "settings": settings, **options}
    return reproduce(Request(names=["own"], variants=variants, num_seeds=num_seeds, **options), noise=noise)


@pytest.fixture(scope="module")
def table(tmp_path_factory, sentiment):
    out = tmp_path_factory.mktemp("table")
    return run_table(out, sentiment, VARIANTS, noise=(1.0,)).parent


def test_rows_of_one_variant_share_their_runs(table):
    runs = sorted(path.name for path in (table / "runs").iterdir())
    assert runs == ["own-BAM-WC-0", "own-ensemble-0", "own-soft-0", "own-soft-1", "own-soft-2"]
    assert not list((table / "runs").rglob("checkpoint*"))


def test_table_shows_every_row_and_the_shifts(table):
    text = (table / "table.md").read_text()
    assert all(f"| {row} |" in text for row in VARIANTS)
    assert "minus soft, paired" in text
    assert "| words-1 | BAM-WC |" in text


def test_ensemble_averages_itsmembers(table):
    cells = {path.stem: json.loads(path.read_text()) for path in (table / "cells").iterdir()}
    assert cells["own-ensemble-0"]["identity"]["ensemble"] == [0, 1, 2]
    predictions = reproducing.read_predictions(table / "runs" / "own-ensemble-0").splits["test"].samples["ensemble"]
    members = [reproducing.read_predictions(table / "runs" / f"own-soft-{seed}") for seed in (0, 1, 2)]
    assert predictions.shape[0] == 3
    assert all((predictions[i] == m.splits["test"].samples["mean"][0]).all() for i, m in enumerate(members))


def test_finished_cells_are_not_repeated(table, sentiment, monkeypatch):
    def train_again(*args, **kwargs):
        raise AssertionError("trained again")

    monkeypatch.setattr(reproducing, "train_model", train_again)
    before = (table / "table.md").read_text()
    run_table(table, sentiment, VARIANTS, noise=(1.0,))
    assert (table / "table.md").read_text() == before


def test_cells_of_other_settings_are_refused(table, sentiment):
    with pytest.raises(RunError, match=r"was run with other settings \(config\)"):
        run_table(table, sentiment, ["soft"], settings=[*TINY, "training.learning_rate=1e-3"], noise=(1.0,))


def test_csv_holds_every_number(table):
    rows = list(csv.DictReader((table / "cells.csv").read_text().splitlines()))
    methods = json.loads((table / "cells" / "own-BAM-WC-0.json").read_text())["measures"]["methods"]
    found = {
        row["metric"]: float(row["value"])
        for row in rows
        if (row["variant"], row["split"], row["draws"]) == ("BAM-WC", "test", "True")
    }
    assert found == methods["attention"]["splits"]["test"]


def test_calibration_is_drawn_for_every_row(table):
    names = sorted(path.name for path in (table / "calibration").iterdir())
    assert names == sorted(["all.png", *(f"own-{row}.png" for row in VARIANTS)])


def test_runs_of_a_table_can_be_reported(table):
    runs = read_runs([table / "runs" / name for name in ("own-soft-0", "own-BAM-WC-0")])
    assert [group.method for group in group_runs(runs)] == [
        "mean",
        "dropout",
        "post-hoc",
        "mean",
        "attention",
        "attention+dropout",
    ]


def test_two_processes_give_what_one_gives(table, sentiment, tmp_path):
    run_table(tmp_path, sentiment, ["BAM-WC"], num_seeds=2, jobs=2)
    folders = [folder / "cells" / "own-BAM-WC-0.json" for folder in (tmp_path, table)]
    found, alone = (json.loads(path.read_text())["measures"]["methods"] for path in folders)
    assert found.keys() == alone.keys()
    assert all(found[method]["splits"]["test"] == alone[method]["splits"]["test"] for method in found)


def test_five_runs_make_three_ensembles_and_no_more_runs():
    work = LanguageRuns(load_config("own", TINY), None, ())
    assert [members(seed) for seed in row_seeds("ensemble", 5)] == [[0, 1, 2], [1, 2, 3], [2, 3, 4]]
    assert plan_runs(work, "own", ["soft", "ensemble"], 5).num_seeds == {"soft": 5}
    assert plan_runs(work, "own", ["ensemble", "BAM-WC"], 1).num_seeds == {"soft": 3, "BAM-WC": 1}


def test_failed_run_leaves_a_table_of_the_others(tmp_path, sentiment, monkeypatch):
    def fail_for_seed_1(config, *args, **kwargs):
        if config.seed == 1:
            raise RuntimeError("out of memory")
        return train(config, *args, **kwargs)

    train = reproducing.train_model
    monkeypatch.setattr(reproducing, "train_model", fail_for_seed_1)
    with pytest.raises(
        RunError, match=r"table\.md is not complete: 1 failed, the first own-soft-1: RuntimeError: out of mem"
    ):
        run_table(tmp_path, sentiment, ["soft", "ensemble"], num_seeds=2)
    assert "| soft | 1 |" in (tmp_path / "table.md").read_text()
    assert "| ensemble |" not in (tmp_path / "table.md").read_text()
    assert "RuntimeError: out of memory" in (tmp_path / "failures" / "own-soft-1.txt").read_text()


def test_table_of_half_its_time_is_completed_later(tmp_path, sentiment):
    with pytest.raises(RunError, match="no run has finished: 1 were not started"):
        run_table(tmp_path, sentiment, ["soft"], minutes=0.0)
    assert "| soft | 1 |" in run_table(tmp_path, sentiment, ["soft"], minutes=60.0).read_text()


def test_tables_and_figures_need_no_draws(table, sentiment, tmp_path):
    copy = tmp_path / "table"
    shutil.copytree(
        table, copy, ignore=lambda folder, names: ["predictions.safetensors"] if Path(folder).name != "means" else []
    )
    before = (copy / "table.md").read_text()
    shutil.rmtree(copy / "calibration")
    (copy / "cells" / "own-ensemble-0.json").unlink()
    assert run_table(copy, sentiment, VARIANTS, noise=(1.0,)).read_text() == before
    assert len(list((copy / "calibration").iterdir())) == len(VARIANTS) + 1


def test_means_are_those_of_the_draws(table):
    run = table / "runs" / "own-BAM-WC-0"
    draws, means = (reproducing.read_predictions(folder).splits["words-1"].samples for folder in (run, run / "means"))
    assert draws["attention"].shape[0] == reproducing.NUM_SAMPLES
    assert torch.equal(means["attention"], draws["attention"].mean(dim=0, keepdim=True))


def test_ensembles_that_share_members_have_no_interval_and_no_test():
    cells = [fake_cell("soft", seed, value, 0.5) for seed, value in enumerate((0.8, 0.82, 0.84))]
    cells += [fake_cell("ensemble", seed, value, 0.4) for seed, value in enumerate((0.81, 0.85))]
    text = section("mrpc", TASKS["mrpc"], cells)
    assert "| ensemble | 2 | 83.00 | 83.00 | 83.00 | 0.400 |" in text
    assert "| ensemble | 2.00 | – | -0.100 | – |" in text


def fake_cell(row, seed, accuracy, nll):
    measures = {"splits": {"test": {"accuracy": accuracy, "f1": accuracy, "nll": nll, "ece": 0.1, "aurc": 0.2}}}
    drawn = None if row == "soft" else measures
    return {"name": "mrpc", "row": row, "seed": seed, "plain": measures, "drawn": drawn, "run": fake_run()}


def fake_run(note="", cut=0):
    counts = {"train": 3302, "validation": 366, "test": 408}
    return {"num_examples": counts, "data_note": note, "num_truncated": {"train": cut, "test": 1 if cut else 0}}


def test_table_says_which_part_of_a_task_it_is_of():
    cell = fake_cell("soft", 0, 0.8, 0.5)
    whole = "Examples: 3,302 to train on, 366 for validation, 408 for test"
    assert f"### mrpc\n\n{whole}.\n\n|" in section("mrpc", TASKS["mrpc"], [cell])
    cell["run"] = fake_run("a fifth of it, split by title", cut=1999)
    text = section("mrpc", TASKS["mrpc"], [cell])
    assert f"{whole}; a fifth of it, split by title. 2,000 were longer than the model reads and lost their end.\n" in text


def test_numbers_are_means_with_intervals_beside_the_papers():
    cells = [fake_cell("soft", seed, value, 0.5) for seed, value in enumerate((0.8, 0.82, 0.84))]
    cells += [fake_cell("BAM-WC", seed, value, 0.4) for seed, value in enumerate((0.81, 0.83, 0.85))]
    text = section("mrpc", TASKS["mrpc"], cells)
    # t for two degrees of freedom 4.303 · 0.02 / √3
    assert "| soft | 3 | 82.00 ± 4.97 | 82.00 ± 4.97 | – | 0.500 ± 0.000 |" in text
    assert "| 86.50 |" in text
    assert "| 88.50 |" in text
    assert "| BAM-WC | 1.00 ± 0.00 |" in text


def test_cola_is_compared_by_its_accuracy_too():
    cells = [fake_cell(row, seed, 0.7 + seed / 100, 0.5) for row in ("soft", "BAM-WC") for seed in range(3)]
    for cell in cells:
        cell["plain"]["splits"]["test"]["matthews"] = 0.4
    assert "| minus soft, paired | Matthews | p | accuracy | p | NLL | p |" in section("cola", TASKS["cola"], cells)


def test_bayesian_rows_are_compared_with_mc_dropout_too():
    cells = [fake_cell("dropout", seed, value, 0.5) for seed, value in enumerate((0.8, 0.82, 0.84))]
    cells += [fake_cell("BAM-WC", seed, value, 0.4) for seed, value in enumerate((0.83, 0.85, 0.87))]
    _, found = section("mrpc", TASKS["mrpc"], cells).split("| minus dropout, paired |")
    assert "| BAM-WC | 3.00 ± 0.00 |" in found
    assert "| dropout |" not in found


def test_squad_has_two_numbers_of_the_paper():
    measures = {"splits": {"test": {"exact_match": 0.5, "f1": 0.6}}}
    cell = {"name": "squad1", "row": "BAM-WC", "seed": 0, "plain": measures, "drawn": measures, "run": fake_run()}
    assert "| 81.40/88.82 |" in section("squad1", TASKS["squad1"], [cell])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "mrpc,glue"], "tasks must be among albert-cola"),
        (["--variants", "hard"], f"variants must be among {', '.join(ROWS)}, got 'hard'"),
    ],
)
def test_unknown_names_are_errors(options, message, tmp_path, capsys):
    assert call("reproduce", "language", *options, "--data", tmp_path, "--out", tmp_path / "out") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_option_that_a_recipe_does_not_take_is_an_error(capsys, monkeypatch):
    module = type("Module", (), {"reproduce": staticmethod(lambda request: None)})
    monkeypatch.setattr(Recipe, "load", lambda recipe, part: module)
    assert call("reproduce", "digits", "--search", "--splits", 2) == 2
    assert "recipe 'digits' does not take search, splits. Leave" in capsys.readouterr().err
