"""Save what a conversion added, or the whole model: weights as safetensors, everything else as JSON. No pickles."""

import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from bayesattn.config import AttentionConfig
from bayesattn.convert import sdpa
from bayesattn.convert.adapters import converted_modules, find_candidates
from bayesattn.convert.bayesianize import attach_selected, restore
from bayesattn.convert.hosted import CHILD_NAME, decode_settings, settings_of
from bayesattn.convert.state import prior_tensors, separate, shared, unwrapped, whole_state, without_wrappers
from bayesattn.files import replacing
from bayesattn.nn import WeightsFactory

CONFIG_FILE = "bayesattn_config.json"
WEIGHTS_FILE = "bayesattn.safetensors"
FORMAT_VERSION = 1

_log = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class _Saved:
    """What a folder holds: what every Bayesian module is, and the tensors of the priors or of the whole model."""

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


def save_bayesian(model: nn.Module, folder: str | os.PathLike[str], *, whole: bool = False) -> None:
    """Write the config of every Bayesian attention module and the weights of the priors, or all weights, into `folder`.

    Without `whole` the host's own weights are not written, and a line of the log says so: fine-tuned ones would be lost.
    A transformers host may also be saved with its own `save_pretrained`, which then holds everything. `load_bayesian`
    reads each of the three.

    Args:
        model: A model that `bayesianize` changed.
        folder: Created if missing.
        whole: Write the model's whole state_dict, a tensor that several names share (tied weights) once.

    Raises:
        ValueError: The model cannot be saved, or the priors alone would replace a whole model; nothing is written.
    """
    is_adapted = hasattr(without_wrappers(model), "get_base_model")
    model, folder = unwrapped(model), Path(folder)
    converted = converted_modules(model)
    if not converted:
        raise ValueError(
            f"model is a {type(model).__name__} without converted attention; allowed: one that bayesianize changed"
        )
    if whole and is_adapted:
        raise ValueError(
            "whole is True for a PEFT model; save its adapter with save_pretrained and the priors without whole, "
            "or call merge_and_unload() first"
        )
    if not whole and (folder / CONFIG_FILE).exists() and _describe(folder / CONFIG_FILE).get("whole"):
        raise ValueError(
            f"{folder} holds a whole model, whose weights the priors alone would replace; "
            "choose another folder, or give whole=True"
        )
    weights: dict[str, Tensor] = {}
    for name, _, part in converted:
        weights |= prior_tensors(name, part)
    num_priors = sum(value.numel() for value in weights.values())
    if whole:
        weights = whole_state(model)
    aliases = shared(weights)
    description = {
        "format": FORMAT_VERSION,
        "model": type(model).__name__,
        "whole": whole,
        "modules": {name: settings_of(part) for name, _, part in converted},
        "shared": aliases,
        # modules that only a run of the model has shown to attend (`example_inputs` of bayesianize)
        "callers": [
            name for name, adapter, _ in converted if adapter is sdpa and not sdpa.is_shown(model.get_submodule(name))
        ],
    }
    text = json.dumps(description, indent=2) + "\n"
    own = separate({key: value for key, value in weights.items() if key not in aliases})
    # weights first: a folder with a config always has its weights
    with replacing(folder / WEIGHTS_FILE) as path:
        save_file(own, path, metadata={"format": "pt"})
    with replacing(folder / CONFIG_FILE) as path:
        path.write_text(text, encoding="utf-8")
    if not whole and not _has_other_weights(folder):
        others = sum(p.numel() for p in model.parameters()) - num_priors
        _log.warning(
            "save_bayesian wrote %s parameters of the priors to %s, not the other %s of the model; "
            "if those were trained, write save_bayesian(model, folder, whole=True)",
            f"{num_priors:,}", folder, f"{others:,}",
        )  # fmt: skip


