"""Comparisons with equal search: every kind has as many settings, validation chooses, no cell is run twice."""

import csv
import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from language_files import call, sentiment_data
from rich.console import Console

from bayesattn.cli.registry import Request
from bayesattn.files import RunError
from bayesattn_recipes.captioning import tuned as captions
from bayesattn_recipes.common.search import (
    Key,
    Kind,
    Study,
    best_setting,
    comparison_table,
    cross_fitted_nll,
    final_keys,
    search_keys,
)
from bayesattn_recipes.digits import data
from bayesattn_recipes.digits import reproduce as digits
from bayesattn_recipes.graph import splits as graph
from bayesattn_recipes.language import tuned
from bayesattn_recipes.vision.shapes import COLORS, make_shapes_world
from bayesattn_recipes.vqa import tuned as questions

KINDS = {
    "soft": Kind("soft", "mean", (("rate=1",), ("rate=2",))),
    "ensemble": Kind("soft", "mean", (("rate=1",), ("rate=3",)), members=2),
}
RUN: list[Key] = []


def run(key: Key) -> dict:
    RUN.append(key)
    rate = int(key.settings[0][-1])
    return {"mean": {"validation_nll": abs(rate - 2) + 0.1 * key.seeds[0], "accuracy": rate}}


def study(folder, minutes=None) -> Study:
    RUN.clear()
    request = Request(out=folder, console=Console(quiet=True), minutes=minutes)
    return Study(run, lambda key: {"seeds": list(key.seeds)}, (), request)


def keys():
    return search_keys(KINDS, ["d"], (7, 8), prefix=True, shared=("epochs=3",))


def test_search_runs_shared_cells_once_and_not_again(tmp_path):
    rows = study(tmp_path).search(keys())
    # both kinds ask for rate 1
    assert len(RUN) == 6
    assert len(rows) == 8
    assert RUN[0] == Key("d-soft", ("rate=1", "epochs=3"), (7,))
    assert study(tmp_path).search(keys()) == rows
    assert not RUN


def test_best_setting_has_the_smallest_mean_and_members_get_seeds_of_their_own(tmp_path):
    rows = study(tmp_path).search(keys())
    assert best_setting(row for row in rows if row["kind"] == "soft") == "rate=2"
    found = final_keys(KINDS, rows, ["d"], range(2), prefix=False, shared=())
    assert [key for key, _ in found.values()] == [
        Key("soft", ("rate=2",), (0,)),
        Key("soft", ("rate=1",), (0, 1)),
        Key("soft", ("rate=2",), (1,)),
        Key("soft", ("rate=1",), (2, 3)),
    ]


def test_search_without_time_says_what_is_missing(tmp_path):
    with pytest.raises(
        RunError, match=r"6 runs of the search are missing. Run the same command with more minutes to continue"
    ):
        study(tmp_path, minutes=0.0).search(keys())


@pytest.mark.parametrize("kinds", [digits.KINDS, graph.KINDS, captions.KINDS, questions.KINDS])
def test_every_kind_of_a_study_has_as_many_settings(kinds):
    searched = {name: kind for name, kind in kinds.items() if not name.endswith("paper's k and β")}
    assert len({len(set(kind.grid)) for kind in searched.values()}) == 1
    # the row of the paper's own settings has nothing to choose from
    assert all(len(kind.grid) == 1 for name, kind in kinds.items() if name not in searched)


def test_cross_fitted_nll_is_blind_to_the_temperature_of_the_predictions():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(1, 401, 5, generator=generator)
    labels = torch.distributions.Categorical(logits=logits[0]).sample()
    plain, sharp = (cross_fitted_nll(torch.softmax(factor * logits, dim=-1), labels) for factor in (1.0, 3.0))
    assert plain == pytest.approx(sharp, rel=1e-4)
    # the labels follow the logits: far better than chance
    assert plain < math.log(5.0) - 0.2


