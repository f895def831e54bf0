"""The lognormal KL of a whole call from two small matrices, without the m × n scores.

The KL needs S = Σ_ij (Φ_ij − μ_j − x_i)² with Φ_ij = scale · q_i · k_j. With two additional features,

    q̃_i = (q_i, −x_i / scale, −1 / scale)      k̃_j = (k_j, 1, μ_j)      Φ_ij − μ_j − x_i = scale · q̃_i · k̃_j

and the sum of squares is a product of two sums:

    S = scale² Σ_ij q̃_iᵀ k̃_j k̃_jᵀ q̃_i = scale² ⟨Σ_i q̃_i q̃_iᵀ, Σ_j k̃_j k̃_jᵀ⟩

This takes O((m + n) d²) instead of O(m n d). The mask must depend only on the keys: k̃_j = 0 for a masked key. The
gradients are dS/dq̃_i = 2 scale² (Σ_j k̃_j k̃_jᵀ) q̃_i, and the same with queries and keys exchanged.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bayesattn.config import AttentionConfig
from bayesattn.ops.attention.kl import lognormal_kl_from_squares, lognormal_location
from bayesattn.ops.attention.masking import Allowed
from bayesattn.ops.attention.reference import expand_heads
from bayesattn.ops.once import once_differentiable
from bayesattn.precision import saturate, upcast, without_autocast

# largest head dimension d whose d × d float32 matrix fits into the registers of a program
WIDEST_OF_KERNELS = 128


def is_separable(allowed: Allowed) -> bool:
    """Return whether all queries of all heads have the same keys."""
    mask = allowed.mask
    return not allowed.is_causal and (mask is None or mask.shape[1] == mask.shape[2] == 1)


def separable_lognormal_kl(
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    lse: Float[Tensor, "b h m"] | None,
    log_prior: Float[Tensor, "#b #h 1 n"] | None,
    allowed: Allowed,
    config: AttentionConfig,
    scale: float,
    *,
    by_kernels: bool = False,
) -> Float[Tensor, " b"]:
    """Return the lognormal KL per example from queries, keys and, if Φ is the log-softmax, the LSE per row.

    With `by_kernels`, heads up to `WIDEST_OF_KERNELS` use the Triton kernels of `gram_kernels.py`.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    location, shift = lognormal_location(log_prior, allowed, config), 0.5 * config.sigma_q**2
    if not isinstance(location, Tensor):
        location = query.new_full((1, 1, 1, 1), location, dtype=wide)
    shift = query.new_full((1, 1, 1), shift, dtype=wide) if lse is None else lse + shift
    squares = sum_of_squares(query, key, location, shift, allowed, scale, by_kernels=by_kernels)
    return lognormal_kl_from_squares(squares, allowed, config)


def sum_of_squares(
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    location: Float[Tensor, "#b #h 1 #n"],
    shift: Float[Tensor, "#b #h #m"],
    allowed: Allowed,
    scale: float,
    *,
    by_kernels: bool = False,
) -> Float[Tensor, " b"]:
    """Return Σ_ij (scale · q_i · k_j − μ_j − x_i)² per example over the keys that exist, in float32 or wider.

    Args:
        query: Queries.
        key: Keys; groups of query heads may share a head.
        location: μ_j.
        shift: x_i.
        allowed: Entries that exist; must be `is_separable`.
        scale: Factor of the dot product.
        by_kernels: Whether Triton kernels may be used.
    """
    b, h, m, n = allowed.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    location = location.to(wide).expand(b, h, 1, n).squeeze(2)
    shift = shift.to(wide).expand(b, h, m)
    if torch.compiler.is_compiling():
        # the compiler differentiates the formula itself
        query, key = _extended(upcast(query), upcast(key), location, shift, allowed.mask, scale)
        return _product(_gram(query), _gram(key), scale)
    by_kernels = by_kernels and query.shape[-1] <= WIDEST_OF_KERNELS
    return _SumOfSquares.apply(query, key, location, shift, allowed.mask, scale, by_kernels)


