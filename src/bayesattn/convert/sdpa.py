"""Adapter for hand-written modules that call `F.scaled_dot_product_attention`: intercept the call while sampling.

The module's class is swapped for a subclass of the same name whose `forward` runs inside a `TorchFunctionMode`. Outside
of sampling and recording the mode is not even entered, so the original code runs untouched.
"""

import inspect
import math
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bayesattn.config import AttentionConfig
from bayesattn.convert.attributes import dropout_rate, key_dim, num_key_heads
from bayesattn.convert.hosted import CHILD_NAME, HostedAttention
from bayesattn.convert.masks import split_mask
from bayesattn.nn import BayesianModule


def find(model: nn.Module, config: AttentionConfig) -> dict[str, str | None]:
    """Return modules outside torch, transformers and PyG whose own `forward` calls torch's attention."""
    found: dict[str, str | None] = {}
    for name, module in model.named_modules():
        library = type(module).__module__.split(".")[0]
        if library in ("torch", "transformers", "torch_geometric") or isinstance(module, _Intercepting | BayesianModule):
            continue
        if not _calls_sdpa(type(module)):
            continue
        problem = f"{config.variant} needs the features of a key; give the module an integer attribute head_dim"
        found[name] = problem if config.needs_key_dim and key_dim(module) is None else None
        if hasattr(module, CHILD_NAME):
            found[name] = f"it has an attribute {CHILD_NAME!r} of its own"
    return found


def attach(model: nn.Module, name: str, config: AttentionConfig) -> None:
    """Attach the Bayesian part as a child and swap the class."""
    module = model.get_submodule(name)
    like = next((p for p in module.parameters() if p.is_floating_point()), torch.empty(0))
    child = HostedAttention(
        config, key_dim=key_dim(module), num_heads=num_key_heads(module) or 1, device=like.device, dtype=like.dtype
    )
    module.add_module(CHILD_NAME, child.train(module.training))
    module.__class__ = _intercepting(type(module))


def bayesian_part(module: nn.Module) -> BayesianModule | None:
    """Return the child of a converted module."""
    return getattr(module, CHILD_NAME) if isinstance(module, _Intercepting) else None


def detach(model: nn.Module, name: str) -> None:
    """Swap the class back and remove the child."""
    module = model.get_submodule(name)
    delattr(module, CHILD_NAME)
    module.__class__ = type(module).__mro__[2]


class _Intercepting(nn.Module):
    """Mixin whose `forward` is the host's, run inside `_SampledAttention` while there is something to sample or record."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        child = getattr(self, CHILD_NAME)
        if child.is_idle:
            return super().forward(*args, **kwargs)
        with _SampledAttention(child, dropout_rate(self)):
            return super().forward(*args, **kwargs)


@cache
def _intercepting(host_class: type[nn.Module]) -> type[nn.Module]:
    # same name: code that looks at class names, and print(model), see what they saw before
    return type(host_class.__name__, (_Intercepting, host_class), {"__module__": host_class.__module__})


class _SampledAttention(TorchFunctionMode):
    """Replaces calls of `F.scaled_dot_product_attention` by sampled attention."""

    def __init__(self, child: HostedAttention, dropout_p: float | None) -> None:
        super().__init__()
        self.child, self.dropout_p = child, dropout_p

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return self._attend(func, *args, **kwargs)

    def _attend(
        self,
        func,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        child = self.child
        lead = query.shape[:-3]
        # torch allows any number of leading axes; ours is one
        batched = [x.reshape(-1, *x.shape[-3:]) if x.ndim >= 3 else x[None, None] for x in (query, key, value)]
        mask, bias = split_mask(attn_mask if attn_mask is None or attn_mask.ndim <= 4 else attn_mask.flatten(0, -4))
        options = {"mask": mask, "bias": bias, "is_causal": is_causal}
        options["scale"] = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
        if not child.is_sampling and child.bayes_rival is None:
            output = func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
            return child.record_mean(output, batched[0], batched[1], **options)
        if child.wakes_dropout:
            if self.dropout_p is None:
                raise ValueError(
                    "sampling(dropout=True): this module's attention dropout is unknown; give it an attribute dropout_p"
                )
            dropout_p = self.dropout_p
        output, _ = child.attend(*batched, dropout_p=dropout_p, **options)
        return output.reshape(*lead, *output.shape[1:]) if query.ndim >= 3 else output[0, 0]


def _calls_sdpa(module_class: type[nn.Module]) -> bool:
    code = getattr(inspect.unwrap(module_class.forward), "__code__", None)
    return code is not None and "scaled_dot_product_attention" in code.co_names
