"""Save what a conversion added, or the whole model: weights as safetensors, everything else as JSON. No pickles.

A saved model is a folder, here or as a repository on the Hugging Face Hub.
"""

import json
import logging
import os
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from bayesattn.config import AttentionConfig
from bayesattn.convert import hub, sdpa
from bayesattn.convert.adapters import converted_modules, find_candidates
from bayesattn.convert.bayesianize import attach_selected, restore
from bayesattn.convert.card import MeasuredUncertainty, write_card
from bayesattn.convert.hosted import settings_of
from bayesattn.convert.saved import (
    CONFIG_FILE,
    FORMAT_VERSION,
    WEIGHTS_FILE,
    SavedModel,
    describe,
    prior_tensors,
    read_folder,
    separate,
    shared,
    unwrapped,
    whole_state,
    without_wrappers,
)
from bayesattn.files import replacing
from bayesattn.nn import WeightsFactory

_log = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nn.Module)


def save_bayesian(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    whole: bool = False,
    measured: MeasuredUncertainty | None = None,
    push_to_hub: str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    private: bool = True,
    endpoint: str | None = None,
) -> str | None:
    """Write the config of every Bayesian attention module and the weights of the priors, or all weights, into `folder`.

    Without `whole` the host's own weights are not written; a warning is logged, because fine-tuned ones would be lost.
    A transformers host may also be saved with its own `save_pretrained`, which then writes everything. `load_bayesian`
    reads all three forms. A model card, README.md, says how to load the model; in an existing README.md, only this
    library's section is written.

    Args:
        model: A model that `bayesianize` changed.
        folder: Created if missing.
        whole: Write the model's whole state_dict; a tensor that several names share (tied weights) is written once.
        measured: How well the model's doubt finds its errors, for the model card.
        push_to_hub: A repository `owner/name` on the Hugging Face Hub, created if missing. It gets the folder's safetensors,
            JSON and text files, including those of the host's `save_pretrained` in the same folder; never a pickle.
        revision: The branch to push to, created if missing; None is `main`.
        token: Token with write access, as for `huggingface_hub`; None uses the one from `hf auth login`.
        private: Whether a newly created repository is private. An existing one is not changed.
        endpoint: URL of another Hub; None is the public one, or HF_ENDPOINT.

    Returns:
        The URL of the commit if something was pushed, else None.

    Raises:
        ValueError: The model cannot be saved, or the priors alone would replace a whole model; nothing is written. Or the
            Hub refused; the folder has then been written.

    Example:
        >>> import tempfile
        >>> from bayesattn.convert import bayesianize
        >>> model = bayesianize(nn.TransformerEncoderLayer(8, 2, 16), AttentionConfig("BAM-WC"))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_bayesian(model, folder, whole=True)
        ...     sorted(path.name for path in Path(folder).iterdir())
        ...     loaded = load_bayesian(nn.TransformerEncoderLayer(8, 2, 16), folder)
        ['README.md', 'bayesattn.safetensors', 'bayesattn_config.json']
        >>> torch.equal(loaded.linear1.weight, model.linear1.weight)
        True
    """
    is_adapted = hasattr(without_wrappers(model), "get_base_model")
    model, folder = unwrapped(model), Path(folder)
    converted = converted_modules(model)
    if not converted:
        raise ValueError(
            f"model is a {type(model).__name__} without Bayesian attention. Call bayesianize(model, config) first"
        )
    if push_to_hub is not None:
        hub.check_repository(push_to_hub)
    elif (revision, token, endpoint) != (None, None, None):
        raise ValueError("revision, token and endpoint are for the Hub. Give push_to_hub='owner/name' as well")
    if whole and is_adapted:
        raise ValueError(
            "whole is True for a PEFT model; save its adapter with save_pretrained and the priors without whole, "
            "or call merge_and_unload() first"
        )
    if not whole and (folder / CONFIG_FILE).exists() and describe(folder / CONFIG_FILE).get("whole"):
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
        # modules whose attention was found only by running the model (`example_inputs` of bayesianize)
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
    variants = [part.config.variant if part.bayes_weights is None else part.bayes_weights.name for _, _, part in converted]
    write_card(folder, type(model).__name__, variants, push_to_hub or str(folder.name), measured)
    if push_to_hub is None:
        return None
    return hub.push(folder, push_to_hub, revision=revision, token=token, private=private, endpoint=endpoint)


