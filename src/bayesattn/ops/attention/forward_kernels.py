"""Triton kernels of the forward pass. README.md derives them.

Conventions: sizes M N D, tiles BM BN BD; `rm`, `rn` are the row (query) and column (key) indices of a tile; scores,
noise and log-sum-exps are in units of log 2.
"""

import triton
import triton.language as tl

from bayesattn.ops.attention.band_sums import key_blocks
from bayesattn.ops.common.draws import LN_2, LOG2_E, dropout_tile, fast_exp2, noise_tile
from bayesattn.ops.common.tiles import FULL_MASK, KEY_MASK, allowed_entries, block_and_head, edge_start, load_tile


@triton.jit
def _forward_range(
    acc, top, total, clean, first, second, q, k_base, v_base, mask, mu, seed, rm, low, high, split, gap, head,
    batch, scale, strength, dropped, kept, M, N, D, DV, stride_kn, stride_vn, stride_mm, stride_mn, window,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, WEIBULL: tl.constexpr, CLEAN: tl.constexpr,
    MOMENTS: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, HAS_MASK: tl.constexpr, CHECK: tl.constexpr,
    WINDOW: tl.constexpr, EVEN_D: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Add the key blocks of [low, high), shifted by `edge_start`, to the running output and sums of a query block."""
    rd, rv = tl.arange(0, BD), tl.arange(0, BDV)
    for at in tl.range(low, high, BN, num_stages=STAGES or None):  # type: ignore[misc]
        start = edge_start(at, split, gap, SPLIT)
        rn = start + tl.arange(0, BN)
        k = load_tile(k_base, rn, stride_kn, rd, N, D, not CHECK, EVEN_D)
        products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if MOMENTS:
            deviation = products * (scale * LN_2) - tl.load(mu + rn, mask=rn < N, other=0.0)[None, :]
        if CHECK:
            allowed = allowed_entries(rm, rn, M, N, mask, stride_mm, stride_mn, CAUSAL, HAS_MASK, window, WINDOW)
            products = tl.where(allowed, products, -float("inf"))
            if MOMENTS:
                deviation = tl.where(allowed, deviation, 0.0)
        if MOMENTS:
            first += tl.sum(deviation, 1)
            second += tl.sum(deviation * deviation, 1)
        # both sums share the maximum of the clean scores, because the noise is bounded
        new_top = tl.maximum(top, tl.max(products, 1) * scale)
        pivot = tl.where(new_top == -float("inf"), 0.0, new_top) if CHECK else new_top
        shrink = fast_exp2(top - pivot, FAST)
        centered = products * scale - pivot[:, None]
        noise = noise_tile(seed, rm, start, head, batch, strength, BM, BN, WEIBULL, FAST)
        weights = fast_exp2(centered + noise, FAST)
        total = total * shrink + tl.sum(weights, 1)
        if CLEAN:
            clean = clean * shrink + tl.sum(fast_exp2(centered, FAST), 1)
        if DROPOUT:
            # only the weights of the output: the normalizing sum is over all
            weights *= dropout_tile(seed, rm, start, head, batch, dropped, kept, BM, BN)
        v = load_tile(v_base, rn, stride_vn, rv, N, DV, not CHECK, EVEN_D)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        top = new_top
    return acc, top, total, clean, first, second


@triton.jit
def forward_kernel(
    Q, K, V, MASK, MU, SEED, OUT, LSE, CLEAN_LSE, FIRST, SECOND, QUERY_SUMS, ROW_SUMS,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_mb, stride_mh, stride_mm, stride_mn, stride_ub, stride_uh,
    H, GROUP, M, N, D, DV, window, seed_stride, scale, strength, dropped, kept,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, WEIBULL: tl.constexpr, CLEAN: tl.constexpr,
    MOMENTS: tl.constexpr, SUMS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DROPOUT: tl.constexpr,
    HAS_MASK: tl.constexpr, EVEN_N: tl.constexpr, EVEN_D: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
    SUM_BLOCK: tl.constexpr, EDGE_STAGES: tl.constexpr,
):  # fmt: skip
    """Compute output, noisy and clean log-sum-exp (and the lognormal KL's moments) of a block of queries.

    With SUMS, also store per SUM_BLOCK rows: the sums of the queries and of the clean log-sum-exps, and the number of rows
    with a key.
    """
    block, bh, _blocks = block_and_head(M, BM, CAUSAL)  # type: ignore[misc]
    head, batch = bh % H, bh // H
    rm = block * BM + tl.arange(0, BM)
    rd, rv = tl.arange(0, BD), tl.arange(0, BDV)
    wide_b, wide_h = batch.to(tl.int64), head.to(tl.int64)
    q = load_tile(Q + wide_b * stride_qb + wide_h * stride_qh, rm, stride_qm, rd, M, D, False, EVEN_D)
    parts: tl.constexpr = BM // SUM_BLOCK
    part = block * parts + tl.arange(0, parts)
    place, is_part = bh.to(tl.int64) * tl.cdiv(M, SUM_BLOCK) + part, part < tl.cdiv(M, SUM_BLOCK)
    if SUMS:
        sums = tl.sum(tl.reshape(q.to(tl.float32), [parts, SUM_BLOCK, BD]), 1)
        tl.store(QUERY_SUMS + place[:, None] * D + rd[None, :], sums, mask=is_part[:, None] & (rd < D)[None, :])
    k_base = K + wide_b * stride_kb + (wide_h // GROUP) * stride_kh
    v_base = V + wide_b * stride_vb + (wide_h // GROUP) * stride_vh
    mask = MASK + wide_b * stride_mb + wide_h * stride_mh
    mu = MU + wide_b * stride_ub + wide_h * stride_uh
    seed = tl.load(SEED + batch * seed_stride)
    # with one seed per example, the noise must not depend on the position in the batch
    noise_batch = tl.where(seed_stride == 0, batch, 0)
    acc = tl.zeros([BM, BDV], tl.float32)
    top = tl.full([BM], -float("inf"), tl.float32)
    total, clean = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    first, second = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    begin, easy, rest, end = key_blocks(  # type: ignore[misc]
        mask, stride_mn, block, N, window, BM, BN, SUM_BLOCK, CAUSAL, WINDOW, HAS_MASK, EVEN_N
    )
    if HAS_MASK != FULL_MASK:
        acc, top, total, clean, first, second = _forward_range(
            acc, top, total, clean, first, second, q, k_base, v_base, mask, mu, seed, rm, easy, rest, 0, 0, head,
             noise_batch, scale * LOG2_E, strength, dropped, kept, M, N, D, DV, stride_kn, stride_vn, stride_mm,
            stride_mn, window,
            BM, BN, BD, BDV, WEIBULL, CLEAN, MOMENTS, CAUSAL, DROPOUT, HAS_MASK, False, WINDOW, EVEN_D, FAST, PRECISION,
            False, 0,
        )  # fmt: skip
    if HAS_MASK or CAUSAL or not EVEN_N:
        has_two_ends: tl.constexpr = WINDOW or HAS_MASK == KEY_MASK
        low, gap = (begin, rest - easy) if has_two_ends else (rest, 0)
        acc, top, total, clean, first, second = _forward_range(
            acc, top, total, clean, first, second, q, k_base, v_base, mask, mu, seed, rm, low, end - gap, easy, gap, head,
             noise_batch, scale * LOG2_E, strength, dropped, kept, M, N, D, DV, stride_kn, stride_vn, stride_mm,
            stride_mn, window,
            BM, BN, BD, BDV, WEIBULL, CLEAN, MOMENTS, CAUSAL, DROPOUT, HAS_MASK, True, WINDOW, EVEN_D, FAST, PRECISION,
            has_two_ends, EDGE_STAGES,
        )  # fmt: skip
    has_key = top > -float("inf")
    out = acc / tl.where(has_key, total, 1.0)[:, None]
    row = bh.to(tl.int64) * M + rm
    inside = rm < M
    # queries before heads, the order that models need
    first_row = (wide_b * M + block * BM) * H + head
    pointers = OUT + first_row * DV + (tl.arange(0, BM) * (H * DV))[:, None] + rv[None, :]
    tl.store(pointers, out.to(OUT.dtype.element_ty), mask=inside[:, None] & (rv < DV)[None, :])
    # +inf makes every weight of a row without keys 0 in the backward pass
    tl.store(LSE + row, tl.where(has_key, top + tl.log2(tl.where(has_key, total, 1.0)), float("inf")), mask=inside)
    if CLEAN:
        lse = tl.where(has_key, (top + tl.log2(tl.where(has_key, clean, 1.0))) * LN_2, 0.0)
        tl.store(CLEAN_LSE + row, lse, mask=inside)
        if SUMS:
            of_lse = tl.sum(tl.reshape(tl.where(inside, lse, 0.0), [parts, SUM_BLOCK]), 1)
            rows = tl.sum(tl.reshape(tl.where(inside & has_key, 1.0, 0.0), [parts, SUM_BLOCK]), 1)
            tl.store(ROW_SUMS + 2 * place, of_lse, mask=is_part)
            tl.store(ROW_SUMS + 2 * place + 1, rows, mask=is_part)
    if MOMENTS:
        tl.store(FIRST + row, first, mask=inside)
        tl.store(SECOND + row, second, mask=inside)


@triton.jit
def columns_kernel(
    K, QUERY_SUMS, COLUMNS, stride_kb, stride_kh, stride_kn, stride_sum, H, GROUP, N, D, scale,
    BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute the column sums T_j = scale · k_j · Σ_i q_i without the scores."""
    block, bh, _blocks = block_and_head(N, BN)  # type: ignore[misc]
    rn, rd = block * BN + tl.arange(0, BN), tl.arange(0, BD)
    batch, key_head = (bh // H).to(tl.int64), ((bh % H) // GROUP).to(tl.int64)
    k = load_tile(K + batch * stride_kb + key_head * stride_kh, rn, stride_kn, rd, N, D, False, False).to(tl.float32)
    rows = tl.where(stride_sum == 0, 1, N)
    sums = load_tile(QUERY_SUMS + bh.to(tl.int64) * rows * D, rn, stride_sum, rd, N, D, False, False)
    tl.store(COLUMNS + bh.to(tl.int64) * N + rn, tl.sum(k * sums, 1) * scale, mask=rn < N)
