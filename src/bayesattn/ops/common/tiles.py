"""Load tiles of queries, keys, masks and rows inside a kernel, and find out which entries exist."""

import triton
import triton.language as tl

# values of HAS_MASK: 0, FULL_MASK, or KEY_MASK if all queries have the same keys
FULL_MASK, KEY_MASK = tl.constexpr(1), tl.constexpr(2)


# keys of a mask read at once
MASK_CHUNK = tl.constexpr(1024)


@triton.jit
def block_and_head(length, BLOCK: tl.constexpr, LAST_FIRST: tl.constexpr = False):  # type: ignore[assignment]
    """Return a program's block and head, and the number of blocks per head.

    All programs are on one axis, blocks first, because the other axes of a grid end at 65,535 and there may be more heads.
    With LAST_FIRST the last block of a head starts first: below a diagonal it is the longest, and short ones fill the end.
    """
    program, blocks = tl.program_id(0), tl.cdiv(length, BLOCK)
    block = program % blocks
    if LAST_FIRST:
        block = blocks - 1 - block
    return block, program // blocks, blocks


@triton.jit
def key_range(mask, stride, N):
    """Return the first key that exists, the one after the last, and whether all in between exist; 0, 0 if none does."""
    lows, highs = tl.full([MASK_CHUNK], 2147483647, tl.int32), tl.zeros([MASK_CHUNK], tl.int32)
    counts = tl.zeros([MASK_CHUNK], tl.int32)
    for start in range(0, N, MASK_CHUNK):
        rn = start + tl.arange(0, MASK_CHUNK)
        exists = tl.load(mask + rn * stride, mask=rn < N, other=0) != 0
        lows = tl.where(exists, tl.minimum(lows, rn), lows)
        highs = tl.where(exists, rn + 1, highs)
        counts += exists.to(tl.int32)
    high = tl.max(highs, 0)
    low = tl.minimum(tl.min(lows, 0), high)
    return low, high, tl.sum(counts, 0) == high - low


@triton.jit
def edge_start(at, split, gap, SPLIT: tl.constexpr):
    """Return the start of a tile at either end of a range: positions from `split` on are moved by `gap`."""
    if SPLIT:
        at += tl.where(at < split, 0, gap)
    return at


@triton.jit
def saturated(x, DTYPE: tl.constexpr):
    """Cast a gradient to DTYPE; float16, the only type whose range a KL's gradients may exceed, saturates."""
    if DTYPE == tl.float16:  # noqa: SIM300  (not a constant but a parameter)
        x = tl.clamp(x, -65504.0, 65504.0, tl.PropagateNan.ALL)
    return x.to(DTYPE)


@triton.jit
def in_band(rm, rn, window, WINDOW: tl.constexpr):
    """Return which entries are not in the future and, with WINDOW, are within their query's window."""
    inside = rm[:, None] >= rn[None, :]
    if WINDOW:
        inside = inside & (rm[:, None] < rn[None, :] + window)
    return inside


@triton.jit
def allowed_entries(
    rm, rn, M, N, mask, stride_mm, stride_mn, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, window=0,
    WINDOW: tl.constexpr = False,  # type: ignore[assignment]  (what Triton makes of it is one)
):  # fmt: skip
    """Return which entries of a tile exist: in range, not in the future, within the window, and not masked."""
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
    """Load a [rows, columns] tile, with 0 outside."""
    pointers = base + rows[:, None] * stride + columns[None, :]
    if EVEN_ROWS:
        if EVEN_D:
            return tl.load(pointers)
        return tl.load(pointers, mask=(columns < D)[None, :], other=0.0)
    return tl.load(pointers, mask=(rows < limit)[:, None] & (columns < D)[None, :], other=0.0)


@triton.jit
def load_rows(ROWS, row, inside, other, USE: tl.constexpr, EVEN: tl.constexpr = False):  # type: ignore[assignment]
    """Load one number per row, or return zeros without USE; with EVEN every row exists."""
    if not USE:
        return tl.zeros_like(inside).to(tl.float32)
    elif EVEN:
        return tl.load(ROWS + row)
    else:
        return tl.load(ROWS + row, mask=inside, other=other)