class _SumOfSquares(torch.autograd.Function):
    """Autograd node of S; backward forms q̃ and k̃ again, so only inputs and the small matrices are kept."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Float[Tensor, "b h m d"],
        key: Float[Tensor, "b hk n d"],
        location: Float[Tensor, "b h n"],
        shift: Float[Tensor, "b h m"],
        mask: Bool[Tensor, "#b 1 1 n"] | None,
        scale: float,
        by_kernels: bool,
    ) -> Float[Tensor, " b"]:
        if by_kernels:
            from bayesattn.ops.attention import gram_kernels

            of_queries = gram_kernels.moments(query, shift, None, scale, of_keys=False)
            of_keys = gram_kernels.moments(key, location, mask, scale, of_keys=True)
            found = torch.linalg.vecdot(of_queries.flatten(1), of_keys.flatten(1))
        else:
            of_queries, of_keys = map(_gram, _extended(query, key, location, shift, mask, scale))
            found = _product(of_queries, of_keys, scale)
        ctx.save_for_backward(query, key, location, shift, mask, of_queries, of_keys)
        ctx.scale, ctx.by_kernels = scale, by_kernels
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Float[Tensor, " b"]) -> tuple[Tensor | None, ...]:
        query, key, location, shift, mask, of_queries, of_keys = ctx.saved_tensors
        if ctx.by_kernels:
            from bayesattn.ops.attention.gram_kernels import moments_gradient

            grad_query, grad_shift = moments_gradient(query, shift, None, of_keys, grad, ctx.scale, of_keys=False)
            grad_key, grad_location = moments_gradient(key, location, mask, of_queries, grad, ctx.scale, of_keys=True)
            return grad_query, saturate(grad_key, key.dtype), grad_location, grad_shift, None, None, None
        d, hk = query.shape[-1], key.shape[1]
        rate = (2.0 * ctx.scale**2 * grad).view(-1, 1, 1, 1)
        with without_autocast(query.device.type):
            long_query, long_key = _extended(query, key, location, shift, mask, ctx.scale)
            to_query, to_key = long_query @ (rate * of_keys), long_key @ (rate * of_queries)
            if mask is not None:
                to_key.masked_fill_(~mask.transpose(-2, -1), 0.0)
        grad_key = to_key[..., :d].unflatten(1, (hk, -1)).sum(dim=2) if hk < query.shape[1] else to_key[..., :d]
        grads = saturate(to_query[..., :d], query.dtype), saturate(grad_key, key.dtype)
        return *grads, to_key[..., d + 1], to_query[..., d] / -ctx.scale, None, None, None


def _extended(
    query: Tensor, key: Tensor, location: Tensor, shift: Tensor, mask: Tensor | None, scale: float
) -> tuple[Float[Tensor, "b h m d_2"], Float[Tensor, "b h n d_2"]]:
    """Return q̃ and k̃ in the dtype of location and shift."""
    ones = location.new_ones((1, 1, 1, 1))
    key = expand_heads(key, query.shape[1])
    long_query = torch.cat([query, (shift / -scale).unsqueeze(-1), (ones / -scale).expand(*query.shape[:-1], 1)], dim=-1)
    long_key = torch.cat([key, ones.expand(*key.shape[:-1], 1), location.unsqueeze(-1)], dim=-1)
    return long_query, long_key if mask is None else long_key.masked_fill(~mask.transpose(-2, -1), 0.0)


def _gram(x: Float[Tensor, "b h n d"]) -> Float[Tensor, "b h d d"]:
    """Return Σ_j x_j x_jᵀ."""
    return x.transpose(-2, -1) @ x


def _product(first: Float[Tensor, "b h d d"], second: Float[Tensor, "b h d d"], scale: float) -> Float[Tensor, " b"]:
    """Return S from the two matrices."""
    return scale**2 * (first * second).flatten(1).sum(dim=1)
