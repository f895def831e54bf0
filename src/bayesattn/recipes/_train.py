"""The boring parts every recipe shares: strict configs, seeds, a metric log and a progress bar. Functions, no Trainer."""

import dataclasses
import datetime
import json
import os
import random
import time
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from bayesattn.runs import write_bytes

Config = TypeVar("Config")


def load_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds one mapping."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"config {path} cannot be read: {reason}") from None
    if not isinstance(values, dict):
        raise ValueError(f"config {path} holds {type(values).__name__}; allowed: a mapping of names to values")
    return values


def find_config(name: str, folder: Path) -> Path:
    """Return the path of a config given by its name in `folder`, or by a path of its own."""
    named = folder / f"{name}.yaml"
    if named.is_file():
        return named
    if name.endswith((".yaml", ".yml")) and Path(name).is_file():
        return Path(name)
    raise ValueError(f"config is {name!r}; allowed: {', '.join(config_names(folder))}, or the path of a YAML file")


def config_names(folder: Path) -> list[str]:
    """Return the names of the configs in a folder."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def override(values: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Return `values` with `name=value` settings applied; dots reach into nested mappings, values are YAML."""
    values = json.loads(json.dumps(values))
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not name:
            raise ValueError(f"setting is {setting!r}; allowed: name=value, as in attention.weibull_k=5")
        target = values
        *parents, last = name.split(".")
        for parent in parents:
            target = target.setdefault(parent, {})
            if not isinstance(target, dict):
                raise ValueError(f"setting is {setting!r}; {parent} is a value and has no names inside")
        try:
            target[last] = yaml.safe_load(text)
        except yaml.YAMLError:
            raise ValueError(f"setting is {setting!r}; its value cannot be read as YAML") from None
    return values


def build_config(cls: type[Config], values: dict[str, Any], where: str = "") -> Config:
    """Build a (nested) frozen dataclass from plain values; an unknown key or a wrong type is an error.

    Args:
        cls: The dataclass; annotations are plain types, Literals, optionals and other dataclasses.
        values: As read from YAML or JSON.
        where: Prefix of the names in error messages.
    """
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    unknown = sorted(map(str, values.keys() - fields.keys()))
    if unknown:
        raise ValueError(f"unknown config keys {[where + key for key in unknown]}; allowed: {sorted(fields)}")
    hints = typing.get_type_hints(cls)
    return cls(**{key: _coerce(f"{where}{key}", value, hints[key]) for key, value in values.items()})


def _coerce(name: str, value: Any, hint: Any) -> Any:
    """Return `value` as the type the annotation asks for, or raise."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        options = typing.get_args(hint)
        if value is None and type(None) in options:
            return None
        return _coerce(name, value, next(option for option in options if option is not type(None)))
    if typing.get_origin(hint) is Literal:
        if value not in typing.get_args(hint):
            raise ValueError(f"{name} is {value!r}; allowed: {', '.join(map(repr, typing.get_args(hint)))}")
        return value
    assert isinstance(hint, type)
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise ValueError(f"{name} is {value!r}; allowed: a mapping")
        return build_config(hint, value, f"{name}.")
    if hint is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        # YAML 1.1 reads 1e-2, without a dot, as a string
        try:
            return float(value)
        except ValueError:
            pass
    elif isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise ValueError(f"{name} is {value!r}; allowed: a value of type {hint.__name__}")


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch; everything a recipe draws comes from these."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread: small tensors gain nothing from more, and on a busy machine waiting threads cost 30 times."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class MetricLog:
    """Rows of named numbers, kept in memory, and the seconds they took; written as JSON lines."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.seconds = 0.0

    def add(self, **values: Any) -> None:
        """Append one row."""
        self.rows.append(values)

    def write(self, path: Path) -> None:
        """Write all rows, one JSON object per line."""
        write_bytes(path, "".join(json.dumps(row) + "\n" for row in self.rows).encode())


class _Rate(ProgressColumn):
    """Steps per second, averaged by rich over the last half minute."""

    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:.0f}/s", style="progress.data.speed")


@contextmanager
def progress(console: Console | None = None) -> Iterator[Progress]:
    """Open a progress display with description, bar, count, rate and time left."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as display:
        yield display


@contextmanager
def show_steps(description: str, console: Console, every: float = 30.0) -> Iterator[Callable[[int, int], None]]:
    """Open a display for one count of steps, and yield the function to call with steps done and to do.

    In a terminal a bar; into a file, where a bar would be noise, a line with the rate and the time left now and then. Of
    several processes the first one shows.

    Args:
        description: What is counted.
        console: Where to.
        every: Seconds between two lines.
    """
    if os.environ.get("RANK", "0") != "0":
        yield lambda done, total: None
        return
    if not console.is_terminal:
        yield _StepLines(description, console, every)
        return
    with progress(console) as display:
        task = display.add_task(description, total=None)

        def update(done: int, total: int) -> None:
            if display.tasks[task].total is None:
                # a resumed run does not begin at 0, and what is done already says nothing about the rate
                display.reset(task, total=total, completed=done - 1)
            display.update(task, completed=done)

        yield update


class _StepLines:
    """Prints steps done, rate and time left, at most every so many seconds."""

    def __init__(self, description: str, console: Console, every: float) -> None:
        self.description, self.console, self.every = description, console, every
        self.first: tuple[float, int] | None = None
        self.last = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first = now, done
        elif now - self.last >= self.every and now > self.first[0]:
            self.last = now
            rate = (done - self.first[1]) / (now - self.first[0])
            left = datetime.timedelta(seconds=round((total - done) / rate)) if rate else "unknown time"
            line = f"{self.description}: step {done} of {total}, {rate:.3g}/s, {left} left"
            self.console.print(line, soft_wrap=True, highlight=False)
