"""Triton kernels of the lognormal KL from small matrices (`gram.py`): forward and backward, one pass over each side.

A side has rows x_r with one number e_r per row: queries with x_i, or keys with μ_j. Its moments per head are

    Σ x xᵀ, Σ x, Σ e x, Σ 1, Σ e, Σ e²

Those of the keys are scaled and ordered so that their dot product with those of the queries is Σ_ij (Φ_ij − μ_j − x_i)²:

    s² Σ k kᵀ, −2s Σ μ k, −2s Σ k, Σ μ², 2 Σ μ, Σ 1                  s: scale of the scores

Conventions: sizes N (rows) and D, tiles BN and BD; `rn`, `rd` are the indices of a tile.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float
from torch import Tensor

from bayesattn.ops.attention.launch import aligned, blocks_of, padded, rows_first
from bayesattn.ops.common.launch import prepared
from bayesattn.ops.common.tiles import load_rows, load_tile, saturated

# numbers after the matrix and the two vectors
_SCALARS = 3


@triton.jit
def moments_kernel(
    X, E, MASK, MOMENTS, stride_xb, stride_xh, stride_xn, stride_eb, stride_eh, stride_en, stride_mb, stride_mn,
    H, GROUP, N, D, scale,
    BN: tl.constexpr, BD: tl.constexpr, HAS_MASK: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute all moments of one head, without masked rows."""
    batch, head = (tl.program_id(0) // H).to(tl.int64), (tl.program_id(0) % H).to(tl.int64)
    rd = tl.arange(0, BD)
    x_base, e_base = X + batch * stride_xb + (head // GROUP) * stride_xh, E + batch * stride_eb + head * stride_eh
    matrix = tl.zeros([BD, BD], tl.float32)
    first, weighted = tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
    count, total, squares = tl.zeros([BN], tl.float32), tl.zeros([BN], tl.float32), tl.zeros([BN], tl.float32)
    for start in range(0, N, BN):
        rn = start + tl.arange(0, BN)
        inside = rn < N
        if HAS_MASK:
            inside = inside & (tl.load(MASK + batch * stride_mb + rn * stride_mn, mask=inside, other=0) != 0)
        pointers = x_base + rn[:, None] * stride_xn + rd[None, :]
        x = tl.load(pointers, mask=inside[:, None] & (rd < D)[None, :], other=0.0)
        e = load_rows(e_base, rn * stride_en, inside, 0.0, True)
        matrix += tl.dot(tl.trans(x), x, input_precision="ieee")
        wide = x.to(tl.float32)
        first += tl.sum(wide, 0)
        weighted += tl.sum(wide * e[:, None], 0)
        count += inside.to(tl.float32)
        total += e
        squares += e * e
    n, e1, e2 = tl.sum(count, 0), tl.sum(total, 0), tl.sum(squares, 0)
    if KEYS:
        matrix *= scale * scale
        first, weighted = -2.0 * scale * weighted, -2.0 * scale * first
        n, e1, e2 = e2, 2.0 * e1, n
    out = MOMENTS + tl.program_id(0).to(tl.int64) * (D * D + 2 * D + 3)
    tl.store(out + rd[:, None] * D + rd[None, :], matrix, mask=(rd < D)[:, None] & (rd < D)[None, :])
    tl.store(out + D * D + rd, first, mask=rd < D)
    tl.store(out + D * D + D + rd, weighted, mask=rd < D)
    scalars = out + D * D + 2 * D
    tl.store(scalars, n)
    tl.store(scalars + 1, e1)
    tl.store(scalars + 2, e2)


@triton.jit
def moments_gradient_kernel(
    X, E, MASK, OTHER, GRAD, GRAD_X, GRAD_E,
    stride_xb, stride_xh, stride_xn, stride_eb, stride_eh, stride_en, stride_mb, stride_mn, stride_gb, stride_gh, stride_gn,
    stride_rate, H, GROUP, N, D, blocks, scale,
    BN: tl.constexpr, BD: tl.constexpr, HAS_MASK: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a block of rows and of their numbers from the moments of the other side."""
    block, bh = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    batch, head = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    rn, rd = block * BN + tl.arange(0, BN), tl.arange(0, BD)
    inside = rn < N
    x = load_tile(X + batch * stride_xb + (head // GROUP) * stride_xh, rn, stride_xn, rd, N, D, False, False)
    e = load_rows(E + batch * stride_eb + head * stride_eh, rn * stride_en, inside, 0.0, True)
    other = OTHER + bh.to(tl.int64) * (D * D + 2 * D + 3)
    matrix = tl.load(other + rd[:, None] * D + rd[None, :], mask=(rd < D)[:, None] & (rd < D)[None, :], other=0.0)
    first = tl.load(other + D * D + rd, mask=rd < D, other=0.0)
    second = tl.load(other + D * D + D + rd, mask=rd < D, other=0.0)
    scalars = other + D * D + 2 * D
    n, e1, e2 = tl.load(scalars), tl.load(scalars + 1), tl.load(scalars + 2)
    if KEYS:
        # the other side is queries, whose moments lack the factors
        matrix *= scale * scale
        constant, slope = -2.0 * scale * second, -2.0 * scale * first
        shift, curvature = 2.0 * e1, n
    else:
        constant, slope = first, second
        shift, curvature = e1, e2
    if x.dtype == tl.bfloat16:
        # in two parts, because the terms added below may cancel most of the product
        high = matrix.to(tl.bfloat16)
        low = (matrix - high.to(tl.float32)).to(tl.bfloat16)
        product = tl.dot(x, high) + tl.dot(x, low)
    else:
        product = tl.dot(x.to(tl.float32), matrix, input_precision="ieee")
    rate = tl.load(GRAD + batch * stride_rate)
    wide = x.to(tl.float32)
    grad_x = rate * (2.0 * product + constant[None, :] + e[:, None] * slope[None, :])
    grad_e = rate * (tl.sum(wide * slope[None, :], 1) + shift + 2.0 * curvature * e)
    if HAS_MASK:
        valid = tl.load(MASK + batch * stride_mb + rn * stride_mn, mask=inside, other=0) != 0
        grad_x, grad_e = tl.where(valid[:, None], grad_x, 0.0), tl.where(valid, grad_e, 0.0)
    to = GRAD_X + batch * stride_gb + head * stride_gh + rn[:, None] * stride_gn + rd[None, :]
    tl.store(to, saturated(grad_x, GRAD_X.dtype.element_ty), mask=inside[:, None] & (rd < D)[None, :])
    tl.store(GRAD_E + bh.to(tl.int64) * N + rn, grad_e, mask=inside)


def moments(
    x: Float[Tensor, "b hx n d"],
    e: Float[Tensor, "b h n"],
    mask: Bool[Tensor, "#b 1 1 n"] | None,
    scale: float,
    *,
    of_keys: bool,
) -> Float[Tensor, "b h moments"]:
    """Return the moments of queries or keys; query heads may share a key head."""
    x = aligned(x)
    (b, h, n), d = e.shape, x.shape[-1]
    found = x.new_empty((b, h, d * d + 2 * d + _SCALARS), dtype=torch.float32)
    if found.numel():
        launch = prepared(
            moments_kernel, (b * h,), *x.stride()[:3], *e.stride(), *_mask_strides(mask, b), h, h // x.shape[1], n, d, scale,
            BN=64, KEYS=of_keys, **_constants(d, mask),
        )  # fmt: skip
        launch(x, e, e if mask is None else mask, found)
    return found


def moments_gradient(
    x: Float[Tensor, "b hx n d"],
    e: Float[Tensor, "b h n"],
    mask: Bool[Tensor, "#b 1 1 n"] | None,
    other: Float[Tensor, "b h moments"],
    grad: Float[Tensor, " b"],
    scale: float,
    *,
    of_keys: bool,
) -> tuple[Float[Tensor, "b hx n d"], Float[Tensor, "b h n"]]:
    """Return the gradients of x and e from the other side's moments and the gradient of the sum of squares."""
    x = aligned(x)
    (b, h, n), (heads, d) = e.shape, (x.shape[1], x.shape[-1])
    # gradients of query heads that share a key head are added up before rounding
    grad_x = rows_first(e, n, d, x.dtype if heads == h else torch.float32)
    grad_e = e.new_empty((b, h, n))
    if grad_e.numel():
        launch = prepared(
            moments_gradient_kernel, (blocks_of(n, 64) * b * h,), *x.stride()[:3], *e.stride(), *_mask_strides(mask, b),
            *grad_x.stride()[:3], *grad.stride(), h, h // heads, n, d, blocks_of(n, 64), scale,
            BN=64, KEYS=of_keys, **_constants(d, mask),
        )  # fmt: skip
        launch(x, e, e if mask is None else mask, other, grad, grad_x, grad_e)
    return grad_x if heads == h else grad_x.unflatten(1, (heads, -1)).sum(dim=2), grad_e


def _mask_strides(mask: Tensor | None, b: int) -> tuple[int, int]:
    return (0, 0) if mask is None else (mask.stride(0) if mask.shape[0] == b else 0, mask.stride(3))


def _constants(d: int, mask: Tensor | None) -> dict[str, Any]:
    return {"BD": padded(d), "HAS_MASK": mask is not None, "num_warps": 4 if d <= 64 else 8, "num_stages": 2}
