"""Stochastic attention on a CPU, one cache-sized block of rows at a time.

The mathematics of `reference.py` as one autograd function. For long sequences the backward pass recomputes each block and
redraws its noise, so nothing of size m × n is kept. For short sequences the blocks are kept: they are then no larger than
query, key, value and output together.

The function returns the output and the log-sum-exp of the clean scores. Besides query and key, the KL needs nothing else.
"""

import math
from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bayesattn import noise
from bayesattn.config import AttentionConfig
from bayesattn.ops.attention.gram import separable_lognormal_kl
from bayesattn.ops.attention.kl import weibull_kl
from bayesattn.ops.attention.masking import Allowed
from bayesattn.ops.attention.reference import expand_heads
from bayesattn.ops.once import once_differentiable

# entries per block; two float32 arrays of this size fit a 2 MiB second-level cache (the fastest of 2^16 … 2^22)
BLOCK_ENTRIES = 2**18


def attention(
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    value: Float[Tensor, "b hk n dv"],
    *,
    config: AttentionConfig,
    log_prior: Float[Tensor, "#b #h 1 n"] | None,
    allowed: Allowed,
    scale: float,
    need_kl: bool,
) -> tuple[Float[Tensor, "b h m dv"], Float[Tensor, " b"] | None]:
    """Return O = W V for one draw from torch's generator and, if `need_kl`, the KL per example."""
    b, h, m, _ = allowed.shape
    keys, values = expand_heads(key, h), expand_heads(value, h)
    closed, dead = _closed(allowed, query.device)
    flat = (x.reshape(b * h, *x.shape[2:]) for x in (query, keys, values))
    need_lse = need_kl and (config.family == "weibull" or config.score_form == "log_softmax")
    keeps = torch.is_grad_enabled() and _may_keep(query, keys, values, num_arrays=1 + need_lse)
    output, lse = _BlockedAttention.apply(*flat, closed, dead, config, scale, int(noise.draw_seed()), need_lse, keeps)
    kl = None
    if need_kl and config.family == "lognormal":
        rows = lse.view(b, h, m) if need_lse else None
        kl = separable_lognormal_kl(query, key, rows, log_prior, allowed, config, scale)
    elif need_kl:
        # Σ_i Φ_ij = scale · k_j · Σ_i q_i, without the scores
        column_sums = (keys * (allowed.sum_over_queries(query) * scale)).sum(dim=-1).unsqueeze(-2)
        kl = weibull_kl(column_sums, lse.view(b, h, m), log_prior, allowed, config)
    return output.view(b, h, m, value.shape[-1]), kl


class _BlockedAttention(torch.autograd.Function):
    """O, LSE = softmax(Φ + log-noise) V, logsumexp(Φ) with Φ = scale · Q Kᵀ; batch and heads share an axis."""

    @staticmethod
    def forward(ctx, query, key, value, closed, dead, config, scale, seed, need_lse, keeps):
        output = query.new_empty((*query.shape[:2], value.shape[-1]))
        lse = query.new_zeros(query.shape[:2])
        kept = []
        for at, scores, weights in _blocks(query, key, closed, dead, config, scale, seed):
            torch.bmm(weights, value[at[0]], out=output[at])
            if need_lse and scores.shape[-1]:
                lse[at] = torch.logsumexp(scores, dim=-1)
            if keeps:
                kept += [weights, scores] if need_lse else [weights]
        if dead is not None:
            lse.masked_fill_(dead.squeeze(-1), 0.0)
        ctx.save_for_backward(query, key, value, closed, dead, output, lse, *kept)
        ctx.options, ctx.need_lse = (config, scale, seed), need_lse
        return output, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output, grad_lse):
        query, key, value, closed, dead, output, lse, *kept = ctx.saved_tensors
        has_rows = query.shape[1] > 0
        grad_query = torch.empty_like(query)
        grad_key, grad_value = (torch.empty_like(x) if has_rows else torch.zeros_like(x) for x in (key, value))
        # Σ_j W_ij dW_ij = O_i · dO_i, so the softmax's backward needs no row sum
        delta = (output * grad_output).sum(dim=-1, keepdim=True)
        scale = ctx.options[1]
        if kept:
            places = _places(query, key)
            blocks = zip(places, kept[1::2], kept[::2]) if ctx.need_lse else zip(places, kept, kept)
        else:
            blocks = _blocks(query, key, closed, dead, *ctx.options)
        for at, scores, weights in blocks:
            heads, rows = at
            # the first rows overwrite uninitialized memory
            beta = 0.0 if rows.start == 0 else 1.0
            grad_value[heads].baddbmm_(weights.transpose(1, 2), grad_output[at], beta=beta)
            grad_scores = torch.bmm(grad_output[at], value[heads].transpose(1, 2)).sub_(delta[at]).mul_(weights)
            if ctx.need_lse:
                # d LSE_i / d Φ_ij is the clean weight
                grad_scores += (scores - lse[at].unsqueeze(-1)).exp_().mul_(grad_lse[at].unsqueeze(-1))
            torch.bmm(grad_scores, key[heads], out=grad_query[at]).mul_(scale)
            grad_key[heads].baddbmm_(grad_scores.transpose(1, 2), query[at], beta=beta, alpha=scale)
        return grad_query, grad_key, grad_value, *[None] * 7


