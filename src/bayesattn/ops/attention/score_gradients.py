"""Squared gradients of attention scores, summed over the queries of each key, from one output gradient.

With P = softmax(Φ) and O = P V, a gradient dO of the output gives the gradient of every score

    dΦ_ij = P_ij (dO_i · v_j − δ_i),    δ_i = Σ_j P_ij (dO_i · v_j)

A flash-style backward pass forms dΦ as well, and adds it up into the gradients of Q and K. Here Σ_i dΦ_ij² is needed. The
scores are computed again in blocks, so no m × n array exists at any time: by Triton kernels on a GPU
(`score_gradients_triton.py`), by torch everywhere else, including calls that the kernels do not support (`why_not_kernel`).
"""

import functools
from collections.abc import Iterator
from itertools import product

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bayesattn.ops.attention.masking import masked_softmax
from bayesattn.ops.attention.reference import expand_heads
from bayesattn.ops.attention.support import HAS_TRITON, INTERPRETED
from bayesattn.precision import upcast, without_autocast

# entries of a block of scores: small enough for a CPU's cache, large enough for its matrix products
BLOCK_ENTRIES = {"cpu": 2**17, "cuda": 2**25}
# features of a head that the kernels' tiles can hold
WIDEST_HEAD = 256


@torch.no_grad()
def squared_score_gradients(
    grad_output: Float[Tensor, "b h m dv"],
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    value: Float[Tensor, "b hk n dv"],
    output: Float[Tensor, "b h m dv"] | None = None,
    *,
    mask: Bool[Tensor, "*#bh #m n"] | None = None,
    bias: Float[Tensor, "..."] | None = None,
    is_causal: bool = False,
    scale: float,
    softcap: float | None = None,
) -> Float[Tensor, "b h n"]:
    """Return Σ_i dΦ_ij² of every key, in float32 or better.

    The kernels run unless `why_not_kernel` gives a reason; all else is computed by torch, in blocks.

    Args:
        grad_output: Gradient of a number in the attention output.
        query: Queries.
        key: Keys; their heads may be shared by groups of query heads.
        value: Values.
        output: The attention output, which the kernels need: δ_i = O_i · dO_i.
        mask: True where a query may attend.
        bias: Added to the scores.
        is_causal: Query i attends to keys up to i.
        scale: Factor of the dot product.
        softcap: Bound of the scaled products: softcap · tanh(Φ / softcap).
    """
    options = {"mask": mask, "bias": bias, "is_causal": is_causal, "scale": scale, "softcap": softcap}
    if output is None or why_not_kernel(query, key, value):
        with without_autocast(query.device.type):
            return _in_blocks(grad_output, query, key, value, **options)
    from bayesattn.ops.attention import score_gradients_triton

    # under autocast a gradient, or a query behind a rotary embedding, has another type than the rest
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in (query, key, value, grad_output)))
    tensors = (x.to(dtype) for x in (grad_output, query, key, value, output))
    options["mask"], options["bias"] = _with_four_axes(mask), _with_four_axes(bias)
    return score_gradients_triton.squared_score_gradients(*tensors, **options)


def why_not_kernel(query: Tensor, key: Tensor, value: Tensor) -> str:
    """Return why the Triton kernels cannot run a call; an empty string where they can."""
    if not HAS_TRITON:
        return "triton is not installed"
    if query.device.type != "cuda" and not INTERPRETED:
        return f"the tensors are on {query.device.type}, not on a GPU"
    for x in (query, key, value):
        if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"the inputs are {x.dtype}, not float32, bfloat16 or float16"
    width = max(query.shape[-1], value.shape[-1])
    if width > WIDEST_HEAD:
        return f"the head dimension is {width}, above {WIDEST_HEAD}"
    return "there are no keys" if key.shape[2] == 0 else ""


def _with_four_axes(x: Tensor | None) -> Tensor | None:
    """Return a mask or bias with axes for batch, head, query and key, of length 1 where it is broadcast."""
    if x is None:
        return None
    x = x.reshape((1,) * (4 - x.ndim) + tuple(x.shape))
    # a padding row that is expanded to all queries is read once per block of keys
    return x[:, :, :1] if x.stride(2) == 0 else x


def _in_blocks(
    grad_output: Float[Tensor, "b h m dv"],
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    value: Float[Tensor, "b hk n dv"],
    *,
    mask: Bool[Tensor, "*#bh #m n"] | None,
    bias: Float[Tensor, "..."] | None,
    is_causal: bool,
    scale: float,
    softcap: float | None,
) -> Float[Tensor, "b h n"]:
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
