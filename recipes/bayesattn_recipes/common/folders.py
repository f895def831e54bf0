"""The folder of a run that is being trained: names of its files, its log, and the lock that keeps a second run out."""

import csv
import io
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bayesattn.evaluation.runs import METRICS_FILE, PREDICTIONS_FILE, REPORT_FILE, RUN_FILE
from bayesattn.files import RunError, write_bytes

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None

CHECKPOINT_FILE = "checkpoint.safetensors"
LOG_FILE = "log.jsonl"
LOG_TABLE_FILE = "log.csv"
CHECKPOINTS_FOLDER = "checkpoints"
TENSORBOARD_FOLDER = "tensorboard"
FAILURE_FILE = "failure.json"
LOCK_FILE = "run.lock"


def check_run_folder(folder: Path, *, overwrite: bool = False) -> None:
    """Raise unless a new run may be written into `folder`: nothing is there, or it may be overwritten."""
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} is a file. Give a new or empty folder")
    if overwrite:
        return
    if (folder / RUN_FILE).exists():
        raise RunError(f"{folder} already holds a run. Choose a new folder, or replace it with --overwrite")
    if any(folder.glob(f"{CHECKPOINTS_FOLDER}/*.safetensors")):
        raise RunError(
            f"{folder} holds an unfinished run. Continue it with --resume, replace it with --overwrite, or choose a new "
            "folder"
        )


def make_run_folder(folder: Path, *, overwrite: bool = False) -> None:
    """Make an empty run folder. A run already in it is an error; with `overwrite`, its files are removed."""
    check_run_folder(folder, overwrite=overwrite)
    folder.mkdir(parents=True, exist_ok=True)
    # run.json first: without it the rest no longer counts as a run
    results = (CHECKPOINT_FILE, LOG_FILE, LOG_TABLE_FILE, FAILURE_FILE, PREDICTIONS_FILE, METRICS_FILE, REPORT_FILE)
    for name in (RUN_FILE, *results):
        (folder / name).unlink(missing_ok=True)
    for name in (CHECKPOINTS_FOLDER, TENSORBOARD_FOLDER):
        if (folder / name).is_dir():
            shutil.rmtree(folder / name)
    remove_leftovers(folder)


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files left by killed writers: ours, and those of safetensors (`.tmp` and six characters)."""
    for path in folder.glob(".*"):
        is_left = path.suffix == ".part" or re.fullmatch(r"\.tmp[A-Za-z0-9]{6}", path.name)
        if is_left and path.is_file():
            path.unlink(missing_ok=True)


def write_log(folder: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write the rows of a training log as JSON lines and as CSV."""
    write_bytes(folder / LOG_FILE, "".join(json.dumps(row) + "\n" for row in rows).encode())
    write_csv(folder / LOG_TABLE_FILE, rows)


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write dictionaries as a CSV file; a column for every key, empty where a row lacks it."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_bytes(path, text.getvalue().encode())


@contextmanager
def hold_run_folder(folder: Path) -> Iterator[None]:
    """Lock a folder against other runs; create it if missing. Only the first of a run's processes calls this.

    A file left behind by a crash locks nothing. Windows and some network file systems have no such lock; a warning
    says so.

    Raises:
        RunError: Another run holds the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK_FILE
    handle = _lock(path)
    if handle is None:
        yield
        return
    try:
        os.ftruncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
        yield
    finally:
        # before the lock is released: after that, the file may belong to the next run
        path.unlink(missing_ok=True)
        os.close(handle)


def _lock(path: Path) -> int | None:
    """Return an open file that this process has locked; None, with a warning, where there are no locks."""
    while True:
        if fcntl is None:
            _warn(path.parent, "Windows")
            return None
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(handle, 20).decode(errors="replace").strip() or "unknown"
            os.close(handle)
            raise RunError(
                f"{path.parent} is in use by another run (process {owner}). Wait until it ends, or choose another folder"
            ) from None
        except OSError as error:
            os.close(handle)
            path.unlink(missing_ok=True)
            _warn(path.parent, str(error))
            return None
        try:
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                return handle
        except FileNotFoundError:
            pass
        # its last owner removed the file in between: a lock on it would have no effect
        os.close(handle)


def _warn(folder: Path, reason: str) -> None:
    warnings.warn(f"{folder} cannot be locked ({reason}): nothing keeps a second run out of it", UserWarning, stacklevel=5)
