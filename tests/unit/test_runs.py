"""The run folder: what is written comes back, what is broken is named, and nothing is ever half there."""

import json
import os

import pytest
import safetensors.torch
import torch

from bayesattn import files
from bayesattn.evaluation import runs
from bayesattn_recipes.common import folders

CLASS_NAMES = ["ant", "bee", "cat"]


def make_predictions(num_draws=5, num_examples=7, methods=("mean", "attention")):
    generator = torch.Generator().manual_seed(1)
    samples = {
        method: torch.rand(1 if method == "mean" else num_draws, num_examples, 3, generator=generator).softmax(-1)
        for method in methods
    }
    labels = torch.arange(num_examples) % 3
    test = runs.SplitPredictions(samples, labels, torch.rand(num_examples, 2, 2), {"mean": torch.rand(num_examples, 2, 5)})
    return runs.Predictions(
        {"test": test, "noise-0.5": runs.SplitPredictions(samples)}, CLASS_NAMES, list(methods), 3, (2, 2)
    )


def write_run(folder):
    runs.write_run(folder, recipe="digits", variant="BAM-WC", config={"seed": 1}, seed=1)


def test_predictions_come_back_as_written(tmp_path):
    written = make_predictions()
    runs.write_predictions(tmp_path, written)
    found = runs.read_predictions(tmp_path)
    assert (found.class_names, found.methods, found.seed, found.key_grid) == (CLASS_NAMES, ["mean", "attention"], 3, (2, 2))
    assert list(found.splits) == ["test", "noise-0.5"]
    for name, split in written.splits.items():
        other = found.splits[name]
        assert all(torch.equal(split.samples[method], other.samples[method]) for method in written.methods)
        assert (other.labels is None) == (split.labels is None)
    assert torch.equal(found.splits["test"].inputs, written.splits["test"].inputs)
    assert torch.equal(found.splits["test"].attention["mean"], written.splits["test"].attention["mean"])


def test_run_comes_back_with_versions_and_command(tmp_path):
    write_run(tmp_path)
    run = runs.read_run(tmp_path)
    assert run["variant"] == "BAM-WC"
    assert run["environment"]["packages"]["torch"] == torch.__version__
    assert os.sep not in run["command"].split()[0]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, failing):
    path = tmp_path / "metrics.json"
    files.write_json(path, {"a": 1})

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(OSError, match="disk full"):
        files.write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.json"]


def test_written_file_has_ordinary_rights(tmp_path):
    mask = os.umask(0o022)
    try:
        files.write_bytes(tmp_path / "x", b"1")
    finally:
        os.umask(mask)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_json_refuses_numbers_that_are_not_finite(tmp_path, value):
    with pytest.raises(ValueError, match=r"metrics.json would hold a number that is not finite"):
        files.write_json(tmp_path / "metrics.json", {"nll": value})
    assert list(tmp_path.iterdir()) == []


def test_folder_without_predictions_says_what_to_run(tmp_path):
    with pytest.raises(files.RunError, match=r"holds no predictions.safetensors. Run `bayesattn evaluate"):
        runs.read_predictions(tmp_path)


def test_truncated_predictions_are_named(tmp_path):
    runs.write_predictions(tmp_path, make_predictions())
    path = tmp_path / runs.PREDICTIONS_FILE
    path.write_bytes(path.read_bytes()[:-11])
    with pytest.raises(files.RunError, match=r"predictions.safetensors cannot be read as safetensors"):
        runs.read_predictions(tmp_path)


@pytest.mark.parametrize("meta", [None, {"bayesattn": "{}"}, {"bayesattn": '{"schema": "other/1"}'}, {"bayesattn": "[1]"}])
def test_foreign_safetensors_is_refused(tmp_path, meta):
    (tmp_path / runs.PREDICTIONS_FILE).write_bytes(safetensors.torch.save({"0/samples": torch.ones(1)}, meta))
    with pytest.raises(files.RunError, match="was not written by bayesattn"):
        runs.read_predictions(tmp_path)


def test_metadata_that_is_not_json_is_refused(tmp_path):
    (tmp_path / runs.PREDICTIONS_FILE).write_bytes(safetensors.torch.save({"a": torch.ones(1)}, {"bayesattn": "{"}))
    with pytest.raises(files.RunError, match="metadata that is not JSON"):
        runs.read_predictions(tmp_path)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("0/labels", torch.zeros(6, dtype=torch.long), r"labels of split 'test' must have 7 entries, got 6"),
        (
            "1/samples/attention",
            torch.ones(5, 7, 2),
            r"method 'attention', split 'noise-0.5' must have shape \(draws, 7, 3\), got \(5, 7, 2\)",
        ),
        ("0/samples/attention", None, r"method 'attention', split 'test' must have shape .*, got None"),
    ],
)
def test_parts_that_do_not_fit_are_named(tmp_path, part, value, message):
    runs.write_predictions(tmp_path, make_predictions())
    path = tmp_path / runs.PREDICTIONS_FILE
    tensors, meta = files.read_tensors(path)
    tensors.pop(part) if value is None else tensors.update({part: value})
    files.write_tensors(path, tensors, meta)
    with pytest.raises(files.RunError, match=message):
        runs.read_predictions(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b"{", "cannot be read as JSON"),
        (b"\xff\xfe", "cannot be read as JSON"),
        (b"[]", "must have schema 'bayesattn.run/1', got None"),
        (b'{"schema": "bayesattn.run/9"}', "must have schema 'bayesattn.run/1', got 'bayesattn.run/9'"),
        (b'{"schema": "bayesattn.run/1"}', r"lacks \['config', 'recipe', 'seed', 'variant'\]"),
    ],
)
def test_broken_run_json_is_named(tmp_path, content, message):
    if content is not None:
        (tmp_path / runs.RUN_FILE).write_bytes(content)
    with pytest.raises(files.RunError, match=message):
        runs.read_run(tmp_path)


def test_missing_folder_is_named(tmp_path):
    with pytest.raises(files.RunError, match="is not a folder"):
        runs.read_run(tmp_path / "nowhere")


def test_finished_run_is_not_overwritten_unless_asked(tmp_path):
    write_run(tmp_path)
    runs.write_predictions(tmp_path, make_predictions())
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(files.RunError, match="already holds a run"):
        folders.make_run_folder(tmp_path)
    folders.make_run_folder(tmp_path, overwrite=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["notes.txt"]


def test_run_folder_cannot_be_a_file(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(files.RunError, match="is a file"):
        folders.make_run_folder(tmp_path / "x")