@pytest.mark.parametrize("kind", list(digits.KINDS))
def test_digits_cells_have_every_measure_of_their_kind(kind):
    of_kind = digits.KINDS[kind]
    tiny = ("training.epochs=1", "train_size=20", "width=8", "num_heads=2")
    cell = digits.run_cell(Key(of_kind.config, (*of_kind.fixed, *of_kind.grid[-1], *tiny), tuple(range(of_kind.members))))
    assert cell[of_kind.method]["validation_nll"] > 0.0
    for condition in digits.CONDITIONS:
        assert set(digits.MEASURES) <= cell[of_kind.method][condition].keys()


def test_table_pairs_seeds_and_shows_equal_effort():
    rows = [
        {"dataset": "d", "kind": kind, "seed": seed, "setting": "rate=1", "settings_tried": 2,
         "accuracy": 0.5 + gain + 0.1 * seed, "scaled_nll": 1.0 - gain + 0.01 * seed * seed * (kind != "soft"), "aurc": 0.1}
        for kind, gain in (("soft", 0.0), ("ensemble", 0.02))
        for seed in range(3)
    ]  # fmt: skip
    lines = comparison_table(rows).splitlines()
    assert lines[3].startswith("| d | ensemble | 3 | 2 | rate=1 | 62.00 ± 24.84 | 2.00 ± 0.00 | < 0.0001 |")


def test_shapes_are_a_second_data_set_of_the_digits_study():
    splits = data.load_splits(60, "shapes")
    assert splits["train"].images.shape == (60, 16, 16, 3)
    # every class occurs, and no picture of one split is in another
    assert all(len(split.labels.unique()) == 4 for split in splits.values())
    rows = [tuple(image.flatten().tolist()) for split in splits.values() for image in split.images]
    assert len(set(rows)) == 60 + data.VALIDATION_SIZE + data.TEST_SIZE
    tiny = ("dataset=shapes", "training.epochs=1", "train_size=60", "width=8", "num_heads=2")
    cell = digits.run_cell(Key("wc", tiny, (0,)))
    assert set(digits.CONDITIONS) <= cell["attention"].keys()


def test_leftmost_shape_names_the_class():
    world = make_shapes_world(40, data.SPLIT_SEED)
    labels = data.load_splits(40, "shapes")["train"].labels
    for scene, label in zip(world.scenes, labels.tolist()):
        first = min(shape.column for shape in scene)
        assert COLORS[label] in {shape.color for shape in scene if shape.column == first}


def test_members_of_a_graph_ensemble_share_a_split_and_differ_in_their_seeds():
    single, ensemble = Key("cora-soft-tuned", (), (7,)), Key("cora-soft-tuned", (), (21, 22, 23))
    assert graph._config(single).split == graph._config(ensemble).split == 7
    assert ensemble.name == "cora-soft-tuned_21-22-23"


@pytest.mark.parametrize("task", tuned.TASKS)
def test_language_study_gives_every_kind_eight_settings_and_the_papers_own_k(task):
    kinds = tuned.kinds(task)
    assert {len(set(kind.grid)) for kind in kinds.values()} == {8}
    for kind in kinds.values():
        for setting in kind.grid:
            tuned._config(Key(kind.config, (*kind.fixed, *setting), (0,)))
    shapes = {float(setting[0].partition("=")[2]) for setting in kinds["BAM-WC"].grid}
    assert {1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, float(tuned.PAPER_K[task])} == shapes


