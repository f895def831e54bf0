"""What every recipe needs before it trains: strict configs from YAML, seeds, and a log of metrics."""

import copy
import dataclasses
import difflib
import functools
import json
import random
import re
import reprlib
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np
import pydantic.dataclasses
import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from bayesattn.files import read_text

Config = TypeVar("Config")

# for every config class: no unknown keys, no conversion except integers to floats, no infinity or NaN
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

Class = TypeVar("Class", bound=type)

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0.0)]
NotNegative = Annotated[float, Field(ge=0.0)]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]
# the range of numpy's seeds
Seed = Annotated[int, Field(ge=0, lt=2**32)]


@typing.dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def config_class(cls: Class) -> Class:
    """Make a frozen dataclass; pydantic checks its fields against their annotations, however it is built."""
    return pydantic.dataclasses.dataclass(frozen=True, config=STRICT)(cls)  # type: ignore[return-value]  (the class that went in)


# size limit of a config in bytes; the library's longest has 1,500, and parsing takes one second per 100,000
CONFIG_LIMIT = 2**16


class _ConfigLoader(yaml.SafeLoader):
    """YAML's safe loader without duplicate keys, and without aliases, with which a few lines can fill the memory."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(problem="aliases (*name) are not allowed", problem_mark=self.peek_event().start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.MarkedYAMLError(problem=f"the key {shown(twice)} occurs twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


# YAML 1.1 reads 1e-2, without a dot, as text
_ConfigLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text: plain values, lists and mappings, each written out."""
    try:
        # the class is a safe loader: it builds only plain values
        return yaml.load(text, _ConfigLoader)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except Exception as error:
        # a value that does not match its tag is an AttributeError, KeyError, IndexError, … inside PyYAML
        raise ValueError(f"a value does not match its tag: {error}") from None


# the key of a config file that names its base
BASE = "base"
# a message with more names than this is too long to read
MOST_SHOWN = 8


def load_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds one mapping."""
    try:
        values = parse_yaml(read_text(path, CONFIG_LIMIT))
    except ValueError as error:
        raise ValueError(f"config {path} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"config {path} must hold a mapping of names to values, got {type(values).__name__}")
    return values


def find_config(name: str, folder: Path) -> Path:
    """Return the path of a config given by its name in `folder`, or by its path."""
    names = sorted(path.stem for path in folder.glob("*.yaml"))
    if name in names:
        return folder / f"{name}.yaml"
    if name.endswith((".yaml", ".yml")) and Path(name).exists():
        return Path(name)
    if len(names) > MOST_SHOWN:
        close = difflib.get_close_matches(name, names, n=MOST_SHOWN, cutoff=0.5)
        near = f"such as {', '.join(close)}" if close else "see `bayesattn list`"
        raise ValueError(f"config must be one of {len(names)} names ({near}) or the path of a YAML file, got {shown(name)}")
    raise ValueError(f"config must be one of {', '.join(names)}, or the path of a YAML file, got {shown(name)}")


def shown(value: Any) -> str:
    """Return a value as an error message shows it: on one line, shortened if it is long."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 80
    return short.repr(value)


def shown_name(name: str) -> str:
    """Return the dotted name of a setting as an error message shows it: unchanged, unless it is long or not printable."""
    return name if len(name) <= 80 and name.isascii() and name.isprintable() else shown(name)