def load_bayesian(
    model: Model,
    folder: str | os.PathLike[str],
    *,
    weights: WeightsFactory | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    endpoint: str | None = None,
) -> Model:
    """Make `model` Bayesian like the one saved in `folder`: priors included, and all weights if they were saved.

    Args:
        model: The deterministic model, or one converted in the same places (its priors are overwritten). If the folder
            holds a whole model, all weights are overwritten, so `model` may be freshly built from its config.
        folder: Written by `save_bayesian`, or by `save_pretrained` of a converted transformers model. From the latter only
            the Bayesian part is read, since `from_pretrained` reads the rest. If there is no such folder, `owner/name`
            is a repository on the Hugging Face Hub (extra `hf`), fetched into its cache.
        weights: The function that built the custom weights of the saved model, as for `bayesianize`; it must build them
            with the saved settings.
        revision: Branch, tag or commit of the repository.
        token: For a private repository, as for `huggingface_hub`; None uses the one from `hf auth login`.
        endpoint: URL of another Hub; None is the public one, or HF_ENDPOINT.

    Raises:
        ValueError: There is neither such a folder nor such a repository, it holds no Bayesian model, or it does not fit
            this one; the model is unchanged.

    Example:
        >>> import tempfile
        >>> import bayesattn as ba
        >>> model = ba.bayesianize(nn.TransformerEncoderLayer(8, 2, 16), ba.AttentionConfig("BAM-WC"))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_bayesian(model, folder, whole=True)
        ...     loaded = load_bayesian(nn.TransformerEncoderLayer(8, 2, 16), folder)
        >>> bool((loaded.linear1.weight == model.linear1.weight).all())
        True
    """
    where, wanted = folder, ((CONFIG_FILE, WEIGHTS_FILE), ("*.safetensors",))
    folder = hub.find_folder(where, wanted, revision=revision, token=token, endpoint=endpoint)
    if folder != Path(where) and not (folder / CONFIG_FILE).exists() and not any(folder.glob("*.safetensors")):
        raise ValueError(f"the repository {where} holds neither {CONFIG_FILE} nor a safetensors file")
    saved = read_folder(folder)
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


def _check_weights(saved: SavedModel, weights: WeightsFactory | None) -> None:
    """Raise where the folder has custom weights and `weights` is not given, or the other way round."""
    if saved.custom and weights is None:
        name, settings = next(iter(saved.custom.items()))
        raise ValueError(
            f"{name} was saved with custom weights {settings}, which this library does not build. Give the function that "
            "built them: load_bayesian(model, folder, weights=...)"
        )
    if saved.configs and weights is not None:
        raise ValueError(f"weights is given, but {next(iter(saved.configs))} was saved with a config. Leave weights out")


def _convert(model: nn.Module, saved: SavedModel, weights: WeightsFactory | None) -> None:
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


def _load(model: nn.Module, saved: SavedModel) -> None:
    """Check every tensor against its place, then copy them all."""
    parts = {name: part for name, _, part in converted_modules(model)}
    for name, part in parts.items():
        own = None if part.bayes_weights is None else part.bayes_weights.settings()
        if own != saved.custom.get(name):
            raise ValueError(
                f"{name} has the custom weights {own} in the model and {saved.custom.get(name)} in the file; they must agree"
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


def _has_other_weights(folder: Path) -> bool:
    """Whether the host's weights are in the same folder: a checkpoint of a Trainer, of `save_pretrained` or of PEFT."""
    return any(path.name != WEIGHTS_FILE for path in folder.glob("*.safetensors")) or any(folder.glob("*.bin"))