def test_the_language_search_runs_from_the_command_line(tmp_path, monkeypatch):
    def cell(key, data):
        # the more dropout, and the larger k, the better
        score = sum(
            float(setting.rpartition("=")[2]) for setting in key.settings if "dropout" in setting or "_k=" in setting
        )
        found = {"validation_nll": 1.0 / (1.0 + score) + 0.01 * key.seeds[0] ** 2}
        return dict.fromkeys(
            ("mean", "dropout", "attention"), found | dict.fromkeys(tuned.MEASURES, 0.5 + 0.1 * key.seeds[0])
        )

    monkeypatch.setattr(tuned, "prepare_run", lambda config, data: SimpleNamespace(encoder=config.encoder))
    monkeypatch.setattr(tuned, "unpacked", lambda encoder: nullcontext())
    monkeypatch.setattr(tuned, "run_cell", cell)
    assert call("reproduce", "language", "--search", "--tasks", "mrpc", "--seeds", 3, "--out", tmp_path) == 0
    with (tmp_path / "language-tuned.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(dict.fromkeys(row["kind"] for row in rows)) == list(tuned.kinds("mrpc"))
    assert {row["settings_tried"] for row in rows} == {"8"}
    chosen = {row["kind"]: row["setting"] for row in rows}
    assert chosen["soft"] == "dropout=0.3 attention_dropout=0.1"
    assert chosen["BAM-WC"] == "attention.weibull_k=100"
    assert "| mrpc | BAM-WC | 3 | 8 |" in (tmp_path / "language-tuned.md").read_text()


def test_a_search_refuses_variants(tmp_path, capsys):
    assert call("reproduce", "language", "--search", "--variants", "soft", "--out", tmp_path) == 2
    assert "Leave variants and noise out" in capsys.readouterr().err


def test_cell_of_the_language_search_has_every_measure():
    tiny = ("encoder=tiny", "training.steps=2", "max_length=16", "train_size=64")
    for variant, drawn in (("soft", "dropout"), ("BAM-WC", "attention")):
        found = tuned.run_cell(Key("own", (f"attention.variant={variant}", *tiny), (0,)), sentiment_data())
        assert found.keys() == {"mean", drawn}
        for values in found.values():
            assert {*tuned.MEASURES, "validation_nll"} <= values.keys()


@pytest.mark.parametrize("recipe", [captions, questions])
def test_settings_of_pictures_are_ones_that_the_configs_take_and_have_the_papers_own(recipe):
    for name, kind in recipe.KINDS.items():
        for setting in kind.grid:
            recipe._config(Key(f"shapes-{kind.config}", (*kind.fixed, *setting), (0,)))
        if name in ("BAM-WF", "BAM-WC"):
            assert any("attention.gamma_beta=1e-6" in setting for setting in kind.grid)


@pytest.mark.parametrize("recipe", [captions, questions])
@pytest.mark.parametrize("kind", ["BAM-LC", "uniform"])
def test_cells_of_pictures_have_every_measure(recipe, kind):
    of_kind = recipe.KINDS[kind]
    tiny = ("training.epochs=1", "training.batch_size=1500")
    settings = (*of_kind.fixed, *of_kind.grid[-1], *tiny)
    found = recipe.run_cell(Key(f"shapes-{of_kind.config}", settings, (0,)), None)[of_kind.method]
    assert {*recipe.MEASURES, "validation_nll"} <= found.keys()
    assert all(math.isfinite(value) for value in found.values())


@pytest.mark.parametrize(("name", "recipe"), [("captioning", captions), ("vqa", questions)])
def test_searches_of_pictures_run_from_the_command_line(name, recipe, tmp_path, monkeypatch, capsys):
    def cell(key, data):
        # the last setting of every grid is best
        grid = next(kind.grid for kind in recipe.KINDS.values() if f"shapes-{kind.config}" == key.config)
        place = max(place for place, setting in enumerate(grid) if set(setting) <= set(key.settings))
        return {"mean": dict.fromkeys(recipe.MEASURES, 0.5 + 0.1 * key.seeds[0]) | {"validation_nll": float(8 - place)}}

    monkeypatch.setattr(recipe, "run_cell", cell)
    assert call("reproduce", name, "--search", "--seeds", 2, "--out", tmp_path) == 0
    with (tmp_path / f"{name}-tuned.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {(row["kind"], row["setting"]) for row in rows} == {(k, " ".join(v.grid[-1])) for k, v in recipe.KINDS.items()}
    assert {row["dataset"] for row in rows} == {"shapes"}
    assert call("reproduce", name, "--search", "--variants", "soft", "--out", tmp_path) == 2
    assert call("reproduce", name, "--jobs", 2, "--out", tmp_path) == 2
    shown = capsys.readouterr().err
    assert "Leave variants out" in shown
    assert "jobs is for --search" in shown
