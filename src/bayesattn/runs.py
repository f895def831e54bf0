"""The run folder: what a trained model leaves behind, in files that open anywhere and cannot run code.

    RUN/
      run.json                  recipe, variant, resolved config, command, seed, versions, times
      checkpoint.safetensors    the model's parameters
      log.jsonl, log.csv        one JSON object, or line, per epoch
      checkpoints/              where an unfinished run stands, for `--resume`; gone when it is complete
      failure.json              the step at which a run stopped because a number was not finite
      tensorboard/              the log as TensorBoard events, where asked for
      predictions.safetensors   per split: sampled probabilities, labels, optional inputs, attention and edges
      metrics.json              what `bayesattn evaluate` measured
      report.html               what `bayesattn report` wrote

Every file is written beside its place and renamed, so a reader finds the old file or the new one, never half of one.
docs/runs.md describes the fields.
"""

import csv
import datetime
import io
import json
import os
import platform
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

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
LOG_TABLE_FILE = "log.csv"
CHECKPOINTS_FOLDER = "checkpoints"
TENSORBOARD_FOLDER = "tensorboard"
PREDICTIONS_FILE = "predictions.safetensors"
METRICS_FILE = "metrics.json"
FAILURE_FILE = "failure.json"
REPORT_FILE = "report.html"

# versions worth knowing when a number has to be explained
PACKAGES = (
    "bayesattn", "torch", "numpy", "safetensors", "triton", "transformers", "torch-geometric", "torchmetrics", "scipy",
    "scikit-learn", "matplotlib",
)  # fmt: skip


# larger than any file of its kind that this library writes; what a stranger sends is not read without end
JSON_LIMIT = 64 * 2**20


class RunError(ValueError):
    """A run folder or a file in it is missing, truncated, or not what its name says."""


@dataclass(frozen=True)
class EdgeWeights:
    """Sampled attention on the edges into the nodes of a split, for runs on graphs.

    Attributes:
        nodes: Number in the graph of every example `n`.
        index: Source and target of every edge, `2 e`.
        weights: Sampled weights, `s e`.
        source_labels: Class of every source, `e`; −1 where it is unknown.
    """

    nodes: Tensor
    index: Tensor
    weights: Tensor
    source_labels: Tensor


@dataclass(frozen=True)
class SplitPredictions:
    """What a model said about one data split.

    Attributes:
        samples: By method, class probabilities, draws first: `s n c`, with s = 1 where nothing is drawn.
        labels: Right classes `n`, or targets `n c` from 0 to 1 for a multilabel task; None where there is no right answer
            (out-of-distribution data).
        inputs: Images `n height width`, or `n height width 3` in RGB (uint8), to show in the report; optional.
        attention: Named attention maps over the keys, `n heads keys` each: `mean`, `std`, `prior`; optional.
        texts: One text per example to show beside it, such as a question; optional.
        edges: Attention on edges, where the examples are nodes of a graph; optional.
    """

    samples: dict[str, Tensor]
    labels: Tensor | None = None
    inputs: Tensor | None = None
    attention: dict[str, Tensor] = field(default_factory=dict)
    texts: list[str] | None = None
    edges: EdgeWeights | None = None


