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
# autograd nodes that only move or copy numbers, and how many of them may lie between an output and its attention
_MOVES = ("Transpose", "Clone", "View", "Permute", "UnsafeView", "ReshapeAlias")
_FARTHEST = 6


@torch.no_grad()
def squared_score_gradients(
    grad_output: Float[Tensor, "b h m dv"],
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    value: Float[Tensor, "b hk n dv"],
    output: Float[Tensor, "b h m dv"] | None = None,
    log_sum_exp: Float[Tensor, "b h m"] | None = None,
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
        log_sum_exp: ln Σ_j exp Φ_ij, if whoever computed the output kept it (`kept_log_sum_exp`); else it is computed again.
        mask: True where a query may attend.
        bias: Added to the scores.
        is_causal: Query i attends to keys up to i.
        scale: Factor of the dot product.
        softcap: Bound of the scaled products: softcap · tanh(Φ / softcap).
    """
    options = {"mask": _with_four_axes(mask), "bias": _with_four_axes(bias), "is_causal": is_causal}
    options |= {"scale": scale, "softcap": softcap}
    if output is None or why_not_kernel(query, key, value):
        with without_autocast(query.device.type):
            return _in_blocks(grad_output, query, key, value, output, log_sum_exp, **options)
    from bayesattn.ops.attention import score_gradients_triton

    tensors = [grad_output, query, key, value, output]
    if len({x.dtype for x in tensors}) > 1:
        # under autocast a gradient, or a query behind a rotary embedding, has another type than the rest
        dtype = functools.reduce(torch.promote_types, (x.dtype for x in tensors[:4]))
        tensors = [x.to(dtype) for x in tensors]
    return score_gradients_triton.squared_score_gradients(*tensors, log_sum_exp=log_sum_exp, **options)


def kept_log_sum_exp(output: Float[Tensor, "b h m dv"]) -> Float[Tensor, "b h m"] | None:
    """Return ln Σ_j exp Φ_ij of every query, if torch's fused attention computed the output and keeps it for its gradient.

    The output may have been transposed or copied since; else, and on a torch that names things differently, None.
    """
    node = output.grad_fn
    for _ in range(_FARTHEST):
        if node is None:
            return None
        name = type(node).__name__
        if name.startswith("ScaledDotProduct"):
            kept = getattr(node, "_saved_logsumexp", None)
            kept = getattr(node, "_saved_log_sumexp", None) if kept is None else kept
            return None if kept is None else _of_queries(kept, output.shape)
        if not name.startswith(_MOVES):
            return None
        node = node.next_functions[0][0]
    return None


def _of_queries(kept: Tensor, shape: torch.Size) -> Tensor | None:
    """Return what belongs to queries: some kernels add an axis of length 1, some pad to a multiple of their block."""
    b, h, m, _ = shape
    kept = kept.squeeze(-1) if kept.ndim == 4 else kept
    return kept[..., :m] if kept.ndim == 3 and kept.shape[:2] == (b, h) and kept.shape[2] >= m else None


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
    x = x if x.ndim == 4 else x.reshape((1,) * (4 - x.ndim) + tuple(x.shape))
    # a padding row that is expanded to all queries is read once per block of keys
    return x[:, :, :1] if x.stride(2) == 0 else x


def _in_blocks(
    grad_output: Float[Tensor, "b h m dv"],
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    value: Float[Tensor, "b hk n dv"],
    output: Float[Tensor, "b h m dv"] | None,
    log_sum_exp: Float[Tensor, "b h m"] | None,
    *,
    mask: Bool[Tensor, "#b #h #m n"] | None,
    bias: Float[Tensor, "#b #h #m #n"] | None,
    is_causal: bool,
    scale: float,
    softcap: float | None,
) -> Float[Tensor, "b h n"]:
    b, h, m, _ = query.shape
    n = key.shape[2]
    total = query.new_zeros((b, h, n), dtype=torch.promote_types(query.dtype, torch.float32))
    lse, delta, keys_only = None, None, None
    if output is not None and log_sum_exp is not None:
        # a row without keys may have −inf, which would make its weights NaN; with +inf they are 0
        lse = log_sum_exp.masked_fill(log_sum_exp == -torch.inf, torch.inf).unsqueeze(-1)
        delta = (upcast(output) * grad_output).sum(dim=-1, keepdim=True)
        if mask is not None and mask.shape[2] == 1:
            # with LSE and δ at hand keys do not depend on each other: what a padded key got is removed at the end
            keys_only, mask = mask[:, :, 0], None
    mask, bias = (None if x is None else x.expand(b, h, m, n) for x in (mask, bias))
    on_tensor_cores = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    if not on_tensor_cores or len({x.dtype for x in (query, key, value, grad_output)}) > 1:
        query, key, value, grad_output = upcast(query) * scale, upcast(key), upcast(value), upcast(grad_output)
        scale = 1.0
    key_t, value_t = (expand_heads(x, h).transpose(-2, -1) for x in (key, value))
    for part in _blocks(b, h, m, n, BLOCK_ENTRIES.get(query.device.type, BLOCK_ENTRIES["cpu"])):
        keys, rows = part[:2], part[2]
        scores = _product(query[part], key_t[keys], scale)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if bias is not None:
            scores += upcast(bias[part])
        allowed = None if mask is None else mask[part]
        if is_causal:
            positions = torch.arange(max(m, n), device=query.device)
            triangle = positions[:n] <= positions[:m][rows, None]
            allowed = triangle if allowed is None else allowed & triangle
        products = _product(grad_output[part], value_t[keys])
        if lse is None or delta is None:
            weights = masked_softmax(scores, allowed)
            products -= (weights * products).sum(dim=-1, keepdim=True)
        else:
            if allowed is not None:
                scores.masked_fill_(~allowed, -torch.inf)
            weights = scores.sub_(lse[part]).exp_()
            products -= delta[part]
        total[keys] += products.mul_(weights).square_().sum(dim=-2)
    return total if keys_only is None else total.masked_fill_(~keys_only, 0.0)


def _product(
    rows: Float[Tensor, "b h m d"], columns: Float[Tensor, "b h d n"], scale: float = 1.0
) -> Float[Tensor, "b h m n"]:
    """Return scale · A B in float32 or better; half precision, which is on a GPU, is multiplied on tensor cores."""
    if rows.dtype not in (torch.bfloat16, torch.float16):
        return rows @ columns if scale == 1.0 else rows @ columns * scale
    start = rows.new_empty((1, 1, 1), dtype=torch.float32)
    found = torch.baddbmm(start, rows.flatten(0, 1), columns.flatten(0, 1), beta=0.0, alpha=scale, out_dtype=torch.float32)
    return found.unflatten(0, rows.shape[:2])


def _blocks(b: int, h: int, m: int, n: int, limit: int) -> Iterator[tuple[slice, slice, slice]]:
    """Yield examples, heads and queries whose scores together are about `limit` entries."""
    rows = max(1, min(m, limit // max(n, 1)))
    heads = max(1, min(h, limit // max(rows * n, 1)))
    examples = max(1, min(b, limit // max(h * rows * n, 1))) if heads == h else 1
    for i, j, k in product(range(0, b, examples), range(0, h, heads), range(0, m, rows)):
        yield slice(i, i + examples), slice(j, j + heads), slice(k, k + rows)
