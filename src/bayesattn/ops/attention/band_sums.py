"""Sums over the queries of a key, or the keys of a query, inside a kernel, from sums over whole blocks.

Without a causal mask all keys share one sum. Under a causal mask or a window, a block of keys shares the sum over its whole
query blocks, those that all of its keys have in full; it is added up from one stored row per block. What remains are the
near blocks at the edges of the band: one on the diagonal and, with a window, one or two at the far end. Kernels treat their
entries one by one, in tiles that are checked anyway, and never store a sum per query or key.

Blocks have BLOCK (SUM_BLOCK) rows, for queries and for keys. With a window of w keys, query i has keys i − w + 1 to i, and
query block q has all of key block k if 0 < q − k < w // BLOCK.
"""

import triton
import triton.language as tl

from bayesattn.ops.common.tiles import KEY_MASK, in_band, key_range, load_tile

# block sums loaded at once
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
    """Return the range [low, high) of query blocks that all keys of a block have in full."""
    low, high = (block + 1 if CAUSAL else 0), blocks
    if WINDOW:
        high = tl.minimum(blocks, block + window // BLOCK)
    return low, high


@triton.jit
def whole_key_blocks(block, blocks, window, BLOCK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Return the range [low, high) of key blocks that all queries of a block have in full."""
    low, high = 0, (tl.minimum(block, blocks) if CAUSAL else blocks)
    if WINDOW:
        low = tl.maximum(0, block + 1 - window // BLOCK)
    return low, high


@triton.jit
def is_near(query_block, key_block, window, BLOCK: tl.constexpr, WINDOW: tl.constexpr):
    """Return whether a query block has only part of a key block, if it has any of it."""
    near = query_block == key_block
    if WINDOW:
        near = near | (query_block - key_block >= window // BLOCK)
    return near


@triton.jit
def key_blocks(
    mask, stride_mn, block, N, window,
    BM: tl.constexpr, BN: tl.constexpr, SUM_BLOCK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    HAS_MASK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Return (begin, easy, rest, end): keys of a query block are in [begin, end), and all entries of [easy, rest) exist.

    Masked keys at either end are skipped. Bounds that are known stay constants (EVEN: N is a multiple of BN), which saves
    registers in the loops.
    """
    begin, easy, end = 0, 0, N
    if CAUSAL:
        end = tl.minimum(N, (block + 1) * BM)
    rest = end if EVEN and not CAUSAL else end // BN * BN
    if CAUSAL:
        rest = tl.minimum(rest, block * BM // SUM_BLOCK * SUM_BLOCK)
    if WINDOW:
        begin = tl.maximum(block * BM - window + 1, 0) // BN * BN
        last_sum_block = (block * BM + BM - 1) // SUM_BLOCK
        easy = tl.maximum(last_sum_block + 1 - window // SUM_BLOCK, 0) * SUM_BLOCK
    if HAS_MASK == KEY_MASK:
        low, high, is_whole = key_range(mask, stride_mn, N)  # type: ignore[misc]
        begin, end = tl.maximum(begin, low // BN * BN), tl.minimum(end, high)
        easy = tl.maximum(easy, tl.cdiv(low, BN) * BN)
        rest = tl.where(is_whole, tl.minimum(rest, high // BN * BN), begin)
    elif HAS_MASK:
        rest = begin
    if WINDOW or HAS_MASK:
        rest = tl.maximum(rest, begin)
        easy = tl.minimum(tl.maximum(easy, begin), rest)
    return begin, easy, rest, end


@triton.jit
def query_blocks(
    mask, stride_mn, block, M, N, window,
    BM: tl.constexpr, BN: tl.constexpr, SUM_BLOCK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    HAS_MASK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Return (begin, easy, rest, end): queries of a key block are in [begin, end), and all entries of [easy, rest) exist.

    A block without a key has no queries. EVEN: no band, no mask, and all blocks are full.
    """
    begin, easy, end = 0, 0, M
    rest = M if EVEN else M // BM * BM
    sum_block = block * BN // SUM_BLOCK
    if CAUSAL:
        begin = block * BN // BM * BM
        easy = (sum_block + 1) * SUM_BLOCK
    if WINDOW:
        end = tl.minimum(M, (block + 1) * BN - 1 + window)
        rest = tl.minimum(rest, (sum_block + window // SUM_BLOCK) * SUM_BLOCK)
    if HAS_MASK == KEY_MASK:
        rn = block * BN + tl.arange(0, BN)
        keys = tl.sum((tl.load(mask + rn * stride_mn, mask=rn < N, other=0) != 0).to(tl.int32), 0)
        end = tl.where(keys > 0, end, begin)
        rest = tl.where(keys == BN, rest, begin)
    elif HAS_MASK:
        rest = begin
    elif not EVEN:
        rest = tl.where((block + 1) * BN <= N, rest, begin)
    if not EVEN:
        rest = tl.maximum(rest, begin)
        easy = tl.minimum(tl.maximum(easy, begin), rest)
    return begin, easy, rest, end


@triton.jit
def add_near_products(
    sums, queries, k, start_n, stride_qm, M, D, window, BLOCK: tl.constexpr, BD: tl.constexpr, WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add Σ_i q_i · k_j over the queries of each key in near blocks."""
    rn, rd = start_n + tl.arange(0, BLOCK), tl.arange(0, BD)
    q = load_tile(queries, rn, stride_qm, rd, M, D, False, False)
    products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    sums += tl.sum(tl.where(in_band(rn, rn, window, WINDOW), products, 0.0), 0)
    if WINDOW:
        low = start_n + tl.maximum(1, window // BLOCK) * BLOCK
        for start in range(low, tl.minimum(M, start_n + BLOCK - 1 + window), BLOCK):
            rm = start + tl.arange(0, BLOCK)
            q = load_tile(queries, rm, stride_qm, rd, M, D, False, False)
            products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            sums += tl.sum(tl.where(in_band(rm, rn, window, WINDOW), products, 0.0), 0)
    return sums


@triton.jit
def add_near_rows(sums, numbers, start_n, M, window, WINDOW: tl.constexpr, BLOCK: tl.constexpr):
    """Add the sum of one number per query over the queries of each key in near blocks."""
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