@dataclass(frozen=True)
class Predictions:
    """The predictions of one run on all its splits.

    Attributes:
        splits: By name, in the order of reports. `validation` is for choosing thresholds and temperatures only.
        class_names: One per class.
        methods: What was drawn: `mean` (nothing), `attention`, `dropout` or `attention+dropout`.
        seed: Seed of the draws.
        key_grid: Rows and columns that the last keys form over an image; None where keys have no such place.
        task: Whether the classes exclude each other (`multiclass`) or each has its own probability (`multilabel`).
        test: Behind the p-values; see `metrics.top_two_p_value`.
    """

    splits: dict[str, SplitPredictions]
    class_names: list[str]
    methods: list[str]
    seed: int
    key_grid: tuple[int, int] | None = None
    task: Literal["multiclass", "multilabel"] = "multiclass"
    test: Literal["paired", "welch", "pooled", "wilcoxon"] = "paired"


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


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write a whole file or nothing: into a temporary file of the same folder, which then takes the name.

    The content is on the disk before the file gets its name, and the name before this returns: after a power cut, too,
    there is the old file or the new one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.", suffix=".part")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        # mkstemp makes files only their owner can read; give the rights an ordinary file would have
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        _to_disk(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":
        _to_disk(path.parent)


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of writers that were killed."""
    for path in folder.glob(".*.part"):
        path.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a whole file or nothing."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write dictionaries as a CSV file; a column for every key, empty where a row lacks it."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_bytes(path, text.getvalue().encode())


def write_json(path: Path, value: Any) -> None:
    """Write JSON that other programs can read: NaN and infinity are refused, not written as words."""
    try:
        text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise ValueError(f"{path.name} would hold a number that is not finite; allowed: finite numbers and null") from error
    write_bytes(path, (text + "\n").encode())


def check_file(path: Path) -> None:
    """Raise unless `path` is an ordinary file; reading a pipe or a device might never end."""
    if not path.exists():
        raise RunError(f"{path} does not exist")
    if not path.is_file():
        raise RunError(f"{path} is {'a folder' if path.is_dir() else 'no ordinary file'}; allowed: a file")


def read_text(path: Path, limit: int, kind: str = "text") -> str:
    """Read an ordinary UTF-8 file of at most `limit` bytes; `kind` is what errors call its content."""
    check_file(path)
    try:
        with path.open("rb") as file:
            content = file.read(limit + 1)
        if len(content) > limit:
            raise RunError(f"{path} is larger than {limit} bytes, the most that is read of such a file")
        return content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{path} cannot be read as {kind}: {error}") from None


def read_json(path: Path, schema: str) -> dict[str, Any]:
    """Read a JSON object and check that it is of the given schema."""
    text = read_text(path, JSON_LIMIT, "JSON")
    try:
        value = json.loads(text)
    # an integer of more than 4,300 digits is a ValueError
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} cannot be read as JSON: {error}") from None
    found = value.get("schema") if isinstance(value, dict) else None
    if found != schema:
        raise RunError(f"{path} has schema {found!r}; allowed: {schema!r}")
    return value


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
        raise RunError(f"{folder} is not a folder; allowed: a run folder written by `bayesattn train`")
    run = read_json(folder / RUN_FILE, RUN_SCHEMA)
    missing = sorted({"recipe", "variant", "seed", "config"} - run.keys())
    if missing:
        raise RunError(f"{folder / RUN_FILE} lacks {missing}")
    return run


def check_run_folder(folder: Path, *, overwrite: bool = False) -> None:
    """Raise unless a new run may be written into `folder`: nothing is there, or it may be overwritten."""
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} is a file; allowed: a new or empty folder")
    if overwrite:
        return
    if (folder / RUN_FILE).exists():
        raise RunError(f"{folder} already holds a run; allowed: a new folder, or overwriting asked for")
    if any(folder.glob(f"{CHECKPOINTS_FOLDER}/*.safetensors")):
        raise RunError(f"{folder} holds an unfinished run; allowed: a new folder, --resume, or overwriting asked for")


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


def write_tensors(path: Path, tensors: dict[str, Tensor], meta: dict[str, str] | None = None) -> None:
    """Write named tensors as one safetensors file."""
    # safetensors refuses tensors that share memory, as the labels of several splits do
    own = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    with replacing(path) as temporary:
        try:
            safetensors.torch.save_file(own, temporary, meta)
        except safetensors.SafetensorError as error:
            raise OSError(f"{path} cannot be written: {error}") from None


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a safetensors file: its tensors and its metadata."""
    check_file(path)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    # types that torch does not have, or that this one does not know, are errors of several kinds
    except (OSError, safetensors.SafetensorError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise RunError(f"{path} cannot be read as safetensors: {error}") from None


def write_predictions(folder: Path, predictions: Predictions) -> None:
    """Write `predictions.safetensors`: tensors named `split number/part`, everything else in the metadata."""
    tensors: dict[str, Tensor] = {}
    for index, split in enumerate(predictions.splits.values()):
        parts = {"labels": split.labels, "inputs": split.inputs}
        parts |= {f"samples/{method}": value for method, value in split.samples.items()}
        parts |= {f"attention/{name}": value for name, value in split.attention.items()}
        parts |= {f"edges/{name}": value for name, value in vars(split.edges).items()} if split.edges else {}
        tensors |= {f"{index}/{name}": value for name, value in parts.items() if value is not None}
    meta = {
        "schema": PREDICTIONS_SCHEMA,
        "splits": list(predictions.splits),
        "class_names": predictions.class_names,
        "methods": predictions.methods,
        "seed": predictions.seed,
        "key_grid": predictions.key_grid,
        "task": predictions.task,
        "test": predictions.test,
        "texts": {name: split.texts for name, split in predictions.splits.items() if split.texts is not None},
    }
    write_tensors(folder / PREDICTIONS_FILE, tensors, {"bayesattn": json.dumps(meta)})


def read_predictions(folder: Path) -> Predictions:
    """Read `predictions.safetensors` and check that names and shapes fit together."""
    path = folder / PREDICTIONS_FILE
    if not path.exists():
        raise RunError(f"{folder} holds no {PREDICTIONS_FILE}; run `bayesattn evaluate {folder}` first")
    tensors, header = read_tensors(path)
    try:
        meta = json.loads(header.get("bayesattn", "{}"))
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} has metadata that is not JSON: {error}") from None
    if not isinstance(meta, dict) or meta.get("schema") != PREDICTIONS_SCHEMA:
        raise RunError(f"{path} was not written by bayesattn: its metadata has no schema {PREDICTIONS_SCHEMA!r}")
    missing = sorted({"splits", "class_names", "methods", "seed"} - meta.keys())
    if missing or not meta["splits"] or not meta["methods"]:
        raise RunError(f"{path} lacks {missing or 'splits or methods'} in its metadata")
    for name in ("splits", "class_names", "methods"):
        if not isinstance(meta[name], list) or not all(isinstance(entry, str) for entry in meta[name]):
            raise RunError(f"{path} has {name} that are not a list of names")
    key_grid = meta.get("key_grid")
    if key_grid is not None and not (
        isinstance(key_grid, list) and len(key_grid) == 2 and all(type(entry) is int and entry > 0 for entry in key_grid)
    ):
        raise RunError(f"{path} has a key_grid that is not null or two positive integers")
    # files from before there were multilabel tasks have none of these three
    task, test, texts = meta.get("task", "multiclass"), meta.get("test", "paired"), meta.get("texts", {})
    if task not in ("multiclass", "multilabel") or test not in ("paired", "welch", "pooled", "wilcoxon"):
        raise RunError(f"{path} has task {task!r} and test {test!r}, of which one is unknown")
    if not isinstance(texts, dict) or not all(
        isinstance(lines, list) and all(isinstance(line, str) for line in lines) for lines in texts.values()
    ):
        raise RunError(f"{path} has texts that are not lists of words by split")
    splits = {}
    for index, name in enumerate(meta["splits"]):
        parts = {key.removeprefix(f"{index}/"): value for key, value in tensors.items() if key.startswith(f"{index}/")}
        splits[name] = _checked_split(path, name, parts, meta["methods"], len(meta["class_names"]), texts.get(name))
    return Predictions(
        splits,
        meta["class_names"],
        meta["methods"],
        meta["seed"],
        None if key_grid is None else tuple(key_grid),
        task,
        test,
    )


def _checked_split(
    path: Path, name: str, parts: dict[str, Tensor], methods: list[str], num_classes: int, texts: list[str] | None
) -> SplitPredictions:
    samples = {method: parts.get(f"samples/{method}") for method in methods}
    num_examples = next((value.shape[1] for value in samples.values() if value is not None and value.ndim == 3), None)
    for method, value in samples.items():
        if value is None or value.ndim != 3 or len(value) < 1 or value.shape[1:] != (num_examples, num_classes):
            shape = None if value is None else tuple(value.shape)
            raise RunError(
                f"{path}: samples of method {method!r}, split {name!r} have shape {shape}; "
                f"allowed: (draws, {num_examples}, {num_classes})"
            )
    for part, value in parts.items():
        if not part.startswith(("samples/", "edges/")) and value.shape[:1] != (num_examples,):
            entries = value.shape[0] if value.ndim else "no"
            raise RunError(f"{path}: {part} of split {name!r} has {entries} entries; allowed: {num_examples}")
    if texts is not None and len(texts) != num_examples:
        raise RunError(f"{path}: texts of split {name!r} has {len(texts)} entries; allowed: {num_examples}")
    attention = {key.removeprefix("attention/"): value for key, value in parts.items() if key.startswith("attention/")}
    kept = {method: value for method, value in samples.items() if value is not None}
    edges = {key.removeprefix("edges/"): value for key, value in parts.items() if key.startswith("edges/")}
    shown = _checked_edges(path, name, edges, num_examples)
    return SplitPredictions(kept, parts.get("labels"), parts.get("inputs"), attention, texts, shown)


def _checked_edges(path: Path, name: str, parts: dict[str, Tensor], num_examples: int | None) -> EdgeWeights | None:
    if not parts:
        return None
    shapes = {key: tuple(value.shape) for key, value in parts.items()}
    count = shapes.get("index", (0, 0))[-1]
    draws = shapes.get("weights", (0, 0))[0]
    expected = {"nodes": (num_examples,), "index": (2, count), "weights": (draws, count), "source_labels": (count,)}
    if shapes != expected or draws < 2:
        raise RunError(f"{path}: edges of split {name!r} have shapes {shapes}; allowed: {expected}, at least two draws")
    return EdgeWeights(**parts)
