"""One run per folder: a second one is refused while the first is alive, and only then."""

import os
import signal

import pytest
from loop_experiment import TinyConfig, TinyExperiment, training

from bayesattn.evaluation.runs import read_run
from bayesattn.files import RunError
from bayesattn_recipes.common import runs
from bayesattn_recipes.common.folders import hold_run_folder


def run(folder, *, seed=5, build=None, on_progress=lambda done, total: None, **options):
    config = TinyConfig(training(epochs=1), seed=seed)
    return runs.train_run("tiny", config, build or (lambda: TinyExperiment(config)), folder, on_progress, **options)


@pytest.mark.parametrize("options", [{}, {"overwrite": True}, {"resume": True}])
def test_a_second_run_in_a_folder_is_refused_by_name_and_changes_nothing(tmp_path, options):
    folder, refused = tmp_path / "run", []

    def on_progress(done, total):
        if done == 2:
            with pytest.raises(RunError, match=rf"run is in use by another run \(process {os.getpid()}\)"):
                run(folder, seed=6, **options)
            refused.append(sorted(entry.name for entry in folder.iterdir()))

    run(folder, on_progress=on_progress)
    assert refused == [["run.lock"]]
    assert read_run(folder)["seed"] == 5
    assert not (folder / "run.lock").exists()


def test_a_lock_ends_with_its_process_however_it_ends(tmp_path):
    (holds, told), (waits, _) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        with hold_run_folder(tmp_path):
            os.write(told, b"!")
            os.read(waits, 1)
    try:
        assert os.read(holds, 1) == b"!"
        with pytest.raises(RunError, match=rf"process {child}\)"):
            run(tmp_path)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert (tmp_path / "run.lock").exists()
    run(tmp_path)
    assert read_run(tmp_path)["seed"] == 5


def test_a_lock_is_given_back_after_an_error(tmp_path):
    class Ended(Exception):
        pass

    def on_progress(done, total):
        raise Ended

    with pytest.raises(Ended):
        run(tmp_path / "run", on_progress=on_progress)
    run(tmp_path / "run")


def test_a_run_that_another_finished_meanwhile_is_not_trained_again(tmp_path):
    """Both were started with --resume, and this one read its data for longer than the other one trained."""
    config = TinyConfig(training(epochs=1))

    def build():
        run(tmp_path)
        return TinyExperiment(config)

    log = run(tmp_path, build=build, on_progress=lambda done, total: pytest.fail("it trained"), resume=True)
    assert len(log.rows) == 1


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch):
    def refuse(handle, operation):
        raise OSError("No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.warns(UserWarning, match="cannot be locked .No locks available.: nothing keeps a second run out of it"):
        run(tmp_path)
    assert read_run(tmp_path)["seed"] == 5


def test_a_lock_file_that_was_removed_in_between_is_made_again(tmp_path, monkeypatch):
    """The holder removes its file after the second process has opened it: a lock on that file keeps nobody out."""
    import fcntl

    flock, calls = fcntl.flock, []

    def late(handle, operation):
        if not calls:
            os.unlink(tmp_path / "run.lock")
        calls.append(handle)
        return flock(handle, operation)

    monkeypatch.setattr("fcntl.flock", late)
    with hold_run_folder(tmp_path):
        assert len(calls) == 2
        assert (tmp_path / "run.lock").exists()
        with pytest.raises(RunError, match="is in use"), hold_run_folder(tmp_path):
            pass
