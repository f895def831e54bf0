"""A run that was stopped at any point goes on as if nothing had happened, bit for bit; and refuses to go on as another."""

import dataclasses
import json
import os
import signal
import threading

import pytest
import safetensors.torch
import torch
from loop_experiment import EXAMPLES, TinyConfig, TinyExperiment, training

from bayesattn.files import RunError, read_tensors
from bayesattn_recipes.common import checkpoints as _checkpoints
from bayesattn_recipes.common import runs
from bayesattn_recipes.common import state as _state
from bayesattn_recipes.common.interrupts import Interrupted

STEPS = 3 * -(-EXAMPLES // 7)


class Killed(BaseException):
    """Stands for the end of the process: nothing in the library may catch it."""


def run(folder, config=None, *, kill_at=None, resume=False, overwrite=False):
    config = config or TinyConfig(training(checkpoint_steps=1))

    def on_progress(done, total):
        if done == kill_at:
            raise Killed

    def build():
        return TinyExperiment(config)

    return runs.train_run("tiny", config, build, folder, on_progress, resume=resume, overwrite=overwrite)


def results(folder):
    """Everything a run leaves, times excepted."""
    tensors, _ = read_tensors(folder / "checkpoint.safetensors")
    facts = json.loads((folder / "run.json").read_text())
    for name in ("finished", "train_seconds"):
        facts.pop(name)
    return tensors, facts, (folder / "log.jsonl").read_text(), (folder / "log.csv").read_text()


def assert_same_results(folder, expected):
    tensors, *rest = results(folder)
    assert rest == list(expected[1:])
    assert tensors.keys() == expected[0].keys()
    for name, value in tensors.items():
        assert torch.equal(value, expected[0][name]), name


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    run(folder)
    return results(folder)


# in the first epoch, at its end and after it, in the last epoch, at the very end
@pytest.mark.parametrize("kill_at", [2, 4, 5, 10, STEPS])
def test_a_run_ended_after_any_step_goes_on_exactly(tmp_path, uninterrupted, kill_at):
    with pytest.raises(Killed):
        run(tmp_path, kill_at=kill_at)
    assert not (tmp_path / "run.json").exists()
    run(tmp_path, resume=True)
    assert_same_results(tmp_path, uninterrupted)


def test_a_run_ended_many_times_goes_on_exactly(tmp_path, uninterrupted):
    for kill_at in (3, 8, 11):
        with pytest.raises(Killed):
            run(tmp_path, kill_at=kill_at, resume=True)
    run(tmp_path, resume=True)
    assert_same_results(tmp_path, uninterrupted)


def test_rare_checkpoints_repeat_the_steps_since_the_last_one(tmp_path, uninterrupted):
    config = TinyConfig(training(checkpoint_steps=4))
    with pytest.raises(Killed):
        run(tmp_path, config, kill_at=7)
    assert [path.name for path in _checkpoints.Checkpoints(tmp_path, {}).paths()] == ["step-0000000004.safetensors"]
    # how often a run saves changes nothing that it computes, so it may be changed
    run(tmp_path, resume=True)
    tensors, _ = read_tensors(tmp_path / "checkpoint.safetensors")
    assert all(torch.equal(value, uninterrupted[0][name]) for name, value in tensors.items())


def test_a_run_ended_before_its_first_checkpoint_begins_again(tmp_path, uninterrupted):
    with pytest.raises(Killed):
        run(tmp_path, kill_at=1)
    assert not (tmp_path / "checkpoints").exists()
    run(tmp_path, resume=True)
    assert_same_results(tmp_path, uninterrupted)


def test_death_before_the_checkpoints_of_a_finished_run_are_gone_leaves_work_for_resume(
    tmp_path, uninterrupted, monkeypatch
):
    def die(self):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(_checkpoints.Checkpoints, "clear", die)
        with pytest.raises(Killed):
            run(tmp_path)
    assert (tmp_path / "checkpoints").exists()
    run(tmp_path, resume=True)
    assert not (tmp_path / "checkpoints").exists()
    assert_same_results(tmp_path, uninterrupted)


def test_a_number_of_steps_ends_a_run_within_an_epoch_and_resumes(tmp_path):
    config = TinyConfig(training(checkpoint_steps=1, epochs=5, keep="last"))

    def build():
        experiment = TinyExperiment(config)
        experiment.max_steps = 6
        return experiment

    def kill(done, total):
        assert total == 6
        if done == 5:
            raise Killed

    whole = runs.train_run("tiny", config, build, tmp_path / "whole")
    # four steps make an epoch
    assert [(row["epoch"], row["step"]) for row in whole.rows] == [(0, 4), (1, 6)]
    with pytest.raises(Killed):
        runs.train_run("tiny", config, build, tmp_path / "killed", kill)
    runs.train_run("tiny", config, build, tmp_path / "killed", resume=True)
    assert_same_results(tmp_path / "killed", results(tmp_path / "whole"))


def test_a_finished_run_leaves_no_checkpoints_and_is_left_alone(tmp_path, uninterrupted):
    run(tmp_path)
    assert not (tmp_path / "checkpoints").exists()
    before = (tmp_path / "run.json").read_bytes()
    log = run(tmp_path, resume=True)
    assert (tmp_path / "run.json").read_bytes() == before
    assert "".join(json.dumps(row) + "\n" for row in log.rows) == uninterrupted[2]


@pytest.mark.parametrize("write_number", [1, 6])
@pytest.mark.parametrize("moment", ["begun", "half", "named"])
def test_death_during_a_checkpoint_write_loses_nothing(tmp_path, uninterrupted, monkeypatch, write_number, moment):
    """The process dies with the temporary file empty, half full, or complete but not renamed."""
    save_file, count = safetensors.torch.save_file, 0

    def dying(tensors, path, meta):
        nonlocal count
        count += 1
        if count < write_number:
            return save_file(tensors, path, meta)
        if moment != "begun":
            save_file(tensors, path, meta)
        if moment == "half":
            os.truncate(path, os.path.getsize(path) // 2)
        # what a dead process leaves is the temporary file itself: keep a copy, since the exception removes it
        os.link(path, f"{path}.kept.part")
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", dying)
        with pytest.raises(Killed):
            run(tmp_path)
    assert list((tmp_path / "checkpoints").glob(".*.part"))
    run(tmp_path, resume=True)
    assert_same_results(tmp_path, uninterrupted)
    assert not list(tmp_path.rglob(".*.part"))


def test_what_safetensors_leaves_when_it_is_killed_goes_too(tmp_path, uninterrupted):
    """It writes into a file with a name of its own beside the one it was given; found by killing."""
    with pytest.raises(Killed):
        run(tmp_path, kill_at=7)
    left = [tmp_path / "checkpoints" / ".tmp8IfYBl", tmp_path / ".tmpA1b2C3"]
    others = [tmp_path / ".tmp-of-mine", tmp_path / ".tmpdir1" / "x"]
    others[1].parent.mkdir()
    for path in (*left, *others):
        path.write_bytes(b"half")
    run(tmp_path, resume=True)
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in others)
    assert not (tmp_path / "checkpoints").exists()
    assert_same_results(tmp_path, uninterrupted)


def damage(path, how):
    content = path.read_bytes()
    if how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "one bit":
        # in the last tensor
        path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    elif how == "one digit of the text":
        at = content.index(b'\\"step\\", ')
        digit = at + len(b'\\"step\\", ')
        path.write_bytes(content[:digit] + bytes([content[digit] ^ 1]) + content[digit + 1 :])
    else:
        path.write_bytes(os.urandom(1000))


@pytest.mark.parametrize("how", ["truncated", "empty", "one bit", "one digit of the text", "random bytes"])
def test_a_damaged_checkpoint_is_noticed_and_the_previous_one_taken(tmp_path, uninterrupted, how):
    with pytest.raises(Killed):
        run(tmp_path, kill_at=7)
    newest, previous = _checkpoints.Checkpoints(tmp_path, {}).paths()
    damage(newest, how)
    with pytest.warns(UserWarning, match=f"{newest.name}.*continuing from {previous.name} instead"):
        run(tmp_path, resume=True)
    assert_same_results(tmp_path, uninterrupted)


def test_only_damaged_checkpoints_are_an_error(tmp_path):
    with pytest.raises(Killed):
        run(tmp_path, kill_at=7)
    for path in _checkpoints.Checkpoints(tmp_path, {}).paths():
        damage(path, "empty")
    with pytest.raises(RunError, match="none of the 2 checkpoints can be read"):
        run(tmp_path, resume=True)


def test_another_config_is_refused_by_name(tmp_path):
    with pytest.raises(Killed):
        run(tmp_path, kill_at=3)
    config = TinyConfig(training(checkpoint_steps=1, epochs=4))
    with pytest.raises(RunError, match=r"config\.training\.epochs is 4 and was 3"):
        run(tmp_path, config, resume=True)
    with pytest.raises(RunError, match=r"config\.seed is 6 and was 5"):
        run(tmp_path, dataclasses.replace(TinyConfig(training(checkpoint_steps=1)), seed=6), resume=True)


def test_another_config_is_refused_for_a_finished_run_too(tmp_path):
    run(tmp_path)
    with pytest.raises(RunError, match=r"config\.dropout is 0\.3 and was 0\.2"):
        run(tmp_path, TinyConfig(training(checkpoint_steps=1), dropout=0.3), resume=True)


def test_an_unfinished_run_is_not_replaced_unasked(tmp_path, uninterrupted):
    with pytest.raises(Killed):
        run(tmp_path, kill_at=3)
    with pytest.raises(RunError, match=r"holds an unfinished run. Continue it with --resume"):
        run(tmp_path)
    run(tmp_path, overwrite=True)
    assert_same_results(tmp_path, uninterrupted)


def test_resume_and_overwrite_exclude_each_other(tmp_path):
    with pytest.raises(ValueError, match="resume and overwrite are both True"):
        run(tmp_path / "new", resume=True, overwrite=True)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_says_how_to_go_on(tmp_path, uninterrupted, monkeypatch, number):
    monkeypatch.setattr("sys.argv", ["/usr/bin/bayesattn", "train", "tiny", "--out", "a folder", "--overwrite"])
    config = TinyConfig(training(checkpoint_seconds=None))
    handlers = [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)]

    def on_progress(done, total):
        if done == 5:
            signal.raise_signal(number)

    with pytest.raises(Interrupted) as caught:
        runs.train_run("tiny", config, lambda: TinyExperiment(config), tmp_path, on_progress)
    assert str(caught.value).endswith("after step 5 of 12, which is saved. Continue with: "
                                      "bayesattn train tiny --out 'a folder' --resume")  # fmt: skip
    assert caught.value.exit_code == 128 + number
    assert [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)] == handlers
    assert [path.name for path in _checkpoints.Checkpoints(tmp_path, {}).paths()] == ["step-0000000005.safetensors"]
    run(tmp_path, resume=True)
    tensors, _ = read_tensors(tmp_path / "checkpoint.safetensors")
    assert all(torch.equal(value, uninterrupted[0][name]) for name, value in tensors.items())


