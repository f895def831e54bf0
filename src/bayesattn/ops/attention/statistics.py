"""How concentrated attention is per row: entropy, largest weight and share on given keys, without an m × n array.

With Z = Σ_j exp(Φ_ij − max_j Φ_ij), all three follow from sums that a softmax accumulates anyway:

    entropy = LSE − E[Φ],    largest weight = 1 / Z,    share = Σ_{j in positions} exp(Φ_ij − max) / Z
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bayesattn.ops.attention.masking import masked_softmax
from bayesattn.ops.attention.reference import expand_heads
from bayesattn.ops.attention.support import HAS_TRITON, INTERPRETED
from bayesattn.precision import upcast, without_autocast

# entries per block of scores: fits a CPU's cache, or keeps a GPU busy where no kernel runs
BLOCK_ENTRIES = {"cpu": 2**18, "cuda": 2**25}
# largest head dimension of the kernel
LARGEST_HEAD = 256


class Rows(NamedTuple):
    """Statistics of softmax(Φ), one number per query; all are 0 for a query without keys.

    Attributes:
        entropy: Entropy in nats.
        largest: Largest weight.
        keys: Number of keys that the query may attend to.
        share: Weight on the given positions; None if none are given.
    """

    entropy: Float[Tensor, "b h m"]
    largest: Float[Tensor, "b h m"]
    keys: Float[Tensor, "b h m"]
    share: Float[Tensor, "b h m"] | None


@torch.no_grad()
def row_statistics(
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    *,
    mask: Bool[Tensor, "..."] | None = None,
    bias: Float[Tensor, "..."] | None = None,
    is_causal: bool = False,
    scale: float,
    softcap: float | None = None,
    positions: Bool[Tensor, "#b n"] | None = None,
) -> Rows:
    """Return the statistics of softmax(scale · Q Kᵀ + bias), by a Triton kernel on a GPU and by torch in blocks elsewhere.

    Args:
        query: Queries.
        key: Keys; groups of query heads may share a head.
        mask: True where a query may attend, broadcastable to `b h m n`.
        bias: Added to the scores, broadcastable to `b h m n`.
        is_causal: Whether query i may attend only to keys up to i.
        scale: Factor of the dot product.
        softcap: Bound of the scaled products, before the bias: softcap · tanh(Φ / softcap).
        positions: Keys whose share of the weight is computed.
    """
    query, key = query.detach(), key.detach()
    mask, bias = (None if x is None else x.detach()[(None,) * (4 - x.ndim)] for x in (mask, bias))
    with without_autocast(query.device.type):
        if _has_kernel(query, key):
            # imported here, because a machine without a GPU may not have triton
            from bayesattn.ops.attention.statistics_triton import launch_statistics

            return launch_statistics(query, key, mask, bias, is_causal, scale, softcap, positions)
        return _in_blocks(query, key, mask, bias, is_causal, scale, softcap, positions)


def _has_kernel(query: Tensor, key: Tensor) -> bool:
    can_run = HAS_TRITON and (query.device.type == "cuda" or INTERPRETED) and not torch.compiler.is_compiling()
    is_known = query.dtype in (torch.float32, torch.bfloat16, torch.float16) and query.shape[-1] <= LARGEST_HEAD
    return can_run and is_known and query.numel() > 0 and key.shape[2] > 0


def _in_blocks(query, key, mask, bias, is_causal, scale, softcap, positions) -> Rows:
    b, h, m, _ = query.shape
    n = key.shape[2]
    query, key_t = upcast(query) * scale, expand_heads(upcast(key), h).transpose(-2, -1)
    mask, bias = (None if x is None else x.expand(b, h, m, n) for x in (mask, bias))
    size = max(1, BLOCK_ENTRIES.get(query.device.type, BLOCK_ENTRIES["cpu"]) // max(b * h * n, 1))
    parts = []
    for first in range(0, m, size):
        rows = slice(first, first + size)
        scores = query[:, :, rows] @ key_t
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if bias is not None:
            scores = scores + upcast(bias[:, :, rows])
        allowed = None if mask is None else mask[:, :, rows]
        if is_causal:
            at = torch.arange(max(m, n), device=query.device)
            triangle = at[:n] <= at[:m][rows, None]
            allowed = triangle if allowed is None else allowed & triangle
        parts.append(score_statistics(scores, allowed, positions))
    if not parts:
        parts = [score_statistics(query.new_zeros((b, h, 0, n)), None, positions)]
    entropy = torch.cat([part.entropy for part in parts], dim=-1)
    largest = torch.cat([part.largest for part in parts], dim=-1)
    keys = torch.cat([part.keys for part in parts], dim=-1)
    share = None if positions is None else torch.cat([part.share for part in parts if part.share is not None], dim=-1)
    return Rows(entropy, largest, keys, share)


@torch.no_grad()
def score_statistics(
    scores: Float[Tensor, "b h m n"],
    mask: Bool[Tensor, "..."] | None = None,
    positions: Bool[Tensor, "#b n"] | None = None,
) -> Rows:
    """Return the statistics of softmax(Φ) for given scores."""
    weights = masked_softmax(upcast(scores.detach()), mask)
    n = weights.shape[-1]
    keys = weights.new_full(weights.shape[:-1], n)
    if mask is not None:
        keys = mask.expand_as(weights).sum(dim=-1).to(weights.dtype)
    largest = weights.amax(dim=-1) if n else keys
    share = None if positions is None else (weights * positions[:, None, None]).sum(dim=-1)
    return Rows(torch.special.entr(weights).sum(dim=-1), largest, keys, share)