def _may_keep(query: Tensor, key: Tensor, value: Tensor, num_arrays: int) -> bool:
    """Return whether `num_arrays` m × n arrays are no larger than query, key, value and output, which are kept anyway."""
    m, n = query.shape[-2], key.shape[-2]
    return num_arrays * m * n <= (m + n) * (query.shape[-1] + value.shape[-1])


def _closed(allowed: Allowed, device: torch.device) -> tuple[Bool[Tensor, "bh #m n"] | None, Bool[Tensor, "bh #m 1"] | None]:
    """Return masks of the entries that do not exist and of the rows without any entry, each None if not needed."""
    b, h, _, n = allowed.shape
    mask = allowed.dense(device)
    if mask is None:
        return None, None
    rows, dead = mask.shape[2], ~mask.any(dim=-1, keepdim=True)
    closed = (~mask).expand(b, h, rows, n).reshape(b * h, rows, n)
    return closed, dead.expand(b, h, rows, 1).reshape(b * h, rows, 1) if bool(dead.any()) else None


def _blocks(
    query: Tensor, key: Tensor, closed: Tensor | None, dead: Tensor | None, config: AttentionConfig, scale: float, seed: int
) -> Iterator[tuple[tuple[slice, slice], Tensor, Tensor]]:
    """Yield (heads and rows, clean scores, sampled weights) per block, the same in forward and backward.

    Entries that do not exist have the score −inf, which noise does not change, so their weight is 0.
    """
    generator = torch.Generator().manual_seed(seed)
    for at in _places(query, key):
        scores = torch.bmm(query[at] * scale, key[at[0]].transpose(1, 2))
        if closed is not None:
            scores.masked_fill_(_part(closed, at), -math.inf)
        shape = (1, scores.shape[0], scores.shape[1], scores.shape[2])
        log_noise = noise.log_noise(None, shape, config, dtype=scores.dtype, generator=generator)[0]
        weights = torch.softmax(log_noise.add_(scores), dim=-1)
        # the softmax of a row without keys is NaN; it is overwritten and has no gradient
        yield at, scores, weights if dead is None else weights.masked_fill_(_part(dead, at), 0.0)


def _places(query: Tensor, key: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield the heads and rows of each block."""
    (heads, m, _), n = query.shape, key.shape[1]
    rows = max(1, min(m, BLOCK_ENTRIES // max(n, 1)))
    step = max(1, BLOCK_ENTRIES // max(rows * n, 1)) if rows == m else 1
    for first in range(0, heads, step):
        for top in range(0, m, rows):
            yield slice(first, first + step), slice(top, top + rows)


def _part(mask: Tensor, at: tuple[slice, slice]) -> Tensor:
    return mask[at] if mask.shape[1] > 1 else mask[at[0]]
