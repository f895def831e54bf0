"""Adapter for `torch.nn.MultiheadAttention`, alone or inside torch's transformer layers: swap the class on the instance.

The swapped module *is* `bayesattn.nn.MultiheadAttention`: same parameters under the same names, and while it samples it
declines the fused path of `nn.TransformerEncoderLayer`, which would never call it.
"""

from typing import Any

from torch import nn

from bayesattn.config import AttentionConfig
from bayesattn.convert import attributes
from bayesattn.convert.attributes import Sizes
from bayesattn.nn import AttentionWeights, BayesianModule, MultiheadAttention

# `kl` sets the last one on the module when it records
_ADDED = ("config", "samples_in_eval", "drops_in_eval", "kl_name", "is_converted", "_recorded_last")


def find(model: nn.Module, config: AttentionConfig) -> dict[str, str | None]:
    """Return every torch attention module; a subclass comes with the reason it is not converted."""
    return {
        name: None if type(module) is nn.MultiheadAttention else "a subclass of nn.MultiheadAttention may compute anything"
        for name, module in model.named_modules()
        if isinstance(module, nn.MultiheadAttention) and not isinstance(module, BayesianModule)
    }


def sizes(module: Any) -> Sizes:
    """Return the sizes of torch's module."""
    return attributes.sizes(module, module.head_dim, module.num_heads)


def attach(model: nn.Module, name: str, config: AttentionConfig | None, weights: AttentionWeights | None = None) -> None:
    """Turn torch's module into `bayesattn.nn.MultiheadAttention`."""
    module: Any = model.get_submodule(name)
    state = module.__dict__
    same_embed_dim = state.pop("_qkv_same_embed_dim")
    try:
        become_bayesian(module, MultiheadAttention, sizes(module), config, weights, name)
    except BaseException:
        state["_qkv_same_embed_dim"] = same_embed_dim
        raise
    # in the Bayesian class this name is a property
    state["_same_embed_dim"] = same_embed_dim


def bayesian_part(module: nn.Module) -> BayesianModule | None:
    """Return the module itself if it was converted (not if it was built as a Bayesian one)."""
    return module if isinstance(module, MultiheadAttention) and "is_converted" in module.__dict__ else None


def detach(model: nn.Module, name: str) -> None:
    """Turn the module back into torch's."""
    module = model.get_submodule(name)
    state = module.__dict__
    state["_qkv_same_embed_dim"] = state.pop("_same_embed_dim")
    become_plain(module, nn.MultiheadAttention)


def become_bayesian(
    module: Any,
    bayesian_class: type[BayesianModule],
    of: Sizes,
    config: AttentionConfig | None,
    weights: AttentionWeights | None,
    name: str,
) -> None:
    """Swap the class of `module` for a Bayesian subclass and give it what that class needs."""
    plain_class = type(module)
    module.__class__ = bayesian_class
    try:
        module.init_bayesian(
            config,
            key_dim=of.head_dim,
            num_heads=of.num_heads,
            prior_name=name,
            weights=weights,
            device=of.device,
            dtype=of.dtype,
        )
    except BaseException:
        module.__class__ = plain_class
        raise
    module.is_converted = True
    for added in (module.bayes_prior, module.bayes_weights):
        if added is not None:
            added.train(module.training)


def become_plain(module: Any, plain_class: type[nn.Module]) -> None:
    """Undo `become_bayesian`."""
    del module.bayes_prior, module.bayes_weights
    for attribute in _ADDED:
        module.__dict__.pop(attribute, None)
    module.__class__ = plain_class
