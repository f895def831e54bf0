"""The boring parts every recipe shares: strict configs, seeds, a metric log and a progress bar. Functions, no Trainer."""

import copy
import dataclasses
import datetime
import json
import math
import os
import random
import reprlib
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

from bayesattn.baselines import AttentionChoice
from bayesattn.config import VARIANTS, AttentionConfig
from bayesattn.runs import read_text, write_bytes

Config = TypeVar("Config")

_OF_RIVALS = {field.name for field in dataclasses.fields(AttentionChoice)} - {
    field.name for field in dataclasses.fields(AttentionConfig)
}

# bytes of a config; the longest of the library has 1,500, and parsing takes a second per 100,000
CONFIG_LIMIT = 2**16


class _ConfigLoader(yaml.SafeLoader):
    """YAML's safe loader without aliases, which can make a few lines as large as memory, and without double keys."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(problem="aliases (*name) are not allowed", problem_mark=self.peek_event().start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.MarkedYAMLError(problem=f"the key {shown(twice)} stands there twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text: plain values, lists and mappings, each written out."""
    try:
        # the class is a safe loader: it makes nothing but plain values
        return yaml.load(text, _ConfigLoader)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except Exception as error:
        # a value that its tag does not fit is an AttributeError, KeyError, IndexError, … inside PyYAML
        raise ValueError(f"a value does not fit its tag: {error}") from None


def load_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds one mapping."""
    try:
        values = parse_yaml(read_text(path, CONFIG_LIMIT))
    except ValueError as error:
        raise ValueError(f"config {path} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"config {path} holds {type(values).__name__}; allowed: a mapping of names to values")
    return values


def find_config(name: str, folder: Path) -> Path:
    """Return the path of a config given by its name in `folder`, or by a path of its own."""
    names = config_names(folder)
    if name in names:
        return folder / f"{name}.yaml"
    if name.endswith((".yaml", ".yml")) and Path(name).exists():
        return Path(name)
    raise ValueError(f"config is {shown(name)}; allowed: {', '.join(names)}, or the path of a YAML file")


def shown(value: Any) -> str:
    """Return a value as an error message shows it: on one line, and not longer than a line."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 80
    return short.repr(value)


def config_names(folder: Path) -> list[str]:
    """Return the names of the configs in a folder."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def override(values: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Return `values` with `name=value` settings applied; dots reach into nested mappings, values are YAML."""
    values = copy.deepcopy(values)
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not name:
            raise ValueError(f"setting is {shown(setting)}; allowed: name=value, as in attention.weibull_k=5")
        target = values
        *parents, last = name.split(".")
        for parent in parents:
            target = target.setdefault(parent, {})
            if not isinstance(target, dict):
                raise ValueError(f"setting is {shown(setting)}; {parent} is a value and has no names inside")
        try:
            target[last] = parse_yaml(text)
        except ValueError:
            raise ValueError(f"setting is {shown(setting)}; its value cannot be read as YAML") from None
    return values


def build_config(cls: type[Config], values: dict[str, Any], where: str = "") -> Config:
    """Build a (nested) frozen dataclass from plain values; an unknown key or a wrong type is an error.

    Args:
        cls: The dataclass; annotations are plain types, Literals, optionals and other dataclasses.
        values: As read from YAML or JSON.
        where: Prefix of the names in error messages.
    """
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    unknown = sorted(where + str(key) for key in values.keys() - fields.keys())
    if unknown:
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        raise ValueError(f"unknown config keys {shown(unknown[:5])}{more}; allowed: {sorted(fields)}")
    hints = typing.get_type_hints(cls)
    return cls(**{key: _coerce(f"{where}{key}", value, hints[key]) for key, value in values.items()})


def comparable(values: Any) -> Any:
    """Return the values of a config without the settings of rivals where its attention is none.

    There they decide nothing, and runs from before a recipe knew rivals do not have them.
    """
    if not isinstance(values, dict):
        return values
    is_rival = values.get("variant") not in VARIANTS or values.get("sampled_kl")
    return {name: comparable(value) for name, value in values.items() if is_rival or name not in _OF_RIVALS}


def _coerce(name: str, value: Any, hint: Any) -> Any:
    """Return `value` as the type the annotation asks for, or raise."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _coerce(name, value, next(option for option in arguments if option is not type(None)))
    if origin is Literal:
        # 1 and True are equal, and only one of them is meant
        if not any(value == option and type(value) is type(option) for option in arguments):
            raise ValueError(f"{name} is {shown(value)}; allowed: {', '.join(map(repr, arguments))}")
        return value
    if origin in (list, tuple):
        if not isinstance(value, list | tuple):
            raise ValueError(f"{name} is {shown(value)}; allowed: a list")
        return origin(_coerce(f"{name}[{index}]", item, arguments[0]) for index, item in enumerate(value))
    assert isinstance(hint, type)
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise ValueError(f"{name} is {shown(value)}; allowed: a mapping")
        return build_config(hint, value, f"{name}.")
    if hint is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        # YAML 1.1 reads 1e-2, without a dot, as a string
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
        if not math.isnan(number):
            return number
    elif isinstance(value, hint) and (hint is not int or (not isinstance(value, bool) and abs(value) < 2**63)):
        return value
    raise ValueError(f"{name} is {shown(value)}; allowed: a value of type {hint.__name__}")


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch; everything a recipe draws comes from these."""
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed is {seed!r}; allowed: 0 to 2^32 - 1")
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
        return Text("" if task.speed is None else f"{task.speed:.3g}/s", style="progress.data.speed")


@contextmanager
def progress(console: Console | None = None) -> Iterator[Progress]:
    """Open a progress display with description, bar, count, rate and time left."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as display:
        yield display


def is_first_process() -> bool:
    """Whether this is the process that prints and writes, the only one or the first that a launcher started."""
    return os.environ.get("RANK", "0") == "0"


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
    if not is_first_process():
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