def load_bayesian(model: Model, folder: str | os.PathLike[str], *, weights: WeightsFactory | None = None) -> Model:
    """Make `model` Bayesian as the one saved in `folder` was: priors included, and all weights if they were saved.

    Args:
        model: The deterministic model, or one converted in the same places (its priors are overwritten). With a whole
            model in the folder, all its weights are overwritten, so it may come fresh from its config.
        folder: Written by `save_bayesian`, or by `save_pretrained` of a converted transformers model; of the latter only
            the Bayesian part is read, since `from_pretrained` reads the rest.
        weights: What built the custom weights of the saved model, as for `bayesianize`; it has to build them with the
            settings that were saved.

    Raises:
        ValueError: The folder holds nothing of ours, or it does not fit the model; the model is unchanged.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"folder is {str(folder)!r}, which is not a folder")
    saved = _read_own(folder) if (folder / CONFIG_FILE).exists() else _read_host_checkpoint(folder)
    host = unwrapped(model)
    _check_weights(saved, weights)
    missing = sorted({*saved.settings, *saved.callers} - {name for name, _ in host.named_modules()})
    if missing:
        raise ValueError(
            f"the saved model has attention modules {missing[:8]} that this {type(host).__name__} does not have"
        )
    before = {name for name, _, _ in converted_modules(host)}
    if before and before != set(saved.settings):
        raise ValueError(
            f"model has Bayesian attention in {sorted(before)[:8]}, the saved one in {sorted(saved.settings)[:8]}; "
            "call restore(model) first"
        )
    if not before:
        _convert(host, saved, weights)
    try:
        _load(host, saved)
    except BaseException:
        if not before:
            restore(host)
        raise
    return model


def _check_weights(saved: _Saved, weights: WeightsFactory | None) -> None:
    """Raise where the folder has custom weights and nothing builds them, or the other way round."""
    if saved.custom and weights is None:
        name, settings = next(iter(saved.custom.items()))
        raise ValueError(
            f"{name} was saved with custom weights {settings}, which this library does not build; give what built them: "
            "load_bayesian(model, folder, weights=...)"
        )
    if saved.configs and weights is not None:
        raise ValueError(f"weights is given, and {next(iter(saved.configs))} was saved with a config; allowed: None")


def _convert(model: nn.Module, saved: _Saved, weights: WeightsFactory | None) -> None:
    """Convert the named modules, all with one config at first."""
    configs, callers = saved.configs, saved.callers
    if saved.custom:
        candidates = find_candidates(model, AttentionConfig("soft"), callers)
        attach_selected(model, None, candidates, list(saved.settings), weights=weights)
        return
    widest = next((c for c in configs.values() if _shape_of_prior(c)), next(iter(configs.values())))
    if any(_shape_of_prior(config) not in (None, _shape_of_prior(widest)) for config in configs.values()):
        raise ValueError(
            "the saved modules have priors of different kinds; save and load the parts of such a model one by one"
        )
    attach_selected(model, widest, find_candidates(model, widest, callers), list(configs))


def _shape_of_prior(config: AttentionConfig) -> tuple[Any, ...] | None:
    return (config.prior_hidden_dim, config.prior_per_head) if config.prior_kind == "contextual" else None


def _load(model: nn.Module, saved: _Saved) -> None:
    """Check every tensor against its place, then copy them all."""
    parts = {name: part for name, _, part in converted_modules(model)}
    for name, part in parts.items():
        own = None if part.bayes_weights is None else part.bayes_weights.settings()
        if own != saved.custom.get(name):
            raise ValueError(
                f"{name} has the custom weights {own} in the model and {saved.custom.get(name)} in the file; allowed: one"
            )
    targets: dict[str, Tensor] = {}
    if saved.whole:
        targets = whole_state(model)
    else:
        for name, part in parts.items():
            targets |= prior_tensors(name, part)
    if set(targets) != set(saved.weights):
        differing = sorted(set(targets) ^ set(saved.weights))
        what = "weights" if saved.whole else "priors"
        raise ValueError(f"the saved {what} and those of the model differ in {differing[:8]}")
    for key, value in saved.weights.items():
        if value.shape != targets[key].shape:
            raise ValueError(
                f"{key} has shape {tuple(value.shape)} in the file and {tuple(targets[key].shape)} in the model"
            )
    for key, first in shared(targets).items():
        one, two = saved.weights[key], saved.weights[first]
        if one is not two and not torch.equal(one, two):
            raise ValueError(f"{first} and {key} are one tensor in the model and two different ones in the file")
    if saved.whole:
        model.load_state_dict(saved.weights)
    else:
        with torch.no_grad():
            for key, value in saved.weights.items():
                targets[key].copy_(value)
    for name, config in saved.configs.items():
        parts[name].config = config


def _read_own(folder: Path) -> _Saved:
    path = folder / CONFIG_FILE
    description = _describe(path)
    try:
        version = description["format"]
        settings = {str(name): dict(values) for name, values in description["modules"].items()}
        _ = _Saved(settings, {}).configs  # raises on a broken one
        whole, aliases = bool(description.get("whole", False)), dict(description.get("shared", {}))
        callers = tuple(map(str, description.get("callers", ())))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise _not_ours(path, error) from error
    if version != FORMAT_VERSION:
        raise ValueError(f"{path} has format {version!r}; allowed: {FORMAT_VERSION}")
    if not (folder / WEIGHTS_FILE).exists():
        raise ValueError(f"{folder} has {CONFIG_FILE} but not {WEIGHTS_FILE}")
    weights = _read_tensors(folder / WEIGHTS_FILE, lambda key: True)
    lost = sorted(set(aliases.values()) - set(weights))
    if lost:
        raise ValueError(f"{folder / WEIGHTS_FILE} lacks {lost[:8]}, which {CONFIG_FILE} says are shared")
    return _Saved(settings, weights | {key: weights[first] for key, first in aliases.items()}, whole, callers)


def _describe(path: Path) -> dict[str, Any]:
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _not_ours(path, error) from error
    if not isinstance(description, dict):
        raise _not_ours(path, TypeError(f"it holds a {type(description).__name__}"))
    return description


def _not_ours(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path} is not a file that save_bayesian wrote: {type(error).__name__}: {error}")


def _read_host_checkpoint(folder: Path) -> _Saved:
    """Pick our tensors out of a host's own checkpoint, in one file or in shards."""
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
            f"{folder} holds neither {CONFIG_FILE} nor a checkpoint of a converted transformers model; allowed: a folder "
            "written by save_bayesian, or by save_pretrained of a Bayesian model"
        )
    return _Saved(settings, weights)


def _read_tensors(path: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys() if wanted(key)}  # noqa: SIM118  (not a dict)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from error


def _has_other_weights(folder: Path) -> bool:
    """Whether the host was saved beside: a checkpoint of a Trainer, of `save_pretrained` or of PEFT."""
    return any(path.name != WEIGHTS_FILE for path in folder.glob("*.safetensors")) or any(folder.glob("*.bin"))
