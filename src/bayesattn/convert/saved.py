"""Read what `save_bayesian`, or a host's own `save_pretrained`, wrote about Bayesian attention. Nothing is unpickled."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from bayesattn.config import AttentionConfig
from bayesattn.convert.hosted import CHILD_NAME, decode_settings

CONFIG_FILE = "bayesattn_config.json"
WEIGHTS_FILE = "bayesattn.safetensors"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class SavedModel:
    """The content of a folder: settings of every Bayesian module, and the tensors of the priors or of the whole model."""

    settings: dict[str, dict[str, Any]]
    weights: dict[str, Tensor]
    whole: bool = False
    callers: tuple[str, ...] = ()

    @cached_property
    def custom(self) -> dict[str, dict[str, Any]]:
        """Settings of custom weights, by module."""
        return {name: values["weights"] for name, values in self.settings.items() if "weights" in values}

    @cached_property
    def configs(self) -> dict[str, AttentionConfig]:
        """Configs of the other modules."""
        return {name: AttentionConfig.from_dict(v) for name, v in self.settings.items() if name not in self.custom}


def read_folder(folder: Path) -> SavedModel:
    """Return what a folder holds.

    Raises:
        ValueError: It holds no Bayesian model, or one that cannot be read.
    """
    return _read_own(folder) if (folder / CONFIG_FILE).exists() else _read_host_checkpoint(folder)


def _read_own(folder: Path) -> SavedModel:
    path = folder / CONFIG_FILE
    description = describe(path)
    try:
        version = description["format"]
        settings = {str(name): dict(values) for name, values in description["modules"].items()}
        _ = SavedModel(settings, {}).configs  # raises on a broken one
        whole, aliases = bool(description.get("whole", False)), dict(description.get("shared", {}))
        callers = tuple(map(str, description.get("callers", ())))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise _not_ours(path, error) from error
    if version != FORMAT_VERSION:
        raise ValueError(f"{path} has format {version!r}, and this version of bayesattn reads format {FORMAT_VERSION}")
    if not (folder / WEIGHTS_FILE).exists():
        raise ValueError(f"{folder} has {CONFIG_FILE} but not {WEIGHTS_FILE}")
    weights = _read_tensors(folder / WEIGHTS_FILE, lambda key: True)
    lost = sorted(set(aliases.values()) - set(weights))
    if lost:
        raise ValueError(f"{folder / WEIGHTS_FILE} lacks {lost[:8]}, which {CONFIG_FILE} says are shared")
    return SavedModel(settings, weights | {key: weights[first] for key, first in aliases.items()}, whole, callers)


def describe(path: Path) -> dict[str, Any]:
    """Return the JSON object that `save_bayesian` wrote."""
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _not_ours(path, error) from error
    if not isinstance(description, dict):
        raise _not_ours(path, TypeError(f"it holds a {type(description).__name__}"))
    return description


def _not_ours(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path} is not a file that save_bayesian wrote: {type(error).__name__}: {error}")


def _read_host_checkpoint(folder: Path) -> SavedModel:
    """Pick the Bayesian tensors out of a host's own checkpoint, in one file or in shards."""
    marker = f".{CHILD_NAME}."
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(_read_tensors(path, lambda key: marker in f".{key}"))
    settings: dict[str, dict[str, Any]] = {}
    weights: dict[str, Tensor] = {}
    for key, value in tensors.items():
        host, _, rest = f".{key}".rpartition(marker)
        host = host.lstrip(".")
        if rest == "settings":
            settings[host] = decode_settings(value)
        else:
            weights[f"{host}.{rest.removeprefix('bayes_prior.')}".lstrip(".")] = value
    if not settings:
        raise ValueError(
            f"{folder} holds neither {CONFIG_FILE} nor a checkpoint of a converted transformers model. Give a folder "
            "written by save_bayesian, or by save_pretrained of a Bayesian model"
        )
    return SavedModel(settings, weights)


def _read_tensors(path: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys() if wanted(key)}  # noqa: SIM118  (not a dict)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from error
