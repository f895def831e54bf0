"""The folder of a run: names of its files, `run.json`, log and environment."""

import datetime
import json
import platform
import shlex
import shutil
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from bayesattn.evaluation.runs.predictions import PREDICTIONS_FILE
from bayesattn.files import RunError, read_json, remove_leftovers, write_bytes, write_csv, write_json

RUN_SCHEMA = "bayesattn.run/1"
METRICS_SCHEMA = "bayesattn.metrics/1"
RUN_FILE = "run.json"
CHECKPOINT_FILE = "checkpoint.safetensors"
LOG_FILE = "log.jsonl"
LOG_TABLE_FILE = "log.csv"
CHECKPOINTS_FOLDER = "checkpoints"
TENSORBOARD_FOLDER = "tensorboard"
METRICS_FILE = "metrics.json"
FAILURE_FILE = "failure.json"
REPORT_FILE = "report.html"
# packages whose versions may explain a number
PACKAGES = (
    "bayesattn", "torch", "numpy", "safetensors", "triton", "transformers", "torch-geometric", "torchmetrics", "scipy",
    "scikit-learn", "matplotlib",
)  # fmt: skip


def environment() -> dict[str, Any]:
    """Return versions and hardware in words, without anything that names the machine or its user."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "devices": devices or ["cpu"],
        "threads": torch.get_num_threads(),
        "packages": versions,
    }


def command_line(*, add: Sequence[str] = (), drop: Sequence[str] = ()) -> str:
    """Return the command that started this process, with the program's name in place of its path.

    Args:
        add: Words to put at its end.
        drop: Words to leave out.
    """
    program = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
    words = ["python", "-m", "bayesattn"] if program == "__main__.py" else [program]
    return shlex.join([*words, *(word for word in sys.argv[1:] if word not in drop), *add])


def now() -> str:
    """Return the time in UTC, to the second, as ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def write_log(folder: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write the rows of a training log as JSON lines and as CSV."""
    write_bytes(folder / LOG_FILE, "".join(json.dumps(row) + "\n" for row in rows).encode())
    write_csv(folder / LOG_TABLE_FILE, rows)


def write_run(folder: Path, *, recipe: str, variant: str, config: dict[str, Any], seed: int, **facts: Any) -> None:
    """Write `run.json`; `facts` are further JSON values (parameter count, training time and the like)."""
    write_json(
        folder / RUN_FILE,
        {
            "schema": RUN_SCHEMA,
            "recipe": recipe,
            "variant": variant,
            "seed": seed,
            "config": config,
            "command": command_line(),
            "finished": now(),
            "environment": environment(),
            **facts,
        },
    )


def read_run(folder: Path) -> dict[str, Any]:
    """Read `run.json` of a run folder."""
    if not folder.is_dir():
        raise RunError(f"{folder} is not a folder. Give a run folder written by `bayesattn train`")
    run = read_json(folder / RUN_FILE, RUN_SCHEMA)
    missing = sorted({"recipe", "variant", "seed", "config"} - run.keys())
    if missing:
        raise RunError(f"{folder / RUN_FILE} lacks {missing}")
    return run


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
    """Make an empty run folder; a run in it is an error, or with `overwrite` its files are removed."""
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
