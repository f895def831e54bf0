"""The tensors of a converted model by name, and how to read what `save_bayesian` or a host's `save_pretrained` wrote.

Nothing is unpickled.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from bayesattn.config import AttentionConfig
from bayesattn.convert.hosted import CHILD_NAME, decode_settings
from bayesattn.nn import BayesianModule
from bayesattn.watch import WEIGHTS_NAME

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
        raise ValueError(f"{path} has format {version!r}, but this version of bayesattn reads format {FORMAT_VERSION}")
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


def without_wrappers(model: Any) -> Any:
    """Return the model inside the wrappers of torch.compile and data parallelism."""
    model = getattr(model, "_orig_mod", model)
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def unwrapped(model: Any) -> nn.Module:
    """Return the model inside the wrappers of torch.compile, data parallelism and PEFT: names must not depend on them."""
    model = without_wrappers(model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state_dict without the copies of the configs, which are in the JSON file."""
    state = {key: value for key, value in model.state_dict().items() if not key.endswith(f"{CHILD_NAME}.settings")}
    strange = [key for key, value in state.items() if not isinstance(value, Tensor) or value.is_meta or value.is_sparse]
    if strange:
        raise ValueError(f"the model's state has {strange[:8]}; save only dense tensors that are not on the meta device")
    return state


def shared(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Return every name of a tensor that already has an earlier name (tied weights), with that earlier name."""
    first: dict[Any, str] = {}
    aliases = {}
    for key, value in tensors.items():
        place = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        if value.numel() and first.setdefault(place, key) != key:
            aliases[key] = first[place]
    return aliases


def separate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors on the CPU, no two of them sharing memory: safetensors refuses overlapping views."""
    separate: dict[str, Tensor] = {}
    taken: set[int] = set()
    for key, value in tensors.items():
        own = value.detach().cpu().contiguous()
        place = own.untyped_storage().data_ptr()
        separate[key] = own.clone() if place in taken else own
        taken.add(place)
    return separate


def prior_tensors(name: str, part: BayesianModule) -> dict[str, Tensor]:
    """Return the parameters of a prior, or the state of custom weights, under names that start with the module's."""
    if part.bayes_weights is not None:
        return {f"{name}.{WEIGHTS_NAME}.{key}".lstrip("."): value for key, value in part.bayes_weights.state_dict().items()}
    prior: Any = part.bayes_prior
    if prior is None:
        return {}
    if hasattr(prior, "modules_to_save"):
        # PEFT keeps the untrained original beside the copy it trains
        prior = prior.modules_to_save[prior.active_adapters[0]]
    return {f"{name}.{key}".lstrip("."): value for key, value in prior.named_parameters()}
