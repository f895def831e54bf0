"""What the world does to a run: full disks, folders that cannot be written, data that is gone, signals, long runs."""

import errno
import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors
import torch
from loop_experiment import TinyConfig, TinyExperiment, training

from bayesattn.cli import progress
from bayesattn.files import read_tensors, write_bytes, write_json
from bayesattn_recipes.common import runs as _runs
from bayesattn_recipes.common.checkpoints import Checkpoints
from bayesattn_recipes.common.loop import train
from bayesattn_recipes.common.tensorboard import TensorBoardLog


def run(folder, config=None, **options):
    config = config or TinyConfig(training(checkpoint_steps=1))
    return _runs.train_run("tiny", config, lambda: TinyExperiment(config), folder, **options)


def same_parameters(one, other):
    (first, _), (second, _) = (read_tensors(folder / "checkpoint.safetensors") for folder in (one, other))
    return all(torch.equal(first[name], second[name]) for name in first)


def test_a_full_disk_stops_the_run_and_room_lets_it_go_on_exactly(tmp_path, monkeypatch):
    save_file, count = safetensors.torch.save_file, 0

    def full(tensors, path, meta):
        nonlocal count
        count += 1
        if count < 5:
            return save_file(tensors, path, meta)
        Path(path).write_bytes(b"half a file")
        raise safetensors.SafetensorError("No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", full)
        with pytest.raises(OSError, match=r"step-0000000005.safetensors cannot be written: No space left on device"):
            run(tmp_path / "full")
    assert not list((tmp_path / "full").rglob(".*.part"))
    run(tmp_path / "full", resume=True)
    run(tmp_path / "roomy")
    assert same_parameters(tmp_path / "full", tmp_path / "roomy")


def test_an_old_file_survives_a_write_that_fails(tmp_path, monkeypatch):
    path = tmp_path / "metrics.json"
    write_json(path, {"old": 1})

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space left"):
            write_json(path, {"new": 2})
    assert json.loads(path.read_text()) == {"old": 1}
    assert os.listdir(tmp_path) == ["metrics.json"]


def test_content_and_name_are_on_the_disk_when_a_write_returns(tmp_path, monkeypatch):
    """First the file, then the rename, then the folder: the order that survives a power cut."""
    events, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr("os.fsync", lambda handle: (events.append(os.path.isdir(f"/proc/self/fd/{handle}")), fsync(handle)))
    monkeypatch.setattr("os.replace", lambda old, new: (events.append("rename"), replace(old, new)))
    write_bytes(tmp_path / "file", b"content")
    assert events == [False, "rename", True]


def test_a_folder_that_cannot_be_written_is_refused_before_training(tmp_path, monkeypatch):
    def refuse(*args, **options):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    monkeypatch.setattr(TinyExperiment, "collate", lambda self, indices: pytest.fail("it trained"))
    with pytest.raises(OSError, match="Read-only file system"):
        run(tmp_path / "new")


def test_missing_data_leaves_no_folder_behind(tmp_path):
    config = TinyConfig(training())

    def build():
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "data/train.txt")

    with pytest.raises(FileNotFoundError, match=r"data/train\.txt"):
        _runs.train_run("tiny", config, build, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_data_of_another_size_is_refused_on_resume(tmp_path):
    config = TinyConfig(training(checkpoint_steps=1))

    class Killed(BaseException):
        pass

    def kill(done, total):
        if done == 4:
            raise Killed

    with pytest.raises(Killed):
        run(tmp_path, config, on_progress=kill)

    def build():
        experiment = TinyExperiment(config)
        experiment.num_examples -= 1
        return experiment

    with pytest.raises(ValueError, match="num_examples is 22 and was 23"):
        _runs.train_run("tiny", config, build, tmp_path, resume=True)


def test_a_long_run_keeps_no_tensor_it_does_not_need():
    counts = []

    def count(done, total):
        if done % 20 == 0:
            gc.collect()
            counts.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))

    config = TinyConfig(training(epochs=30, batch_size=8, noise="keyed"))
    train(TinyExperiment(config), config.training, seed=0, on_progress=count)
    # the optimizer's state is there after the first step, the kept parameters after the first epoch
    assert len(counts) == 4
    assert counts[1] == counts[-1]


def test_ctrl_c_on_the_command_line_saves_and_the_printed_command_goes_on(tmp_path):
    out = tmp_path / "run"
    words = ["train", "digits", "--config", "soft", "--out", str(out), "--set", "training.epochs=100000", "--set", "width=8"]
    words += ["--set", "training.checkpoint_steps=1"]
    process = subprocess.Popen([sys.executable, "-m", "bayesattn", *words], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 150
    while not Checkpoints(out, {}).paths() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    command = "python -m bayesattn " + " ".join(words) + " --resume"
    assert errors.strip().endswith(f"Continue with: {command}")
    assert errors.strip().count("\n") == 0


def test_progress_without_a_terminal_is_a_line_with_rate_and_time_left(monkeypatch):
    import io

    from rich.console import Console

    clock = iter([0.0, 1.0, 2.0, 40.0, 41.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    out = io.StringIO()
    with progress.show_steps("training", Console(file=out, width=200)) as on_progress:
        for done in (11, 12, 50, 51):
            on_progress(done, 100)
    # 39 steps in 39 seconds since the first call; what a resumed run had done before says nothing about the rate
    assert out.getvalue() == "training: step 50 of 100, 1/s, 0:00:50 left\n"


def test_the_bar_shows_slow_rates_too():
    from rich.progress import Progress

    clock = [0.0]
    display = Progress(progress._Rate(), get_time=lambda: clock[0])
    task = display.add_task("training", total=10)
    for _ in range(3):
        clock[0] += 4.0
        display.advance(task)
    # a step in four seconds, which 0/s would hide
    assert progress._Rate().render(display.tasks[0]).plain == "0.25/s"


def test_only_the_first_process_shows_progress(monkeypatch, capsys):
    from rich.console import Console

    monkeypatch.setenv("RANK", "1")
    with progress.show_steps("training", Console(), every=0.0) as on_progress:
        for done in range(5):
            on_progress(done, 10)
    assert capsys.readouterr().out == ""


def test_tensorboard_gets_every_number_against_the_step(tmp_path, monkeypatch):
    """The package is optional; what is checked here is what its writer is told."""
    import types

    calls = []

    class Writer:
        def __init__(self, folder, purge_step):
            calls.append(("open", Path(folder).name, purge_step))

        def add_scalar(self, name, value, step):
            calls.append((name, value, step))

        def flush(self):
            pass

        def close(self):
            calls.append("close")

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    log = run(tmp_path, tensorboard=True)
    assert calls[0] == ("open", "tensorboard", log.rows[0]["step"])
    assert calls[-1] == "close"
    for row in log.rows:
        for name in ("train_nll", "train_kl", "validation_nll"):
            assert (name, row[name], row["step"]) in calls


def test_tensorboard_without_its_package_is_refused_before_training(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match=r"tensorboard is not installed. Install it with: pip install tensorboard"):
        TensorBoardLog(tmp_path)
    with pytest.raises(ValueError, match="tensorboard is not installed"):
        run(tmp_path / "new", tensorboard=True)
    assert not (tmp_path / "new").exists()


def test_csv_holds_the_rows_of_the_log(tmp_path):
    import csv

    log = run(tmp_path)
    with (tmp_path / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["train_nll"]) for row in rows] == [row["train_nll"] for row in log.rows]
    assert list(rows[0]) == list(log.rows[0])
