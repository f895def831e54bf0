"""The run folder: what a trained model leaves behind, in files that open anywhere and cannot run code.

    RUN/
      run.json                  recipe, variant, resolved config, command, seed, versions, times
      checkpoint.safetensors    the model's parameters
      log.jsonl                 one JSON object per epoch
      predictions.safetensors   per split: sampled probabilities, labels, optional inputs and attention
      metrics.json              what `bayesattn evaluate` measured
      report.html               what `bayesattn report` wrote

Every file is written beside its place and renamed, so a reader finds the old file or the new one, never half of one.
docs/runs.md describes the fields.
"""

import datetime
import json
import os
import platform
import shlex
import sys
import tempfile
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

RUN_SCHEMA = "bayesattn.run/1"
PREDICTIONS_SCHEMA = "bayesattn.predictions/1"
METRICS_SCHEMA = "bayesattn.metrics/1"

RUN_FILE = "run.json"
CHECKPOINT_FILE = "checkpoint.safetensors"
LOG_FILE = "log.jsonl"
PREDICTIONS_FILE = "predictions.safetensors"
METRICS_FILE = "metrics.json"

# versions worth knowing when a number has to be explained
PACKAGES = (
    "bayesattn", "torch", "numpy", "safetensors", "triton", "transformers", "torch-geometric", "torchmetrics", "scipy",
    "scikit-learn", "matplotlib",
)  # fmt: skip


class RunError(ValueError):
    """A run folder or a file in it is missing, truncated, or not what its name says."""


@dataclass(frozen=True)
class SplitPredictions:
    """What a model said about one data split.

    Attributes:
        samples: Class probabilities, draws first: `s n c`, with s = 1 for a model that does not sample.
        labels: Right classes `n`; None where there is no right answer (out-of-distribution data).
        inputs: Images `n height width` to show in the report; optional.
        attention: Named attention maps over the keys, `n heads keys` each: `mean`, `std`, `prior`; optional.
    """

    samples: Tensor
    labels: Tensor | None = None
    inputs: Tensor | None = None
    attention: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Predictions:
    """The predictions of one run on all its splits, and how they were drawn.

    Attributes:
        splits: By name, in the order of reports. `validation` is for choosing thresholds and temperatures only.
        class_names: One per class.
        method: `mean` (no draws), `attention`, `dropout` or `attention+dropout`: what was random.
        seed: Seed of the draws.
    """

    splits: dict[str, SplitPredictions]
    class_names: list[str]
    method: str
    seed: int

    @property
    def num_samples(self) -> int:
        """Draws per prediction."""
        return next(iter(self.splits.values())).samples.shape[0]


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


def command_line() -> str:
    """Return the command that started this process, with the program's name in place of its path."""
    program = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
    return shlex.join([program, *sys.argv[1:]])


def now() -> str:
    """Return the time in UTC, to the second, as ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def write_bytes(path: Path, content: bytes) -> None:
    """Write a whole file or nothing: into a temporary file of the same folder, which then takes the name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files only their owner can read; give the rights an ordinary file would have
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write JSON that other programs can read: NaN and infinity are refused, not written as words."""
    try:
        text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise ValueError(f"{path.name} would hold a number that is not finite; allowed: finite numbers and null") from error
    write_bytes(path, (text + "\n").encode())


def read_json(path: Path, schema: str) -> dict[str, Any]:
    """Read a JSON object and check that it is of the given schema."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{path} does not exist") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise RunError(f"{path} cannot be read as JSON: {error}") from None
    found = value.get("schema") if isinstance(value, dict) else None
    if found != schema:
        raise RunError(f"{path} has schema {found!r}; allowed: {schema!r}")
    return value


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
        raise RunError(f"{folder} is not a folder; allowed: a run folder written by `bayesattn train`")
    run = read_json(folder / RUN_FILE, RUN_SCHEMA)
    missing = sorted({"recipe", "variant", "seed", "config"} - run.keys())
    if missing:
        raise RunError(f"{folder / RUN_FILE} lacks {missing}")
    return run


def write_tensors(path: Path, tensors: dict[str, Tensor], meta: dict[str, str] | None = None) -> None:
    """Write named tensors as one safetensors file."""
    contiguous = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    write_bytes(path, safetensors.torch.save(contiguous, meta))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a safetensors file: its tensors and its metadata."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except FileNotFoundError:
        raise RunError(f"{path} does not exist") from None
    except (OSError, safetensors.SafetensorError) as error:
        raise RunError(f"{path} cannot be read as safetensors: {error}") from None


def write_predictions(folder: Path, predictions: Predictions) -> None:
    """Write `predictions.safetensors`: tensors named `split index/part`, everything else in the metadata."""
    tensors: dict[str, Tensor] = {}
    for index, split in enumerate(predictions.splits.values()):
        parts = {"samples": split.samples, "labels": split.labels, "inputs": split.inputs}
        parts |= {f"attention/{name}": value for name, value in split.attention.items()}
        tensors |= {f"{index}/{name}": value for name, value in parts.items() if value is not None}
    meta = {
        "schema": PREDICTIONS_SCHEMA,
        "splits": list(predictions.splits),
        "class_names": predictions.class_names,
        "method": predictions.method,
        "seed": predictions.seed,
    }
    write_tensors(folder / PREDICTIONS_FILE, tensors, {"bayesattn": json.dumps(meta)})


def read_predictions(folder: Path) -> Predictions:
    """Read `predictions.safetensors` and check that shapes and names fit together."""
    path = folder / PREDICTIONS_FILE
    if not path.exists():
        raise RunError(f"{folder} holds no {PREDICTIONS_FILE}; run `bayesattn evaluate {folder}` first")
    tensors, header = read_tensors(path)
    try:
        meta = json.loads(header.get("bayesattn", "{}"))
    except json.JSONDecodeError as error:
        raise RunError(f"{path} has metadata that is not JSON: {error}") from None
    if not isinstance(meta, dict) or meta.get("schema") != PREDICTIONS_SCHEMA:
        raise RunError(f"{path} was not written by bayesattn; its metadata has no schema {PREDICTIONS_SCHEMA!r}")
    splits = {}
    for index, name in enumerate(meta["splits"]):
        parts = {key.removeprefix(f"{index}/"): value for key, value in tensors.items() if key.startswith(f"{index}/")}
        splits[name] = _checked_split(path, name, parts, len(meta["class_names"]))
    if not splits:
        raise RunError(f"{path} holds no split")
    return Predictions(splits, meta["class_names"], meta["method"], meta["seed"])


def _checked_split(path: Path, name: str, parts: dict[str, Tensor], num_classes: int) -> SplitPredictions:
    samples = parts.get("samples")
    if samples is None or samples.ndim != 3 or samples.shape[2] != num_classes:
        shape = None if samples is None else tuple(samples.shape)
        raise RunError(f"{path}: samples of split {name!r} have shape {shape}; allowed: (draws, examples, {num_classes})")
    num_examples = samples.shape[1]
    for part, value in parts.items():
        length = value.shape[1] if part == "samples" else value.shape[0]
        if length != num_examples:
            raise RunError(f"{path}: {part} of split {name!r} has {length} entries; allowed: {num_examples}")
    attention = {key.removeprefix("attention/"): value for key, value in parts.items() if key.startswith("attention/")}
    return SplitPredictions(samples, parts.get("labels"), parts.get("inputs"), attention)
