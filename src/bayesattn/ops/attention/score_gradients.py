"""Squared gradients of attention scores, summed over the queries of each key, from one output gradient.

With P = softmax(Φ) and O = P V, a gradient dO of the output gives the gradient of every score

    dΦ_ij = P_ij (dO_i · v_j − δ_i),    δ_i = Σ_j P_ij (dO_i · v_j)

A flash-style backward pass forms dΦ as well, and adds it up into the gradients of Q and K. Here Σ_i dΦ_ij² is wanted. The
scores are computed again in blocks of queries, so no m × n array exists at any time.
"""

from collections.abc import Iterator
from itertools import product

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bayesattn.ops.attention.masking import masked_softmax
from bayesattn.ops.attention.reference import expand_heads
from bayesattn.precision import upcast

# entries of a block of scores: small enough for a CPU's cache, large enough for its matrix products
BLOCK_ENTRIES = {"cpu": 2**17, "cuda": 2**25}


@torch.no_grad()
def squared_score_gradients(
    grad_output: Float[Tensor, "b h m dv"],
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    value: Float[Tensor, "b hk n dv"],
    *,
    mask: Bool[Tensor, "*#bh #m n"] | None = None,
    bias: Float[Tensor, "..."] | None = None,
    is_causal: bool = False,
    scale: float,
    softcap: float | None = None,
) -> Float[Tensor, "b h n"]:
    """Return Σ_i dΦ_ij² of every key, in float32 or better.

    Args:
        grad_output: Gradient of a number in the attention output.
        query: Queries.
        key: Keys; their heads may be shared by groups of query heads.
        value: Values.
        mask: True where a query may attend.
        bias: Added to the scores.
        is_causal: Query i attends to keys up to i.
        scale: Factor of the dot product.
        softcap: Bound of the scaled products: softcap · tanh(Φ / softcap).
    """
    b, h, m, _ = query.shape
    n = key.shape[2]
    query, grad_output = upcast(query) * scale, upcast(grad_output)
    key_t, value_t = (expand_heads(upcast(x), h).transpose(-2, -1) for x in (key, value))
    mask, bias = (None if x is None else x.expand(b, h, m, n) for x in (mask, bias))
    total = query.new_zeros((b, h, n))
    for part in _blocks(b, h, m, n, BLOCK_ENTRIES.get(query.device.type, BLOCK_ENTRIES["cpu"])):
        keys, rows = part[:2], part[2]
        scores = query[part] @ key_t[keys]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if bias is not None:
            scores += upcast(bias[part])
        allowed = None if mask is None else mask[part]
        if is_causal:
            positions = torch.arange(max(m, n), device=query.device)
            triangle = positions[:n] <= positions[:m][rows, None]
            allowed = triangle if allowed is None else allowed & triangle
        weights = masked_softmax(scores, allowed)
        products = grad_output[part] @ value_t[keys]
        delta = (weights * products).sum(dim=-1, keepdim=True)
        total[keys] += products.sub_(delta).mul_(weights).square_().sum(dim=-2)
    return total


def _blocks(b: int, h: int, m: int, n: int, limit: int) -> Iterator[tuple[slice, slice, slice]]:
    """Yield examples, heads and queries whose scores together are about `limit` entries."""
    rows = max(1, min(m, limit // max(n, 1)))
    heads = max(1, min(h, limit // max(rows * n, 1)))
    examples = max(1, min(b, limit // max(h * rows * n, 1))) if heads == h else 1
    for i, j, k in product(range(0, b, examples), range(0, h, heads), range(0, m, rows)):
        yield slice(i, i + examples), slice(j, j + heads), slice(k, k + rows)
