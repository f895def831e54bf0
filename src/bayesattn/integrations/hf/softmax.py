"""Adapter for transformers' attention outside the registry: its own code computes scores, softmax and average.

Only the softmax is replaced. So everything that belongs to the scores (relative positions, ALiBi, rotations, masks, caches)
stays the host's, and so do the average of the values and the dropout of the weights. The module's class is swapped for a
subclass of the same name whose `forward` runs inside a `TorchFunctionMode` while there is something to draw or to record.
"""

import inspect
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayesattn import sensitivity
from bayesattn.config import AttentionConfig
from bayesattn.convert import attributes, sdpa
from bayesattn.convert.attributes import Sizes, dropout_rate
from bayesattn.convert.hosted import CHILD_NAME, HostedAttention
from bayesattn.convert.masks import split_mask
from bayesattn.convert.sdpa import SampledAttention, intercepting
from bayesattn.integrations.hf.adapter import batch_of, release_batch
from bayesattn.nn import AttentionWeights, BayesianModule
from bayesattn.ops.attention import observers
from bayesattn.precision import without_autocast

# classes whose `forward` multiplies queries with keys, then takes one softmax over the scores (Falcon: or calls torch's
# attention); each has been read and is tested
CLASSES = frozenset(
    f"transformers.models.{name}"
    for name in (
        "bloom.modeling_bloom.BloomAttention",
        "deberta_v2.modeling_deberta_v2.DisentangledSelfAttention",
        "falcon.modeling_falcon.FalconAttention",
        "gptj.modeling_gptj.GPTJAttention",
        "mpnet.modeling_mpnet.MPNetSelfAttention",
    )
)

# models mask with the smallest number of their dtype, added to the score or in its place: at most float16's smallest
_FORBIDDEN_SCORE = torch.finfo(torch.float16).min / 2
_PRODUCTS = (torch.matmul, torch.bmm, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.baddbmm)


def find(model: nn.Module, config: AttentionConfig) -> dict[str, str | None]:
    """Return the modules of the known classes."""
    return {
        name: _problem(module, config)
        for name, module in model.named_modules()
        if not isinstance(module, _Intercepting) and any(_path(base) in CLASSES for base in type(module).__mro__)
    }


def sizes(module: Any) -> Sizes:
    """Return the sizes of a module."""
    # Falcon's new architecture repeats its keys for all heads before it multiplies
    return attributes.sizes(module, None, module.num_heads if getattr(module, "new_decoder_architecture", False) else None)


def refusal(weights: AttentionWeights) -> str:
    """Refuse all custom weights."""
    return f"{weights.name} needs the values, but attention outside the registry shows only its scores"


def attach(model: nn.Module, name: str, config: AttentionConfig | None, weights: AttentionWeights | None = None) -> None:
    """Attach the Bayesian part as a child and swap the class."""
    assert weights is None, "refused"
    module: Any = model.get_submodule(name)
    head_dim, heads, device, dtype = sizes(module)
    child = HostedAttention(config, key_dim=head_dim, num_heads=heads, name=name, device=device, dtype=dtype)
    child.batch = batch_of(model, name)
    module.add_module(CHILD_NAME, child.train(module.training))
    module.__class__ = intercepting(_Intercepting, type(module))


def bayesian_part(module: nn.Module) -> BayesianModule | None:
    """Return the child of a converted module."""
    return getattr(module, CHILD_NAME) if isinstance(module, _Intercepting) else None


def detach(model: nn.Module, name: str) -> None:
    """Swap the class back and remove the child."""
    child = getattr(model.get_submodule(name), CHILD_NAME)
    sdpa.detach(model, name)
    release_batch(model, name, child)


def _problem(module: nn.Module, config: AttentionConfig) -> str | None:
    if _path(type(module)) not in CLASSES:
        return "it is a subclass with its own code, perhaps for FlashAttention; call model.set_attn_implementation first"
    if hasattr(module, CHILD_NAME):
        return f"it has an attribute {CHILD_NAME!r} of its own"
    if next(module.parameters()).is_meta:
        return "its parameters are on the meta device"
    return None


