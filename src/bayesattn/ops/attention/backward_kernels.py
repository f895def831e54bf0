"""Triton kernels of the backward pass, which redraws the noise. README.md derives them.

Conventions are those of `forward_kernels.py`.
"""

import triton
import triton.language as tl

from bayesattn.ops.attention.band_sums import is_near, key_blocks, query_blocks
from bayesattn.ops.common.draws import LN_2, LOG2_E, dropout_tile, fast_exp2, noise_tile
from bayesattn.ops.common.tiles import (
    FULL_MASK,
    KEY_MASK,
    allowed_entries,
    block_and_head,
    edge_start,
    load_rows,
    load_tile,
    saturated,
)

# COLUMNS: 0, or how Σ_i q_i over the queries of a key is stored: a row per key (or one for all keys), or a row per block of
# keys for its whole query blocks
ROW_FOR_EACH, SUMS_OF_BLOCKS = tl.constexpr(1), tl.constexpr(2)


@triton.jit
def prepare_kernel(
    OUT, GRAD, DELTA, START_Q, GRAD_Q, M, D, DV, H, stride_gb, stride_gh, stride_gm, stride_sum, scale,
    BM: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, COLUMNS: tl.constexpr, ONE_PASS: tl.constexpr,
):  # fmt: skip
    """Compute δ_i = O_i · dO_i, the row sum of the softmax's gradient; with ONE_PASS also initialize dQ."""
    block, bh, _blocks = block_and_head(M, BM)  # type: ignore[misc]
    rm, rv = block * BM + tl.arange(0, BM), tl.arange(0, BDV)
    row, head, wide_b = bh.to(tl.int64) * M + rm, bh % H, (bh // H).to(tl.int64)
    inside = (rm < M)[:, None] & (rv < DV)[None, :]
    out = tl.load(OUT + ((wide_b * M + rm) * H + head)[:, None] * DV + rv[None, :], mask=inside, other=0.0).to(tl.float32)
    base = GRAD + (bh // H).to(tl.int64) * stride_gb + (bh % H).to(tl.int64) * stride_gh
    grad = tl.load(base + rm[:, None] * stride_gm + rv[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(DELTA + row, tl.sum(out * grad, 1), mask=rm < M)
    if ONE_PASS:
        rd = tl.arange(0, BD)
        start = tl.zeros([BM, BD], tl.float32)
        if COLUMNS:
            rows = tl.where(stride_sum == 0, 1, M)
            start = load_tile(START_Q + bh.to(tl.int64) * rows * D, rm, stride_sum, rd, M, D, False, False) * scale
        tl.store(GRAD_Q + row[:, None] * D + rd[None, :], start, mask=(rm < M)[:, None] & (rd < D)[None, :])


@triton.jit
def _first_row(batch, head, start, heads, length, step):
    """Return the index of row `start` of a head in a gradient with row stride `step`: 1, or the number of heads."""
    return batch * length * heads + head * tl.where(step == 1, length, 1) + start.to(tl.int64) * step


@triton.jit
def _grad_tile(
    q, k, v, grad, rm, rn, start_n, lse, clean_lse, delta, grad_lse, grad_first, grad_second, columns,
    mask, mu, seed, head, batch, scale, strength, dropped, kept, M, N, stride_mm, stride_mn, window,
    BM: tl.constexpr, BN: tl.constexpr, WEIBULL: tl.constexpr, CLEAN: tl.constexpr, MOMENTS: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DROPOUT: tl.constexpr, HAS_MASK: tl.constexpr, CHECK: tl.constexpr,
    NEAR: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return a tile's sampled weights after dropout, the gradient of its scores, and sums of −dμ over rows.

        dΦ = W (c dO Vᵀ − δ) + W_clean dLSE + dr₁ + 2 (Φ − μ) dr₂        c: dropout factor

    The last two terms belong to the lognormal KL; dμ is their negative. The term of the Weibull KL, dT_j of the column sums
    T_j = Σ_i Φ_ij, is the same for all queries, so it enters dQ and dK once, outside the loop. Only at the edges of a band,
    where a tile is not in a whole block, is it added per entry (NEAR).
    """
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if CHECK:
        allowed = allowed_entries(rm, rn, M, N, mask, stride_mm, stride_mn, CAUSAL, HAS_MASK, window, WINDOW)
        scores = tl.where(allowed, scores, -float("inf"))
    noise = noise_tile(seed, rm, start_n, head, batch, strength, BM, BN, WEIBULL, FAST)
    weights = fast_exp2(scores - lse[:, None] + noise, FAST)
    grad_weights = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
    if DROPOUT:
        factor = dropout_tile(seed, rm, start_n, head, batch, dropped, kept, BM, BN)
        grad_scores = weights * (grad_weights * factor - delta[:, None])
        weights *= factor
    else:
        grad_scores = weights * (grad_weights - delta[:, None])
    if CLEAN:
        grad_scores += fast_exp2(scores - clean_lse[:, None], FAST) * grad_lse[:, None]
    slopes = 0.0
    if MOMENTS:
        # computed this late so that no register holds it while the noise is drawn
        # 0 · −inf would be NaN; a maximum needs no predicate
        finite = tl.maximum(scores, -1e20) if CHECK else scores
        slope = grad_first[:, None] + 2.0 * grad_second[:, None] * (finite * LN_2 - mu[None, :])
        if CHECK:
            slope = tl.where(allowed, slope, 0.0)
        grad_scores += slope
        if q.shape[1] <= 64:
            # a thread holds rows r and r + 8 of the tensor cores' accumulator: adding these two needs no exchange
            slopes = tl.sum(tl.reshape(slope, [BM // 16, 2, 8, BN]), 1)
        else:
            # too few registers left for that
            slopes = tl.sum(slope, 0)[None, None, :]
    if NEAR:
        grad_scores += tl.where(allowed, columns[None, :], 0.0)
    return weights, grad_scores, slopes


@triton.jit
def _query_range(
    acc, q, grad, k_base, v_base, mask, mu_base, columns_base, seed, rm, low, high, split, gap, lse, clean_lse, delta,
    grad_lse, grad_first, grad_second, head, batch, scale, strength, dropped, kept, M, N, D, DV, stride_kn, stride_vn,
    stride_mm, stride_mn, window, sum_block,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, WEIBULL: tl.constexpr, CLEAN: tl.constexpr,
    NEAR: tl.constexpr, MOMENTS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DROPOUT: tl.constexpr,
    HAS_MASK: tl.constexpr, CHECK: tl.constexpr, EVEN_D: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
    SUM_BLOCK: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add the share of the key blocks of [low, high), shifted by `edge_start`, to dQ of a block of queries."""
    rd, rv = tl.arange(0, BD), tl.arange(0, BDV)
    for at in tl.range(low, high, BN, num_stages=STAGES or None):  # type: ignore[misc]
        start = edge_start(at, split, gap, SPLIT)
        rn = start + tl.arange(0, BN)
        k = load_tile(k_base, rn, stride_kn, rd, N, D, not CHECK, EVEN_D)
        v = load_tile(v_base, rn, stride_vn, rv, N, DV, not CHECK, EVEN_D)
        mu = load_rows(mu_base, rn, rn < N, 0.0, MOMENTS, not CHECK)
        columns = load_rows(columns_base, rn, rn < N, 0.0, NEAR)
        if NEAR:
            columns = tl.where(is_near(sum_block, start // SUM_BLOCK, window, SUM_BLOCK, WINDOW), columns, 0.0)
        _weights, grad_scores, _chosen = _grad_tile(
            q, k, v, grad, rm, rn, start, lse, clean_lse, delta, grad_lse, grad_first, grad_second, columns, mask, mu,
            seed, head, batch, scale, strength, dropped, kept, M, N, stride_mm, stride_mn, window,
            BM, BN, WEIBULL, CLEAN, MOMENTS, CAUSAL, WINDOW, DROPOUT, HAS_MASK, CHECK, NEAR, FAST, PRECISION,
        )  # fmt: skip
        acc = tl.dot(saturated(grad_scores, k.dtype), k, acc, input_precision=PRECISION)
    return acc


@triton.jit
def grad_query_kernel(
    Q, K, V, MASK, MU, SEED, GRAD, LSE, CLEAN_LSE, DELTA, GRAD_LSE, GRAD_FIRST, GRAD_SECOND, GRAD_COLUMNS, START_Q, GRAD_Q,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_gb, stride_gh, stride_gm, stride_mb, stride_mh, stride_mm, stride_mn, stride_ub, stride_uh, stride_sum, step_q,
    H, GROUP, M, N, D, DV, window, seed_stride, scale, strength, dropped, kept,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, WEIBULL: tl.constexpr, CLEAN: tl.constexpr,
    COLUMNS: tl.constexpr, MOMENTS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DROPOUT: tl.constexpr,
    HAS_MASK: tl.constexpr, CHECK: tl.constexpr, EVEN_D: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
    SUM_BLOCK: tl.constexpr, EDGE_STAGES: tl.constexpr,
):  # fmt: skip
    """Compute dQ of a block of queries, over all key blocks."""
    block, bh, _blocks = block_and_head(M, BM, CAUSAL)  # type: ignore[misc]
    head, batch = bh % H, bh // H
    wide_b, wide_h = batch.to(tl.int64), head.to(tl.int64)
    rm, rd, rv = block * BM + tl.arange(0, BM), tl.arange(0, BD), tl.arange(0, BDV)
    row, inside = bh.to(tl.int64) * M + rm, rm < M
    q = load_tile(Q + wide_b * stride_qb + wide_h * stride_qh, rm, stride_qm, rd, M, D, False, EVEN_D)
    grad = load_tile(GRAD + wide_b * stride_gb + wide_h * stride_gh, rm, stride_gm, rv, M, DV, False, EVEN_D)
    k_base = K + wide_b * stride_kb + (wide_h // GROUP) * stride_kh
    v_base = V + wide_b * stride_vb + (wide_h // GROUP) * stride_vh
    mask = MASK + wide_b * stride_mb + wide_h * stride_mh
    mu_base = MU + wide_b * stride_ub + wide_h * stride_uh
    columns_base = GRAD_COLUMNS + bh.to(tl.int64) * N
    seed = tl.load(SEED + batch * seed_stride)
    noise_batch = tl.where(seed_stride == 0, batch, 0)
    lse = tl.load(LSE + row, mask=inside, other=float("inf"))
    delta = tl.load(DELTA + row, mask=inside, other=0.0)
    clean_lse = load_rows(CLEAN_LSE, row, inside, 0.0, CLEAN) * LOG2_E
    grad_lse = load_rows(GRAD_LSE, row, inside, 0.0, CLEAN)
    grad_first = load_rows(GRAD_FIRST, row, inside, 0.0, MOMENTS)
    grad_second = load_rows(GRAD_SECOND, row, inside, 0.0, MOMENTS)
    acc = tl.zeros([BM, BD], tl.float32)
    sum_block = block * BM // SUM_BLOCK
    if COLUMNS == SUMS_OF_BLOCKS:
        # Σ_j dT_j k_j over the whole key blocks of a query block: a row per query block, or one for all
        place = bh.to(tl.int64) * stride_sum + (sum_block if CAUSAL else 0)
        acc += tl.load(START_Q + place * D + rd, mask=rd < D, other=0.0)[None, :]
    elif COLUMNS:
        # the same over all keys of each query; one row (stride 0) if all queries share it
        rows = tl.where(stride_sum == 0, 1, M)
        acc = load_tile(START_Q + bh.to(tl.int64) * rows * D, rm, stride_sum, rd, M, D, False, EVEN_D)
    begin, easy, rest, end = key_blocks(  # type: ignore[misc]
        mask, stride_mn, block, N, window, BM, BN, SUM_BLOCK, CAUSAL, WINDOW, HAS_MASK, not CHECK
    )
    if HAS_MASK != FULL_MASK:
        acc = _query_range(
            acc, q, grad, k_base, v_base, mask, mu_base, columns_base, seed, rm, easy, rest, 0, 0,
            lse, clean_lse, delta, grad_lse, grad_first, grad_second, head, noise_batch, scale * LOG2_E, strength, dropped,
            kept, M, N, D, DV, stride_kn, stride_vn, stride_mm, stride_mn, window, sum_block,
            BM, BN, BD, BDV, WEIBULL, CLEAN, False, MOMENTS, CAUSAL, WINDOW, DROPOUT, HAS_MASK, False, EVEN_D, FAST,
            PRECISION, SUM_BLOCK, False, 0,
        )  # fmt: skip
    if CHECK:
        has_two_ends: tl.constexpr = WINDOW or HAS_MASK == KEY_MASK
        low, gap = (begin, rest - easy) if has_two_ends else (rest, 0)
        acc = _query_range(
            acc, q, grad, k_base, v_base, mask, mu_base, columns_base, seed, rm, low, end - gap, easy, gap,
            lse, clean_lse, delta, grad_lse, grad_first, grad_second, head,
            noise_batch, scale * LOG2_E, strength, dropped, kept, M, N, D, DV, stride_kn, stride_vn, stride_mm, stride_mn,
            window, sum_block,
            BM, BN, BD, BDV, WEIBULL, CLEAN, CAUSAL and COLUMNS == SUMS_OF_BLOCKS, MOMENTS, CAUSAL, WINDOW, DROPOUT,
            HAS_MASK, True, EVEN_D, FAST, PRECISION, SUM_BLOCK, has_two_ends, EDGE_STAGES,
        )  # fmt: skip
    first = _first_row(wide_b, wide_h, block * BM, H, M, step_q)
    pointers = GRAD_Q + first * D + (tl.arange(0, BM) * (step_q * D))[:, None] + rd[None, :]
    tl.store(pointers, saturated(acc * scale, GRAD_Q.dtype.element_ty), mask=inside[:, None] & (rd < D)[None, :])


@triton.jit
def _key_range(
    acc_k, acc_v, acc_mu, k, v, q_base, grad_base, mask, mu, columns, seed, first_row, rn, start_n, low, high, split,
    gap, LSE, CLEAN_LSE, DELTA, GRAD_LSE, GRAD_FIRST, GRAD_SECOND, GRAD_Q, head, batch, scale, strength, dropped, kept,
    M, N, D, DV, stride_qm, stride_gm, stride_mm, stride_mn, window,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, WEIBULL: tl.constexpr, CLEAN: tl.constexpr,
    NEAR: tl.constexpr, MOMENTS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DROPOUT: tl.constexpr,
    HAS_MASK: tl.constexpr, CHECK: tl.constexpr, EVEN_D: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
    ONE_PASS: tl.constexpr, SUM_BLOCK: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add the share of the query blocks of [low, high), shifted by `edge_start`, to dK, dV and dμ of a block of keys."""
    rd, rv = tl.arange(0, BD), tl.arange(0, BDV)
    for at in tl.range(low, high, BM, num_stages=STAGES or None):  # type: ignore[misc]
        start = edge_start(at, split, gap, SPLIT)
        rm = start + tl.arange(0, BM)
        row, inside = first_row + rm, rm < M
        q = load_tile(q_base, rm, stride_qm, rd, M, D, not CHECK, EVEN_D)
        grad = load_tile(grad_base, rm, stride_gm, rv, M, DV, not CHECK, EVEN_D)
        lse = load_rows(LSE, row, inside, float("inf"), True, not CHECK)
        delta = load_rows(DELTA, row, inside, 0.0, True, not CHECK)
        clean_lse = load_rows(CLEAN_LSE, row, inside, 0.0, CLEAN, not CHECK) * LOG2_E
        grad_lse = load_rows(GRAD_LSE, row, inside, 0.0, CLEAN, not CHECK)
        grad_first = load_rows(GRAD_FIRST, row, inside, 0.0, MOMENTS, not CHECK)
        grad_second = load_rows(GRAD_SECOND, row, inside, 0.0, MOMENTS, not CHECK)
        near = columns
        if NEAR:
            near = tl.where(is_near(start // SUM_BLOCK, start_n // SUM_BLOCK, window, SUM_BLOCK, WINDOW), columns, 0.0)
        weights, grad_scores, slopes = _grad_tile(
            q, k, v, grad, rm, rn, start_n, lse, clean_lse, delta, grad_lse, grad_first, grad_second, near,
            mask, mu, seed, head, batch, scale * LOG2_E, strength, dropped, kept, M, N, stride_mm, stride_mn, window,
            BM, BN, WEIBULL, CLEAN, MOMENTS, CAUSAL, WINDOW, DROPOUT, HAS_MASK, CHECK, NEAR, FAST, PRECISION,
        )  # fmt: skip
        acc_v = tl.dot(tl.trans(weights.to(grad.dtype)), grad, acc_v, input_precision=PRECISION)
        grad_scores = saturated(grad_scores, q.dtype)
        acc_k = tl.dot(tl.trans(grad_scores), q, acc_k, input_precision=PRECISION)
        if ONE_PASS:
            part = tl.dot(grad_scores, k, input_precision=PRECISION) * scale
            # 32-bit offsets within a head: in this loop a 64-bit product takes as long as drawing a random number
            pointers = GRAD_Q + first_row * D + (rm[:, None] * D + rd[None, :])
            if CHECK or not EVEN_D:
                tl.atomic_add(pointers, part, mask=inside[:, None] & (rd < D)[None, :], sem="relaxed")
            else:
                tl.atomic_add(pointers, part, sem="relaxed")
        if MOMENTS:
            acc_mu += slopes
    return acc_k, acc_v, acc_mu


@triton.jit
def grad_key_kernel(
    Q, K, V, MASK, MU, SEED, GRAD, LSE, CLEAN_LSE, DELTA, GRAD_LSE, GRAD_FIRST, GRAD_SECOND,
    GRAD_COLUMNS, QUERY_SUMS, GRAD_Q, GRAD_K, GRAD_V, GRAD_MU,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_gb, stride_gh, stride_gm, stride_mb, stride_mh, stride_mm, stride_mn, stride_ub, stride_uh, stride_sum,
    step_k, step_v, H, GROUP, M, N, D, DV, window, seed_stride, scale, strength, dropped, kept,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, WEIBULL: tl.constexpr, CLEAN: tl.constexpr,
    COLUMNS: tl.constexpr, MOMENTS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DROPOUT: tl.constexpr,
    HAS_MASK: tl.constexpr, CHECK: tl.constexpr, EVEN_D: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
    ONE_PASS: tl.constexpr, SUM_BLOCK: tl.constexpr, EDGE_STAGES: tl.constexpr,
):  # fmt: skip
    """Compute dK, dV (and dμ) of a block of keys, over all query blocks of the heads that share it; with ONE_PASS also dQ.

    ONE_PASS draws the noise once instead of twice, but adds dQ atomically.
    """
    block, program, _blocks = block_and_head(N, BN)  # type: ignore[misc]
    key_heads = H // GROUP
    batch, key_head = program // key_heads, program % key_heads
    wide_b, wide_kh = batch.to(tl.int64), key_head.to(tl.int64)
    rn, rd, rv = block * BN + tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, BDV)
    k = load_tile(K + wide_b * stride_kb + wide_kh * stride_kh, rn, stride_kn, rd, N, D, not CHECK, EVEN_D)
    v = load_tile(V + wide_b * stride_vb + wide_kh * stride_vh, rn, stride_vn, rv, N, DV, not CHECK, EVEN_D)
    seed = tl.load(SEED + batch * seed_stride)
    noise_batch = tl.where(seed_stride == 0, batch, 0)
    acc_k, acc_v = tl.zeros([BN, BD], tl.float32), tl.zeros([BN, BDV], tl.float32)
    # with moments, a second loop would only add spills
    is_one_loop: tl.constexpr = CHECK and (HAS_MASK == FULL_MASK or MOMENTS)
    for member in range(0, GROUP):
        head = key_head * GROUP + member
        wide_h = head.to(tl.int64)
        first_row = (wide_b * H + wide_h) * M
        q_base, grad_base = Q + wide_b * stride_qb + wide_h * stride_qh, GRAD + wide_b * stride_gb + wide_h * stride_gh
        mask = MASK + wide_b * stride_mb + wide_h * stride_mh
        begin, easy, rest, end = query_blocks(  # type: ignore[misc]
            mask, stride_mn, block, M, N, window, BM, BN, SUM_BLOCK, CAUSAL, WINDOW, HAS_MASK, not CHECK
        )
        mu = load_rows(MU + wide_b * stride_ub + wide_h * stride_uh, rn, rn < N, 0.0, MOMENTS)
        columns = load_rows(GRAD_COLUMNS + (wide_b * H + wide_h) * N, rn, rn < N, 0.0, CAUSAL and COLUMNS == SUMS_OF_BLOCKS)
        acc_mu = tl.zeros([BM // 16 if BD <= 64 else 1, 8 if BD <= 64 else 1, BN], tl.float32)
        if CHECK:
            gap = 0 if is_one_loop else rest - easy
            acc_k, acc_v, acc_mu = _key_range(
                acc_k, acc_v, acc_mu, k, v, q_base, grad_base, mask, mu, columns, seed, first_row, rn, block * BN,
                begin, end - gap, easy, gap,
                LSE, CLEAN_LSE, DELTA, GRAD_LSE, GRAD_FIRST, GRAD_SECOND, GRAD_Q, head, noise_batch, scale, strength,
                dropped, kept, M, N, D, DV, stride_qm, stride_gm, stride_mm, stride_mn, window,
                BM, BN, BD, BDV, WEIBULL, CLEAN, CAUSAL and COLUMNS == SUMS_OF_BLOCKS, MOMENTS, CAUSAL, WINDOW, DROPOUT,
                HAS_MASK, True, EVEN_D, FAST, PRECISION, ONE_PASS, SUM_BLOCK, not is_one_loop, EDGE_STAGES,
            )  # fmt: skip
        if not is_one_loop:
            acc_k, acc_v, acc_mu = _key_range(
                acc_k, acc_v, acc_mu, k, v, q_base, grad_base, mask, mu, columns, seed, first_row, rn, block * BN,
                easy, rest, 0, 0,
                LSE, CLEAN_LSE, DELTA, GRAD_LSE, GRAD_FIRST, GRAD_SECOND, GRAD_Q, head, noise_batch, scale, strength,
                dropped, kept, M, N, D, DV, stride_qm, stride_gm, stride_mm, stride_mn, window,
                BM, BN, BD, BDV, WEIBULL, CLEAN, False, MOMENTS, CAUSAL, WINDOW, DROPOUT, HAS_MASK, False, EVEN_D, FAST,
                PRECISION, ONE_PASS, SUM_BLOCK, False, 0,
            )  # fmt: skip
        if MOMENTS:
            grad_mu = -tl.sum(tl.reshape(acc_mu, [BM // 2 if BD <= 64 else 1, BN]), 0)
            tl.store(GRAD_MU + (wide_b * H + wide_h) * N + rn, grad_mu, mask=rn < N)
    column = tl.arange(0, BN)
    first_k = _first_row(wide_b, wide_kh, block * BN, key_heads, N, step_k)
    first_v = _first_row(wide_b, wide_kh, block * BN, key_heads, N, step_v)
    inside_n = (rn < N)[:, None]
    tl.store(
        GRAD_V + first_v * DV + (column * (step_v * DV))[:, None] + rv[None, :],
        saturated(acc_v, GRAD_V.dtype.element_ty),
        mask=inside_n & (rv < DV)[None, :],
    )
    if COLUMNS:
        # dT_j Σ_i q_i over the queries of each key; a block of keys shares the sum over its whole query blocks
        for member in range(0, GROUP):
            head_row = wide_b * H + key_head * GROUP + member
            if COLUMNS == SUMS_OF_BLOCKS:
                whole = QUERY_SUMS + (head_row * stride_sum + block * BN // SUM_BLOCK) * D
                sums = tl.load(whole + rd, mask=rd < D, other=0.0)[None, :]
            else:
                sums = load_tile(
                    QUERY_SUMS + head_row * tl.where(stride_sum == 0, 1, N) * D, rn, stride_sum, rd, N, D, False, EVEN_D
                )
            acc_k += tl.load(GRAD_COLUMNS + head_row * N + rn, mask=rn < N, other=0.0)[:, None] * sums
    tl.store(
        GRAD_K + first_k * D + (column * (step_k * D))[:, None] + rd[None, :],
        saturated(acc_k * scale, GRAD_K.dtype.element_ty),
        mask=inside_n & (rd < D)[None, :],
    )
