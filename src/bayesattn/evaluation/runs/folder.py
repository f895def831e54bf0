"""The folder of a run: `run.json`, and what was run where."""

import datetime
import platform
import shlex
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from bayesattn.files import RunError, read_json, write_json

RUN_SCHEMA = "bayesattn.run/1"
METRICS_SCHEMA = "bayesattn.metrics/1"
RUN_FILE = "run.json"
METRICS_FILE = "metrics.json"
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
        add: Words to append.
        drop: Words to leave out.
    """
    program = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
    words = ["python", "-m", "bayesattn"] if program == "__main__.py" else [program]
    return shlex.join([*words, *(word for word in sys.argv[1:] if word not in drop), *add])


def now() -> str:
    """Return the time in UTC, to the second, as ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


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