class _Intercepting(nn.Module):
    """Mixin whose `forward` is the host's, with its softmax replaced while there is something to draw, drop or record."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        child: HostedAttention = getattr(self, CHILD_NAME)
        if child.is_idle and not child.wakes_dropout:
            return super().forward(*args, **kwargs)
        given = _signature(type(self)).bind(self, *args, **kwargs).arguments
        mode = _SampledSoftmax(self, child, given.get("attention_mask"))
        with mode:
            output = super().forward(*args, **kwargs)
        mode.check(mode.calls == 1)
        return output


class _SampledSoftmax(SampledAttention):
    """Replaces the one softmax, or the one call of torch's attention, of a forward pass."""

    def __init__(self, module: nn.Module, child: HostedAttention, attention_mask: Tensor | None) -> None:
        super().__init__(child, _dropout_rate(module))
        self.host = type(module).__name__
        self.attention_mask, self.key_factor = attention_mask, _key_factor(module)
        self.key: Tensor | None = None
        self.calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.softmax:
            self.calls += 1
            return self._weights(func, args, kwargs)
        if func is F.scaled_dot_product_attention:
            self.calls += 1
            if self.child.is_idle:
                return func(*args, **{**kwargs, "dropout_p": self.dropout_p})
            return self._attend(func, *args, **kwargs)
        if self.key is None and func in _PRODUCTS:
            right = kwargs["batch2"] if "batch2" in kwargs else args[-1]
            # a weight matrix has two axes
            self.key = right.transpose(-2, -1) if right.ndim > 2 else None
        return func(*args, **kwargs)

    def check(self, is_as_expected: bool) -> None:
        """Raise if the host no longer computes attention as it did when its class was added to the list."""
        if not is_as_expected:
            raise RuntimeError(
                f"{self.host} of this version of transformers does not compute one product of queries and keys and one "
                "softmax of scores (b, h, m, n); its attention cannot be sampled"
            )

    def _weights(self, softmax: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        child, given = self.child, args[0]
        self.check(self.calls == 1 and self.key is not None and given.ndim == 4)
        dtype = kwargs.get("dtype") or given.dtype
        with without_autocast(given.device.type):
            mask = self._mask(given)
            scores = given.masked_fill(~mask, 0.0)
            kl = None
            if child.needs_kl:
                assert self.key is not None  # for the type checker
                key = self.key.reshape(given.shape[0], -1, *self.key.shape[-2:]) * self.key_factor
                kl = child.kl(scores, key, mask)
            if child.is_observed:
                observers.note_scores(child, scores, mask)
            if child.is_measured:
                args = (sensitivity.through_scores(given, child), *args[1:])
            # hosts take views of what softmax returns
            weights = child.draw(scores, mask, 0).to(dtype).contiguous() if child.is_sampling else softmax(*args, **kwargs)
            if child.wakes_dropout:
                if self.dropout_p is None:
                    raise ValueError("sampling(dropout=True): no attribute of the module holds its attention dropout")
                weights = F.dropout(weights, self.dropout_p)
        return child.record(weights, kl)

    def _mask(self, scores: Tensor) -> Tensor:
        """Return where a query may attend: from the additive mask that the host was given, and from the masked scores."""
        allowed = scores > _FORBIDDEN_SCORE
        if self.attention_mask is None or not self.attention_mask.is_floating_point() or self.attention_mask.ndim != 4:
            return allowed
        mask, _ = split_mask(self.attention_mask)
        assert mask is not None
        return allowed & mask[..., : scores.shape[-1]]


def _dropout_rate(module: Any) -> float | None:
    # Falcon drops weights only together with ALiBi
    is_rotary_falcon = hasattr(module, "new_decoder_architecture") and not module.config.alibi
    return 0.0 if is_rotary_falcon else dropout_rate(module)


def _key_factor(module: Any) -> float:
    """Return the factor by which the host divided its keys before the product: the prior reads the original keys."""
    types = getattr(module, "pos_att_type", None)
    return 1.0 if types is None else math.sqrt(module.attention_head_size * (1 + len({"c2p", "p2c"} & set(types))))


@cache
def _signature(intercepting_class: type[nn.Module]) -> inspect.Signature:
    return inspect.signature(intercepting_class.__mro__[2].forward)


def _path(module_class: type) -> str:
    return f"{module_class.__module__}.{module_class.__qualname__}"
