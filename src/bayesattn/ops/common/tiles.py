"""Tiles of queries, keys, masks and rows inside a kernel: loading, and which entries exist."""

import triton
import triton.language as tl

# HAS_MASK: 0, FULL_MASK, or KEY_MASK where all queries have the same keys
FULL_MASK, KEY_MASK = tl.constexpr(1), tl.constexpr(2)


@triton.jit
def block_and_head(length, BLOCK: tl.constexpr):
    """Return the block and the head of a program, and the number of blocks per head.

    Programs are on one axis, blocks first: the other axes of a grid end at 65,535, and there may be more heads.
    """
    program, blocks = tl.program_id(0), tl.cdiv(length, BLOCK)
    return program % blocks, program // blocks, blocks


@triton.jit
def saturated(x, DTYPE: tl.constexpr):
    """Cast a gradient; float16, the only type that a KL's gradients may exceed, saturates at its largest number."""
    if DTYPE == tl.float16:  # noqa: SIM300  (not a constant but a parameter)
        x = tl.clamp(x, -65504.0, 65504.0, tl.PropagateNan.ALL)
    return x.to(DTYPE)


@triton.jit
def in_band(rm, rn, window, WINDOW: tl.constexpr):
    """Which entries are not in the future and, if there is a window, within the window of their query."""
    inside = rm[:, None] >= rn[None, :]
    if WINDOW:
        inside = inside & (rm[:, None] < rn[None, :] + window)
    return inside


@triton.jit
def allowed_entries(
    rm, rn, M, N, mask, stride_mm, stride_mn, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, window=0,
    WINDOW: tl.constexpr = False,  # type: ignore[assignment]  (what Triton makes of it is one)
):  # fmt: skip
    """Which entries of a tile exist: inside, not in the future, not before the window, not masked."""
    allowed = (rn < N)[None, :] & (rm < M)[:, None]
    if CAUSAL:
        allowed = allowed & in_band(rm, rn, window, WINDOW)
    if HAS_MASK == KEY_MASK:
        allowed = allowed & (tl.load(mask + rn * stride_mn, mask=rn < N, other=0) != 0)[None, :]
    elif HAS_MASK:
        allowed = allowed & (tl.load(mask + rm[:, None] * stride_mm + rn[None, :] * stride_mn, mask=allowed, other=0) != 0)
    return allowed


@triton.jit
def load_tile(base, rows, stride, columns, limit, D, EVEN_ROWS: tl.constexpr, EVEN_D: tl.constexpr):
    """Load a [rows, columns] tile; 0 outside."""
    pointers = base + rows[:, None] * stride + columns[None, :]
    if EVEN_ROWS:
        if EVEN_D:
            return tl.load(pointers)
        return tl.load(pointers, mask=(columns < D)[None, :], other=0.0)
    return tl.load(pointers, mask=(rows < limit)[:, None] & (columns < D)[None, :], other=0.0)


@triton.jit
def load_rows(ROWS, row, inside, other, USE: tl.constexpr):
    """Load one number per row, or zeros where there is nothing to load."""
    if USE:
        return tl.load(ROWS + row, mask=inside, other=other)
    else:
        return tl.zeros_like(inside).to(tl.float32)
