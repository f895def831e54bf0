"""Casts from half precision to float32 and back: autocast is off, and casts saturate where float16 would overflow.

Scores of ±1e4 fit into float16, but gradients of their KL often do not: a row may add e¹⁰ ≈ 22,026 to a score's gradient
(`ops/attention/kl.py`), times a query or key of 100, summed over keys. Such a gradient becomes ±65504, as infinity would
turn into NaN one step further back. bfloat16 has the range of float32 and does not need this.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from jaxtyping import Float
from torch import Tensor


def without_autocast(device: str) -> AbstractContextManager:
    """Return a scope without autocast; if autocast is off already, an empty one, which is faster."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def as_autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast query, key and value of different types to autocast's type, as torch's attention does.

    Rotary embeddings leave queries and keys in float32, whereas a linear layer returns values in bfloat16. Tensors of one
    type stay as they are, and so do all without autocast; the caller rejects different types.
    """
    given = (query, key, value)
    types = {getattr(x, "dtype", None) for x in given}
    if len(types) == 1 or not types <= {torch.float32, torch.bfloat16, torch.float16}:
        return given
    if not torch.is_autocast_enabled(query.device.type):
        return given
    dtype = torch.get_autocast_dtype(query.device.type)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def saturate(x: Float[Tensor, "*s"], dtype: torch.dtype) -> Float[Tensor, "*s"]:
    """Cast to `dtype`; numbers beyond the range of float16 become ±65504, and NaN stays NaN."""
    if dtype != torch.float16:
        return x if x.dtype == dtype else x.to(dtype)
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


def upcast(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """Cast to float32 or better; in the backward pass `saturate` casts the gradient."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.to(dtype) if x.dtype != torch.float16 else _Saturating.apply(x, dtype)


def shared(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """Return x for use in two places; autograd adds their gradients in x's own dtype, so in float16 the sum saturates."""
    return x if x.dtype != torch.float16 else _Saturating.apply(x, x.dtype)


class _Saturating(torch.autograd.Function):
    """A cast (or the identity) whose backward saturates."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.view_as(x) if x.dtype == dtype else x.to(dtype)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx, grad: Tensor):
        return saturate(grad, ctx.dtype), None
