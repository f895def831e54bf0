"""Adapter for PyTorch Geometric: swap the class of GATConv, GATv2Conv and TransformerConv instances."""

import inspect
from typing import Any

from torch import nn
from torch_geometric.nn import GATConv, GATv2Conv, MessagePassing, TransformerConv

from bayesattn.config import AttentionConfig
from bayesattn.convert import attributes
from bayesattn.convert.attributes import Sizes
from bayesattn.convert.multihead import become_bayesian, become_plain
from bayesattn.integrations.pyg.layers import BayesianGATConv, BayesianGATv2Conv, BayesianTransformerConv
from bayesattn.nn import AttentionWeights, BayesianModule

_BAYESIAN: dict[type[nn.Module], type[BayesianModule]] = {
    GATConv: BayesianGATConv,
    GATv2Conv: BayesianGATv2Conv,
    TransformerConv: BayesianTransformerConv,
}
_PLAIN = {bayesian: plain for plain, bayesian in _BAYESIAN.items()}


def find(model: nn.Module, config: AttentionConfig) -> dict[str, str | None]:
    """Return the layers that normalize scores over edges; those of unsupported classes come with a problem."""
    found: dict[str, str | None] = {}
    for name, module in model.named_modules():
        if not isinstance(module, MessagePassing) or isinstance(module, BayesianModule):
            continue
        if type(module) in _BAYESIAN:
            explains = getattr(module, "_explain", None)
            found[name] = "it is being explained; end the explanation first" if explains else None
        elif _has_softmax(type(module)):
            supported = ", ".join(plain.__name__ for plain in _BAYESIAN)
            found[name] = f"its class has no Bayesian counterpart. Supported are {supported}, but not their subclasses"
    return found


def sizes(module: Any) -> Sizes:
    """Return the sizes of a layer."""
    return attributes.sizes(module, module.out_channels, module.heads)


def refusal(weights: AttentionWeights) -> str | None:
    """Refuse custom weights that are written only for dense scores."""
    return None if weights.runs_on_edges else f"{weights.name} does not run on edges"


def attach(model: nn.Module, name: str, config: AttentionConfig | None, weights: AttentionWeights | None = None) -> None:
    """Turn the layer into its Bayesian counterpart."""
    layer: Any = model.get_submodule(name)
    become_bayesian(layer, _BAYESIAN[type(layer)], sizes(layer), config, weights, name)


def bayesian_part(module: nn.Module) -> BayesianModule | None:
    """Return the layer itself if it was converted (not if it was built as a Bayesian one)."""
    if isinstance(module, BayesianModule) and type(module) in _PLAIN and "is_converted" in module.__dict__:
        return module
    return None


def detach(model: nn.Module, name: str) -> None:
    """Turn the layer back into PyG's."""
    layer: Any = model.get_submodule(name)
    for transient in ("_call", "_wants_weights", "_weights", "prior_scope", "backend", "value_dropout"):
        layer.__dict__.pop(transient, None)
    become_plain(layer, _PLAIN[type(layer)])


def _has_softmax(layer_class: type[nn.Module]) -> bool:
    """Return whether the layer's own code (not `MessagePassing`'s) calls something named softmax."""
    own = layer_class.__mro__[: layer_class.__mro__.index(MessagePassing)]
    functions = (inspect.unwrap(f) for parent in own for f in vars(parent).values() if inspect.isfunction(f))
    return any("softmax" in function.__code__.co_names for function in functions)
