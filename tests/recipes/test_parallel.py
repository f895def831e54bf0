"""Many trainings at once: one that fails leaves the others alone, and work stops when its time is over."""

import io
import os
import time
from pathlib import Path

import pytest
from rich.console import Console

from bayesattn.cli.registry import Request
from bayesattn.files import RunError
from bayesattn_recipes.common.demo import run_side_by_side
from bayesattn_recipes.common.parallel import MOST_FAILURES, run_all, warm_up


def touch(folder, name):
    Path(folder, name).touch()


def fail_if(folder, name, is_bad):
    if is_bad:
        raise ValueError(f"{name} is bad")
    touch(folder, name)


def die_once(folder, name):
    """End the process the first time, as the kernel does with one that takes too much memory."""
    mark = Path(folder, "died")
    if name == "b" and not mark.exists():
        mark.touch()
        os._exit(1)
    touch(folder, name)


def write_variable(folder, name):
    Path(folder, name).write_text(os.environ["BAYESATTN_CACHE"])


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_failed_entry_does_not_stop_the_others(tmp_path):
    work = {name: (str(tmp_path), name, name == "b") for name in "abc"}
    outcome = run_all(fail_if, work)
    assert (outcome.done, list(outcome.failures), outcome.left) == (["a", "c"], ["b"], [])
    assert names_in(tmp_path) == ["a", "c"]
    assert outcome.reasons() == "1 failed, the first b: ValueError: b is bad"


def test_demo_ends_with_the_error_of_a_run_after_the_others_have_finished(tmp_path):
    console, ended = Console(file=io.StringIO()), []
    work = {name: (str(tmp_path), name, name == "b") for name in "abc"}
    with pytest.raises(RunError, match="not complete: 1 failed, the first b: ValueError: b is bad"):
        run_side_by_side(fail_if, work, console, on_end=ended.append)
    assert sorted(ended) == ["a", "b", "c"]
    assert names_in(tmp_path) == ["a", "c"]


def test_killed_process_costs_no_entry(tmp_path):
    outcome = run_all(die_once, {name: (str(tmp_path), name) for name in "abc"}, num_processes=2)
    assert sorted(outcome.done) == ["a", "b", "c"]
    assert not outcome.failures
    assert names_in(tmp_path) == ["a", "b", "c", "died"]


def test_variable_that_is_younger_than_the_parent_of_all_processes_reaches_them(tmp_path, monkeypatch):
    warm_up(["torch"])
    monkeypatch.setenv("BAYESATTN_CACHE", "a folder")
    outcome = run_all(write_variable, {name: (str(tmp_path), name) for name in "ab"}, num_processes=2)
    assert not outcome.failures
    assert [(tmp_path / name).read_text() for name in "ab"] == ["a folder"] * 2


def test_work_where_everything_fails_is_given_up(tmp_path):
    work = {str(number): (str(tmp_path), str(number), True) for number in range(MOST_FAILURES + 4)}
    outcome = run_all(fail_if, work)
    assert len(outcome.failures) == MOST_FAILURES
    assert len(outcome.left) == 4


def test_nothing_begins_after_its_time(tmp_path, monkeypatch):
    clock = iter(range(0, 10_000, 20))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    # every look at the clock takes 20 s: one before each entry
    request = Request(out=tmp_path, console=Console(quiet=True), minutes=1.0, begun=0.0)
    outcome = run_all(touch, {name: (str(tmp_path), name) for name in "abcde"}, deadline=request.deadline)
    assert names_in(tmp_path) == outcome.done == ["a", "b", "c"]
    assert outcome.left == ["d", "e"]
    assert outcome.reasons() == "2 were not started"


def test_traceback_is_written_and_removed_when_the_entry_works(tmp_path):
    run_all(fail_if, {"b": (str(tmp_path), "b", True)}).write_failures(tmp_path / "failures")
    assert "ValueError: b is bad" in (tmp_path / "failures" / "b.txt").read_text()
    run_all(fail_if, {"b": (str(tmp_path), "b", False)}).write_failures(tmp_path / "failures")
    assert names_in(tmp_path / "failures") == []
