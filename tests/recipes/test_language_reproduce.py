"""The table: rows share their runs, cells are not repeated, and numbers are those of the cells."""

import csv
import io
import json

import pytest
from language_files import call, sentiment_data
from rich.console import Console

from bayesattn.recipes.language import reproduce as reproducing
from bayesattn.recipes.language.reproduce import ROWS, _members, reproduce
from bayesattn.recipes.language.table import section
from bayesattn.recipes.language.tasks import TASKS
from bayesattn.report.gather import group_runs, read_runs
from bayesattn.runs import RunError

TINY = ["encoder=tiny", "training.steps=2", "max_length=16", "train_size=64"]
CONSOLE = Console(file=io.StringIO())


@pytest.fixture(scope="module")
def sentiment():
    return sentiment_data()


def run_table(out, sentiment, variants, num_seeds=1, settings=TINY, **options):
    options = {"data": sentiment, "out": out, "console": CONSOLE, "settings": settings, **options}
    return reproduce(["own"], variants, num_seeds=num_seeds, **options)


@pytest.fixture(scope="module")
def table(tmp_path_factory, sentiment):
    out = tmp_path_factory.mktemp("table")
    return run_table(out, sentiment, ["soft", "dropout", "post-hoc", "ensemble", "BAM-WC"], noise=(1.0,)).parent


def test_rows_of_one_variant_share_their_runs(table):
    runs = sorted(path.name for path in (table / "runs").iterdir())
    assert runs == ["own-BAM-WC-0", "own-ensemble-0", "own-soft-0", "own-soft-1001", "own-soft-1002"]
    assert not list((table / "runs").rglob("checkpoint*"))


def test_table_shows_every_row_and_the_shifts(table):
    text = (table / "table.md").read_text()
    assert all(f"| {row} |" in text for row in ("soft", "dropout", "post-hoc", "ensemble", "BAM-WC"))
    assert "minus soft, paired" in text
    assert "| words-1 | BAM-WC |" in text


def test_ensemble_averages_its_members(table):
    cells = {path.stem: json.loads(path.read_text()) for path in (table / "cells").iterdir()}
    assert cells["own-ensemble-0"]["identity"]["ensemble"] == [0, 1001, 1002]
    predictions = reproducing.read_predictions(table / "runs" / "own-ensemble-0").splits["test"].samples["ensemble"]
    members = [reproducing.read_predictions(table / "runs" / f"own-soft-{seed}") for seed in (0, 1001, 1002)]
    assert predictions.shape[0] == 3
    assert all((predictions[i] == m.splits["test"].samples["mean"][0]).all() for i, m in enumerate(members))


def test_finished_cells_are_not_repeated(table, sentiment, monkeypatch):
    def train_again(*args, **kwargs):
        raise AssertionError("trained again")

    monkeypatch.setattr(reproducing, "train_model", train_again)
    before = (table / "table.md").read_text()
    run_table(table, sentiment, ["soft", "dropout", "post-hoc", "ensemble", "BAM-WC"], noise=(1.0,))
    assert (table / "table.md").read_text() == before


def test_cells_of_other_settings_are_refused(table, sentiment):
    with pytest.raises(RunError, match=r"was run with other settings \(config\)"):
        run_table(table, sentiment, ["soft"], settings=[*TINY, "training.learning_rate=1e-3"], noise=(1.0,))


def test_csv_holds_every_number(table):
    rows = list(csv.DictReader((table / "cells.csv").read_text().splitlines()))
    cell = json.loads((table / "cells" / "own-BAM-WC-attention-0.json").read_text())["measures"]["splits"]["test"]
    found = {
        row["metric"]: float(row["value"])
        for row in rows
        if (row["variant"], row["split"], row["draws"]) == ("BAM-WC", "test", "True")
    }
    assert found == cell


def test_calibration_is_drawn_for_every_row(table):
    names = sorted(path.name for path in (table / "calibration").iterdir())
    assert names == sorted(f"own-{row}.png" for row in ("soft", "dropout", "post-hoc", "ensemble", "BAM-WC"))


def test_runs_of_a_table_can_be_reported(table):
    runs = read_runs([table / "runs" / name for name in ("own-soft-0", "own-BAM-WC-0")])
    assert [group.method for group in group_runs(runs)] == ["mean", "dropout", "post-hoc", "mean", "attention"]


def test_two_processes_give_what_one_gives(table, sentiment, tmp_path):
    run_table(tmp_path, sentiment, ["soft", "BAM-WC"], jobs=2)
    for path in (tmp_path / "cells").iterdir():
        found, alone = (json.loads((folder / "cells" / path.name).read_text()) for folder in (tmp_path, table))
        assert found["measures"]["splits"]["test"] == alone["measures"]["splits"]["test"]


def test_members_of_ensembles_are_never_shared():
    seeds = [seed for ensemble in range(20) for seed in _members(ensemble)]
    assert len(set(seeds)) == len(seeds)


def fake_cell(row, seed, accuracy, nll):
    measures = {"splits": {"test": {"accuracy": accuracy, "f1": accuracy, "nll": nll, "ece": 0.1, "aurc": 0.2}}}
    drawn = None if row == "soft" else measures
    return {"name": "mrpc", "row": row, "seed": seed, "plain": measures, "drawn": drawn}


def test_numbers_are_means_with_intervals_beside_the_papers():
    cells = [fake_cell("soft", seed, value, 0.5) for seed, value in enumerate((0.8, 0.82, 0.84))]
    cells += [fake_cell("BAM-WC", seed, value, 0.4) for seed, value in enumerate((0.81, 0.83, 0.85))]
    text = section("mrpc", TASKS["mrpc"], cells)
    # t for two degrees of freedom 4.303 · 0.02 / √3
    assert "| soft | 3 | 82.00 ± 4.97 | 82.00 ± 4.97 | – | 0.500 ± 0.000 |" in text
    assert "| 86.50 |" in text
    assert "| 88.50 |" in text
    assert "| BAM-WC | 1.00 ± 0.00 |" in text


def test_squad_has_two_numbers_of_the_paper():
    measures = {"splits": {"test": {"exact_match": 0.5, "f1": 0.6}}}
    cell = {"name": "squad1", "row": "BAM-WC", "seed": 0, "plain": measures, "drawn": measures}
    assert "| 81.40/88.82 |" in section("squad1", TASKS["squad1"], [cell])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "mrpc,glue"], "tasks has ['glue']; allowed: albert-cola"),
        (["--variants", "hard"], f"variants has ['hard']; allowed: {', '.join(ROWS)}"),
    ],
)
def test_unknown_names_are_errors(options, message, tmp_path, capsys):
    assert call("reproduce", "language", *options, "--data", tmp_path, "--out", tmp_path / "out") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_option_that_a_recipe_does_not_take_is_an_error(capsys, monkeypatch):
    from bayesattn import recipes

    monkeypatch.setattr(
        recipes, "load", lambda recipe, part: type("Module", (), {"reproduce": staticmethod(lambda names: None)})
    )
    assert call("reproduce", "digits", "--jobs", 2) == 2
    assert "recipe 'digits' does not take jobs" in capsys.readouterr().err
