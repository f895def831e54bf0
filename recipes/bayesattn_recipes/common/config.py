"""What every recipe needs before it trains: strict configs from YAML, seeds, and a log of metrics."""

import copy
import dataclasses
import json
import math
import random
import reprlib
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import yaml

from bayesattn.config import VARIANTS, AttentionConfig
from bayesattn.evaluation.runs import read_text, write_bytes
from bayesattn_recipes.baselines import AttentionChoice

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
    names = sorted(path.stem for path in folder.glob("*.yaml"))
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
