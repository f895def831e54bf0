"""Squared score gradients on a GPU: launches of the kernels in `score_gradient_kernels.py`. Memory is O(m + n)."""

import functools

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bayesattn.ops.attention.launch import (
    MOST_LAUNCHES,
    Layout,
    aligned,
    blocks_of,
    expanded_strides,
    kernel_constants,
    layout,
    whole_rows,
)
from bayesattn.ops.attention.score_gradient_kernels import score_columns_kernel, score_rows_kernel
from bayesattn.ops.common.launch import Launch, prepared
from bayesattn.ops.common.tape import Tape

# with more keys than this, recomputing δ for every block of keys takes longer than one more launch
MOST_KEYS = 1024


def squared_score_gradients(
    grad_output: Float[Tensor, "b h m dv"],
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    value: Float[Tensor, "b hk n dv"],
    output: Float[Tensor, "b h m dv"],
    log_sum_exp: Float[Tensor, "b h m"] | None = None,
    *,
    mask: Bool[Tensor, "#b #h #m n"] | None,
    bias: Float[Tensor, "#b #h #m #n"] | None,
    is_causal: bool,
    scale: float,
    softcap: float | None,
) -> Float[Tensor, "b h n"]:
    """Return Σ_i dΦ_ij² per key in float32; arguments as in `score_gradients.squared_score_gradients`."""
    read = whole_rows(query, key, value, output, grad_output)
    query, key, value, output, grad_output = map(aligned, read)
    b, h, m, _ = query.shape
    squares = query.new_empty((b, h, key.shape[2]), dtype=torch.float32)
    if not (b and m):
        return squares.zero_()
    lse, delta = log_sum_exp, None
    if lse is None:
        lse, delta = query.new_empty((2, b, h, m), dtype=torch.float32)
    elif key.shape[2] > MOST_KEYS:
        delta = query.new_empty((b, h, m), dtype=torch.float32)
    arrays = (query, key, value, output, grad_output, mask, bias, lse, delta, squares)
    layouts = tuple(map(layout, arrays[:8]))
    options = {"is_given": log_sum_exp is not None, "has_delta": delta is not None}
    options |= {"is_causal": is_causal, "scale": scale, "softcap": softcap}
    tape = _tape(layouts, tuple(options.values()))
    if not tape.replay(arrays):
        rows, columns = _launches(*layouts, **options)
        # kernels offset pointers before checking the switches, so none may be absent
        optional = (query if mask is None else mask, query if bias is None else bias)
        delta = lse if delta is None else delta
        with tape.recording(arrays):
            if rows is not None:
                rows(query, key, output, grad_output, *optional, lse, delta)
            columns(query, key, value, output, grad_output, *optional, lse, delta, squares)
    return squares


@functools.lru_cache(maxsize=MOST_LAUNCHES)
def _tape(layouts: tuple[Layout | None, ...], options: tuple) -> Tape:
    """Return the tape of one kind of call: the layers of a model, and its batches of one length, share it."""
    return Tape()


def _launches(
    query: Layout,
    key: Layout,
    value: Layout,
    output: Layout,
    grad: Layout,
    mask: Layout | None,
    bias: Layout | None,
    lse: Layout,
    *,
    is_given: bool,
    has_delta: bool,
    is_causal: bool,
    scale: float,
    softcap: float | None,
) -> tuple[Launch | None, Launch]:
    """Return the launch that fills δ and, unless `is_given`, LSE (None without `has_delta`), and that of the squares."""
    (b, h, m, d), (hk, n), dv = query.shape, key.shape[1:3], value.shape[-1]
    switches = {"CAPPED": softcap is not None, "HAS_BIAS": bias is not None, "CAUSAL": is_causal}
    absent = (0, 0, 0, 0)
    optional = (
        *(absent if mask is None else expanded_strides(mask, (b, h, m, n))),
        *(absent if bias is None else expanded_strides(bias, (b, h, m, n))),
    )

    def of(kernel, tiles: str, length: int, side: str, third: Layout, more: tuple[int, ...] = (), **flags: bool) -> Launch:
        constants = kernel_constants(tiles, query, value, mask, **switches)
        blocks = blocks_of(length, constants[side])
        is_checked = is_causal or mask is not None or n % constants["BN"] != 0 or m % constants["BM"] != 0
        strides = (*query.strides[:3], *key.strides[:3], *third.strides[:3], *more, *grad.strides[:3], *optional)
        return prepared(
            kernel, (blocks * b * h,), *strides, h, h // hk, m, n, d, dv, blocks, scale,
            1.0 if softcap is None else float(softcap), **constants, CHECK=is_checked, GIVEN=is_given, **flags,
        )  # fmt: skip

    rows = of(score_rows_kernel, "forward", m, "BM", output) if has_delta else None
    more = (*output.strides[:3], *lse.strides)
    return rows, of(score_columns_kernel, "score_columns", n, "BN", value, more, HAS_DELTA=has_delta)