def test_a_second_signal_ends_at_once(tmp_path):
    config = TinyConfig(training())

    def on_progress(done, total):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match="interrupted twice"):
        runs.train_run("tiny", config, lambda: TinyExperiment(config), tmp_path, on_progress)


def test_a_run_in_a_thread_does_not_touch_signals(tmp_path, uninterrupted):
    thread = threading.Thread(target=run, args=(tmp_path,))
    thread.start()
    thread.join()
    assert_same_results(tmp_path, uninterrupted)


def test_elapsed_time_decides_about_checkpoints_and_the_calendar_does_not(tmp_path, monkeypatch):
    """Seconds are counted by a clock that never goes backwards; setting the calendar back or forth changes nothing."""
    monkeypatch.setattr("time.time", lambda: -1e9)
    config = TinyConfig(training(checkpoint_seconds=0.0))
    with pytest.raises(Killed):
        run(tmp_path, config, kill_at=4)
    assert _checkpoints.Checkpoints(tmp_path, {}).paths()[0].name == "step-0000000003.safetensors"


def test_state_returns_bit_for_bit(tmp_path):
    from collections import Counter

    state = {
        "numbers": [1, -(2**70), 0.1, 1e-320, -0.0, float("inf"), True, None, "ü"],
        "pair": (1, (2.0, "x")),
        7: {"tensor": torch.tensor([1.5, float("nan")]), "empty": torch.empty(0, 3), "half": torch.ones(3).bfloat16()},
        "milestones": Counter({3: 2}),
        "scalar": torch.tensor(3),
    }
    _state.write_state(tmp_path / "s.safetensors", _state.flatten(state))
    again = _state.read_state(tmp_path / "s.safetensors")
    assert again["numbers"] == state["numbers"]
    assert str(again["numbers"][4]) == "-0.0"
    assert (again["pair"], again["milestones"], again["scalar"]) == (state["pair"], state["milestones"], state["scalar"])
    assert isinstance(again["milestones"], Counter)
    for name, value in state[7].items():
        assert again[7][name].dtype == value.dtype
        torch.testing.assert_close(again[7][name], value, rtol=0, atol=0, equal_nan=True)


def test_state_with_something_else_in_it_is_refused_by_name():
    with pytest.raises(ValueError, match=r"state/scheduler/0 is a function. The state of a run may hold only"):
        _state.flatten({"scheduler": [lambda step: 1.0]})


def test_random_generators_return_to_where_they_stood():
    import random

    import numpy as np

    random.gauss(0.0, 1.0)
    state = _state.random_state()
    expected = random.gauss(0.0, 1.0), random.random(), float(np.random.standard_normal()), float(torch.rand(()))
    _state.set_random_state(state)
    assert (random.gauss(0.0, 1.0), random.random(), float(np.random.standard_normal()), float(torch.rand(()))) == expected
