"""Save what a conversion added, and only that: prior weights as safetensors, everything else as JSON. No pickles."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from bayesattn.config import AttentionConfig
from bayesattn.convert.adapters import converted_modules
from bayesattn.convert.bayesianize import bayesianize, restore
from bayesattn.convert.hosted import CHILD_NAME, config_from_dict, decode_config
from bayesattn.nn import BayesianModule
from bayesattn.nn._base import RIVAL_NAME

CONFIG_FILE = "bayesattn_config.json"
WEIGHTS_FILE = "bayesattn.safetensors"
FORMAT_VERSION = 1

Model = TypeVar("Model", bound=nn.Module)


def save_bayesian(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Write the config of every Bayesian attention module and the weights of the priors into `folder`.

    The host's own weights are not written. A transformers host may also be saved with its own `save_pretrained`, which
    then holds both; `load_bayesian` reads either, and loading that folder without this library gives the plain model.

    Args:
        model: A model that `bayesianize` changed.
        folder: Created if missing.
    """
    model = _unwrapped(model)
    converted = converted_modules(model)
    if not converted:
        raise ValueError(
            f"model is a {type(model).__name__} without converted attention; allowed: one that bayesianize changed"
        )
    modules = {name: part.config.to_dict() for name, _, part in converted}
    weights: dict[str, Tensor] = {}
    for name, _, part in converted:
        tensors = _prior_tensors(name, part)
        weights |= {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    description = {"format": FORMAT_VERSION, "model": type(model).__name__, "modules": modules}
    text = json.dumps(description, indent=2) + "\n"
    # weights first: a folder with a config always has its weights
    _replace(folder / WEIGHTS_FILE, lambda path: save_file(weights, path, metadata={"format": "pt"}))
    _replace(folder / CONFIG_FILE, lambda path: path.write_text(text, encoding="utf-8"))


def load_bayesian(model: Model, folder: str | os.PathLike[str]) -> Model:
    """Make `model` Bayesian as the one saved in `folder` was, priors included.

    Args:
        model: The deterministic model, or one converted in the same places (its priors are overwritten).
        folder: Written by `save_bayesian`, or by `save_pretrained` of a converted transformers model.

    Raises:
        ValueError: The folder holds nothing of ours, or it does not fit the model; the model is unchanged.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"folder is {str(folder)!r}, which is not a folder")
    configs, weights = _read_own(folder) if (folder / CONFIG_FILE).exists() else _read_host_checkpoint(folder)
    host = _unwrapped(model)
    missing = sorted(set(configs) - {name for name, _ in host.named_modules()})
    if missing:
        raise ValueError(
            f"the saved model has attention modules {missing[:8]} that this {type(host).__name__} does not have"
        )
    before = {name: part.config for name, _, part in converted_modules(host)}
    if before and set(before) != set(configs):
        raise ValueError(
            f"model has Bayesian attention in {sorted(before)[:8]}, the saved one in {sorted(configs)[:8]}; "
            "call restore(model) first"
        )
    if not before:
        _convert(host, configs)
    try:
        _load_priors(host, configs, weights)
    except BaseException:
        if not before:
            restore(host)
        raise
    return model


def _convert(model: nn.Module, configs: dict[str, AttentionConfig]) -> None:
    """Convert the named modules, all with one config at first: `bayesianize` refuses a second call."""
    widest = next((c for c in configs.values() if _shape_of_prior(c)), next(iter(configs.values())))
    if any(_shape_of_prior(config) not in (None, _shape_of_prior(widest)) for config in configs.values()):
        raise ValueError(
            "the saved modules have priors of different kinds; save and load the parts of such a model one by one"
        )
    bayesianize(model, widest, layers=list(configs))


def _shape_of_prior(config: AttentionConfig) -> tuple[Any, ...] | None:
    if config.is_rival:
        return tuple(config.to_dict().values())
    return (config.prior_hidden_dim, config.prior_per_head) if config.prior_kind == "contextual" else None


def _load_priors(model: nn.Module, configs: dict[str, AttentionConfig], weights: dict[str, Tensor]) -> None:
    """Check every tensor against its place, then copy them all."""
    targets: dict[str, Tensor] = {}
    parts = {name: part for name, _, part in converted_modules(model)}
    for name, part in parts.items():
        targets |= _prior_tensors(name, part)
    if set(targets) != set(weights):
        differing = sorted(set(targets) ^ set(weights))
        raise ValueError(f"the saved priors and those of the model differ in {differing[:8]}")
    for key, value in weights.items():
        if value.shape != targets[key].shape:
            raise ValueError(
                f"{key} has shape {tuple(value.shape)} in the file and {tuple(targets[key].shape)} in the model"
            )
    with torch.no_grad():
        for key, value in weights.items():
            targets[key].copy_(value)
    for name, part in parts.items():
        part.config = configs[name]


def _read_own(folder: Path) -> tuple[dict[str, AttentionConfig], dict[str, Tensor]]:
    path = folder / CONFIG_FILE
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
        version, modules = description["format"], description["modules"]
        configs = {str(name): config_from_dict(values) for name, values in modules.items()}
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a file that save_bayesian wrote: {type(error).__name__}: {error}") from error
    if version != FORMAT_VERSION:
        raise ValueError(f"{path} has format {version!r}; allowed: {FORMAT_VERSION}")
    if not (folder / WEIGHTS_FILE).exists():
        raise ValueError(f"{folder} has {CONFIG_FILE} but not {WEIGHTS_FILE}")
    return configs, _read_tensors(folder / WEIGHTS_FILE, lambda key: True)


def _read_host_checkpoint(folder: Path) -> tuple[dict[str, AttentionConfig], dict[str, Tensor]]:
    """Pick our tensors out of a host's own checkpoint, in one file or in shards."""
    marker = f".{CHILD_NAME}."
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(_read_tensors(path, lambda key: marker in f".{key}"))
    configs: dict[str, AttentionConfig] = {}
    weights: dict[str, Tensor] = {}
    for key, value in tensors.items():
        host, _, rest = f".{key}".rpartition(marker)
        host = host.lstrip(".")
        if rest == "settings":
            configs[host] = decode_config(value)
        else:
            weights[f"{host}.{rest.removeprefix('bayes_prior.')}".lstrip(".")] = value
    if not configs:
        raise ValueError(
            f"{folder} holds neither {CONFIG_FILE} nor a checkpoint of a converted transformers model; allowed: a folder "
            "written by save_bayesian, or by save_pretrained of a Bayesian model"
        )
    return configs, weights


def _read_tensors(path: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys() if wanted(key)}  # noqa: SIM118  (not a dict)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from error


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write to a temporary file beside `path`, then rename: no reader ever sees half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _unwrapped(model: Any) -> nn.Module:
    """Return the model inside the wrappers of torch.compile, data parallelism and PEFT: names must not depend on them."""
    model = getattr(model, "_orig_mod", model)
    model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _prior_tensors(name: str, part: BayesianModule) -> dict[str, Tensor]:
    """Return the parameters of a prior, or the state of a rival, under names that start with the attention module's."""
    if part.bayes_rival is not None:
        return {f"{name}.{RIVAL_NAME}.{key}".lstrip("."): value for key, value in part.bayes_rival.state_dict().items()}
    prior: Any = part.bayes_prior
    if prior is None:
        return {}
    if hasattr(prior, "modules_to_save"):
        # PEFT keeps the untrained original beside the copy it trains
        prior = prior.modules_to_save[prior.active_adapters[0]]
    return {f"{name}.{key}".lstrip("."): value for key, value in prior.named_parameters()}
