"""Sums over the queries of a key and over the keys of a query, inside a kernel, from sums over whole blocks of them.

Without a mask all keys share one sum. Below the diagonal, or in a window below it, a block of keys shares the sum over the
blocks of queries that all of its keys have in full; those are added up from one row per block. The rest are the blocks at
the edges of the band: the one on the diagonal and, with a window, one or two at its far end. There the sum is the product
of a triangle of ones and zeros with the block, on tensor cores: ones and zeros are exact in any type, so the result is, too.

Blocks have BLOCK rows, the same for queries and keys. With a window of w keys, query i has keys i − w + 1 to i.
"""

import triton
import triton.language as tl

from bayesattn.ops.common.tiles import in_band, load_tile

# block sums that are loaded at once
CHUNK = tl.constexpr(16)


@triton.jit
def add_rows(rows, low, high, rd, D, BD: tl.constexpr):
    """Return the sum of the rows [low, high) of an array with D columns."""
    sums = tl.zeros([CHUNK, BD], tl.float32)
    for start in range(low, high, CHUNK):
        r = start + tl.arange(0, CHUNK)
        sums += tl.load(rows + r[:, None] * D + rd[None, :], mask=(r < high)[:, None] & (rd < D)[None, :], other=0.0)
    return tl.sum(sums, 0)


@triton.jit
def add_numbers(numbers, low, high, stride):
    """Return the sum of the numbers [low, high)."""
    sums = tl.zeros([CHUNK * 8], tl.float32)
    for start in range(low, high, CHUNK * 8):
        r = start + tl.arange(0, CHUNK * 8)
        sums += tl.load(numbers + r * stride, mask=r < high, other=0.0)
    return tl.sum(sums, 0)


@triton.jit
def whole_query_blocks(block, blocks, window, BLOCK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Return the first and the last but one of the blocks of queries that all keys of a block have in full."""
    low, high = (block + 1 if CAUSAL else 0), blocks
    if WINDOW:
        high = tl.minimum(blocks, block + window // BLOCK)
    return low, high


@triton.jit
def whole_key_blocks(block, blocks, window, BLOCK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Return the first and the last but one of the blocks of keys that all queries of a block have in full."""
    low, high = 0, (tl.minimum(block, blocks) if CAUSAL else blocks)
    if WINDOW:
        low = tl.maximum(0, block + 1 - window // BLOCK)
    return low, high


@triton.jit
def add_near_queries(
    sums, queries, start_n, stride_qm, M, D, window,
    BN: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the queries of BN keys that are not in whole blocks: of the block on the diagonal, and at the window's end."""
    rn, rd = start_n + tl.arange(0, BN), tl.arange(0, BD)
    first = start_n // BLOCK * BLOCK
    for start in range(first, tl.minimum(M, first + BLOCK), BM):
        rm = start + tl.arange(0, BM)
        q = load_tile(queries, rm, stride_qm, rd, M, D, False, False)
        sums = tl.dot(tl.trans(in_band(rm, rn, window, WINDOW)).to(q.dtype), q, sums, input_precision=PRECISION)
    if WINDOW:
        low = first + tl.maximum(1, window // BLOCK) * BLOCK
        for start in range(low, tl.minimum(M, start_n + BN - 1 + window), BM):
            rm = start + tl.arange(0, BM)
            q = load_tile(queries, rm, stride_qm, rd, M, D, False, False)
            sums = tl.dot(tl.trans(in_band(rm, rn, window, WINDOW)).to(q.dtype), q, sums, input_precision=PRECISION)
    return sums


@triton.jit
def add_near_rows(sums, numbers, start_n, M, window, WINDOW: tl.constexpr, BLOCK: tl.constexpr):
    """The same of one number per query, for a whole block of keys."""
    rn = start_n + tl.arange(0, BLOCK)
    rm = start_n + tl.arange(0, BLOCK)
    x = tl.load(numbers + rm, mask=rm < M, other=0.0)
    sums += tl.sum(tl.where(in_band(rm, rn, window, WINDOW), x[:, None], 0.0), 0)
    if WINDOW:
        low = start_n + tl.maximum(1, window // BLOCK) * BLOCK
        for start in range(low, tl.minimum(M, start_n + BLOCK - 1 + window), BLOCK):
            rm = start + tl.arange(0, BLOCK)
            x = tl.load(numbers + rm, mask=rm < M, other=0.0)
            sums += tl.sum(tl.where(in_band(rm, rn, window, WINDOW), x[:, None], 0.0), 0)
    return sums


@triton.jit
def product_with_ones(ones, x, sums, WIDEN: tl.constexpr):
    """Return ones · x + sums for a matrix of ones and zeros and one of float32, to 16 bits or, with WIDEN, to all."""
    if WIDEN:
        sums = tl.dot(ones.to(tl.float32), x, sums, input_precision="ieee")
    else:
        ones, high = ones.to(tl.bfloat16), x.to(tl.bfloat16)
        sums = tl.dot(ones, high, tl.dot(ones, (x - high.to(tl.float32)).to(tl.bfloat16), sums))
    return sums