def override(values: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Return `values` with `name=value` settings applied; dots reach into nested mappings, values are YAML."""
    values = copy.deepcopy(values)
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not name:
            raise ValueError(f"setting must be name=value, as in attention.weibull_k=5, got {shown(setting)}")
        target = values
        *parents, last = name.split(".")
        for parent in parents:
            target = target.setdefault(parent, {})
            if not isinstance(target, dict):
                raise ValueError(f"setting {shown(setting)} cannot be applied: {parent} is a plain value, not a mapping")
        try:
            target[last] = parse_yaml(text)
        except ValueError:
            raise ValueError(f"setting {shown(setting)} has a value that is not valid YAML") from None
    return values


def read_config(cls: type[Config], name: str, folder: Path, settings: Sequence[str] = ()) -> Config:
    """Read a config by its name in `folder` or by its path, with `name=value` settings on top.

    A file with `base: NAME` takes the values it does not set from that config in the folder.
    """
    path = find_config(name, folder)
    return build_config(cls, override(with_base(load_yaml(path), folder, path.name), settings), path.name)


def with_base(values: dict[str, Any], folder: Path, where: str) -> dict[str, Any]:
    """Return the values of a config on top of those of its `base`, if it has one."""
    values = dict(values)
    base = values.pop(BASE, None)
    if base is None:
        return values
    if base not in [path.stem for path in folder.glob("*.yaml")]:
        raise ValueError(f"{where}: {BASE} must be one of the configs in {folder}, got {shown(base)}")
    below = load_yaml(folder / f"{base}.yaml")
    if BASE in below:
        raise ValueError(
            f"{where}: {BASE} must be a config without a {BASE} of its own, got {base!r}. Use {shown(below[BASE])}"
        )
    return _merged(below, values)


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for name, value in above.items():
        is_nested = isinstance(value, dict) and isinstance(below.get(name), dict)
        result[name] = _merged(below[name], value) if is_nested else value
    return result


def build_config(cls: type[Config], values: dict[str, Any], where: str = "") -> Config:
    """Build a (nested) dataclass from plain values; pydantic checks its fields strictly.

    Args:
        cls: The dataclass.
        values: As read from YAML or JSON.
        where: The file of the values, for the error.

    Raises:
        ValueError: A key is unknown, or a value has the wrong type or is out of range.
    """
    prefix = f"{where}: " if where else ""
    try:
        # as JSON: strict pydantic then accepts lists as tuples and mappings as dataclasses, but nothing else
        text = json.dumps({"value": _plain(values)})
        return _holder(cls).model_validate_json(text).value  # type: ignore[attr-defined]
    except ValidationError as error:
        found = error.errors(include_url=False)
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise ValueError(prefix + _explain(cls, found[0]) + more) from None
    except RecursionError:
        raise ValueError(f"{prefix}it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{prefix}{error}") from None


@functools.cache
def _holder(cls: type) -> type[BaseModel]:
    """Return a pydantic model around a dataclass, so standard-library dataclasses inside it are checked as strictly."""
    return create_model("Holder", __config__=STRICT, value=(cls, ...))


def _plain(value: Any, name: str = "") -> Any:
    """Return nested values if they are plain."""
    if isinstance(value, dict):
        return {str(key): _plain(item, f"{name}.{key}" if name else str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{name}.{index}") for index, item in enumerate(value)]
    if value is None or isinstance(value, bool | str | float):
        return value
    if isinstance(value, int) and abs(value) < 2**63:
        return value
    raise ValueError(f"{shown_name(name)} must be a 64-bit number, text, true, false, null, or a list, got {shown(value)}")


# what a value must be, by pydantic's error type
_REQUIRED = {
    "greater_than_equal": "at least {ge:g}",
    "greater_than": "above {gt:g}",
    "less_than": "below {lt:g}",
    "less_than_equal": "at most {le:g}",
    "literal_error": "one of {expected}",
    "int_type": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "dataclass_type": "a mapping",
    "tuple_type": "a list",
    "list_type": "a list",
}


def _explain(cls: type, error: Any) -> str:
    """Return one of pydantic's errors as one line."""
    kind, place, context = error["type"], [str(part) for part in error["loc"][1:]], error.get("ctx", {})
    name = shown_name(".".join(place))
    if kind == "value_error":
        return f"{name}: {context['error']}" if place else str(context["error"])
    if kind == "unexpected_keyword_argument":
        return f"{name} is unknown. Use one of {', '.join(sorted(_names_at(cls, place[:-1])))}"
    if kind not in _REQUIRED:
        return f"{name}: {error['msg']}, got {shown(error['input'])}"
    required = _REQUIRED[kind].format(**context)
    if kind == "literal_error":
        required = required.replace(" or ", ", ")
    return f"{name} must be {required}, got {shown(error['input'])}"


def _names_at(cls: Any, place: Sequence[str]) -> list[str]:
    for name in place:
        cls = typing.get_type_hints(cls)[name]
    return [field.name for field in dataclasses.fields(cls)]


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch; everything a recipe draws comes from these."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class MetricLog(NamedTuple):
    """Rows of named numbers, one per epoch, and the seconds they took."""

    rows: list[dict[str, Any]]
    seconds: float = 0.0
