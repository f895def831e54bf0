"""Triton kernels of the Weibull KL and of its gradients, for masks of keys, the causal triangle, and windows.

The formulas are those of `kl.py`. With T_j = scale · k_j · Σ_i q_i and L_j = Σ_i LSE_i over the m_j queries of key j,

    KL = Σ_j (m_j c_j − α_j P_j) + Σ_i R_i        P_j = T_j,        R_i = β exp(LSE_i)        of raw scores
                                                  P_j = T_j − L_j,  R_i = β                   of their log-softmax

over keys with a query and rows with a key. `band_sums.py` has the sums over the queries of a key and the keys of a query. As
a chain of torch operations this takes about sixty launches, longer than the attention itself on short sequences. Here it is
one kernel forward; backward it is part of the kernel that prepares the gradients anyway.
"""

import triton
import triton.language as tl

from bayesattn.ops.attention.band_sums import (
    add_near_products,
    add_near_rows,
    add_numbers,
    add_rows,
    whole_key_blocks,
    whole_query_blocks,
)
from bayesattn.ops.common.tiles import block_and_head, in_band, load_tile

HALF_LOG_TWO_PI = tl.constexpr(0.9189385332046727)


@triton.jit
def log_gamma_1p(x):
    """Return ln Γ(1 + x) for x ≥ 0: Stirling's series at x + 5, accurate in float32, and the recurrence back."""
    z = x + 5.0
    inverse = 1.0 / z
    square = inverse * inverse
    series = inverse * (1.0 / 12.0 - square * (1.0 / 360.0 - square * (1.0 / 1260.0)))
    shifted = (z - 0.5) * tl.log(z) - z + HALF_LOG_TWO_PI + series
    return shifted - tl.log((x + 1.0) * (x + 2.0) * ((x + 3.0) * (x + 4.0)))


@triton.jit
def digamma_1p(x):
    """Return ψ(1 + x) for x ≥ 0, the derivative of `log_gamma_1p`."""
    z = x + 5.0
    inverse = 1.0 / z
    square = inverse * inverse
    series = 0.5 * inverse + square * (1.0 / 12.0 - square * (1.0 / 120.0 - square * (1.0 / 252.0)))
    steps = 1.0 / (x + 1.0) + 1.0 / (x + 2.0) + 1.0 / (x + 3.0) + 1.0 / (x + 4.0)
    return tl.log(z) - series - steps


@triton.jit
def key_term(alpha, log_alpha, slope, constant):
    """Return c of a key, as in `divergences.weibull_gamma_key_term`."""
    return alpha * slope + log_gamma_1p(alpha) - log_alpha + constant


@triton.jit
def key_term_slope(alpha, slope):
    """Return dc/d ln α."""
    return alpha * (slope + digamma_1p(alpha)) - 1.0


@triton.jit
def row_mass(lse, log_beta, log_cap, cap):
    """Return R = β exp(LSE) of a row, a straight line above the cap, as in `kl.capped_exp`."""
    x = lse + log_beta
    return tl.where(x < log_cap, tl.exp(tl.minimum(x, log_cap)), cap * (1.0 + x - log_cap))


@triton.jit
def row_mass_slope(lse, log_beta, log_cap):
    """Return dR/dLSE."""
    return tl.exp(tl.minimum(lse + log_beta, log_cap))


@triton.jit
def _queries_of(r, M, N, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Return the number of queries per key of a block, ignoring the key mask; 0 outside."""
    many = tl.zeros_like(r) + M
    if CAUSAL:
        many = tl.maximum(tl.minimum(M, r + window) - r, 0) if WINDOW else tl.maximum(M - r, 0)
    return tl.where(r < N, many, 0)


@triton.jit
def _load_keys(
    PRIOR, VALID, r, M, N, window, log_alpha_shift, HAS_PRIOR: tl.constexpr, HAS_VALID: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Return ln α, α and the number of queries of a block of keys; unused keys get a finite ln α, α = 0 and no queries."""
    queries = _queries_of(r, M, N, window, CAUSAL, WINDOW)
    if HAS_VALID:
        queries = tl.where(tl.load(VALID + r, mask=r < N, other=0) != 0, queries, 0)
    used = queries > 0
    log_alpha = tl.zeros_like(r).to(tl.float32) + log_alpha_shift
    if HAS_PRIOR:
        log_alpha += tl.load(PRIOR + r, mask=used, other=0.0)
    return log_alpha, tl.where(used, tl.exp(log_alpha), 0.0), queries.to(tl.float32)


@triton.jit
def weibull_kl_kernel(
    Q, K, LSE, NOISY_LSE, PRIOR, VALID, QUERY_SUMS, ROW_SUMS, KL, WEIGHT, PRODUCTS, OTHER_QUERIES, KEY_SUMS, ALPHA_SUMS,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_pb, stride_ph, stride_vb,
    H, GROUP, M, N, D, window, entries, scale, log_alpha_shift, slope, constant, beta, log_beta, log_cap, cap,
    HAS_PRIOR: tl.constexpr, HAS_VALID: tl.constexpr, RAW: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    PER: tl.constexpr, BLOCK: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the share of a block of keys and rows in the KL of one head (PER 0: sum, 1: per row, 2: per entry).

    For the backward pass, store P_j, the sum over whole query blocks, Σ α_j k_j and Σ α_j of the block's keys, and the KL's
    weight (1, 1 / rows or 1 / entries of an example). `entries` is the number of entries of a head without masked keys.
    """
    block, bh, blocks = block_and_head(tl.maximum(M, N), BLOCK)  # type: ignore[misc]
    batch, head, row = (bh // H).to(tl.int64), (bh % H).to(tl.int64), bh.to(tl.int64)
    r, rd, place = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BD), row * blocks + block
    query_blocks = tl.cdiv(M, BLOCK)
    sums_of_rows = ROW_SUMS + row * query_blocks * 2
    low, high = whole_query_blocks(block, query_blocks, window, BLOCK, CAUSAL, WINDOW)
    others = add_rows(QUERY_SUMS + row * query_blocks * D, low, high, rd, D, BD)
    tl.store(OTHER_QUERIES + place * D + rd, others, mask=rd < D)
    k = load_tile(K + batch * stride_kb + (head // GROUP) * stride_kh, r, stride_kn, rd, N, D, False, False)
    products = tl.sum(k.to(tl.float32) * others[None, :], 1)
    if CAUSAL:
        near = add_near_products(
            tl.zeros([BLOCK], tl.float32), Q + batch * stride_qb + head * stride_qh, k, block * BLOCK, stride_qm, M, D,
            window, BLOCK, BD, WINDOW, PRECISION,
        )  # fmt: skip
        products += near
    products *= scale
    if not RAW:
        lses = tl.zeros([BLOCK], tl.float32) + add_numbers(sums_of_rows, low, high, 2)
        if CAUSAL:
            lses = add_near_rows(lses, LSE + row * M, block * BLOCK, M, window, WINDOW, BLOCK)
        products -= lses
    tl.store(PRODUCTS + row * N + r, products, mask=r < N)
    valid = VALID + batch * stride_vb
    log_alpha, alpha, count = _load_keys(  # type: ignore[misc]  (the type of a jitted call is not known)
        PRIOR + batch * stride_pb + head * stride_ph, valid, r, M, N, window, log_alpha_shift, HAS_PRIOR, HAS_VALID, CAUSAL,
        WINDOW,
    )  # fmt: skip
    tl.store(ALPHA_SUMS + place, tl.sum(alpha, 0))
    tl.store(KEY_SUMS + place * D + rd, tl.sum(alpha[:, None] * k.to(tl.float32), 0), mask=rd < D)
    of_keys = tl.where(count > 0.0, count * key_term(alpha, log_alpha, slope, constant) - alpha * products, 0.0)
    if RAW:
        has_key = tl.load(NOISY_LSE + row * M + r, mask=r < M, other=float("inf")) < float("inf")
        lse = tl.load(LSE + row * M + r, mask=has_key, other=0.0)
        of_rows = tl.sum(tl.where(has_key, row_mass(lse, log_beta, log_cap, cap), 0.0), 0)
    else:
        of_rows = beta * tl.load(sums_of_rows + 2 * block + 1, mask=block < query_blocks, other=0.0)
    if PER == 0:
        divisor = 1.0
    elif PER == 1:
        divisor = H * add_numbers(sums_of_rows + 1, 0, query_blocks, 2)
    else:
        divisor = H * entries
        if HAS_VALID:
            total = tl.zeros([1024], tl.float32)
            for start in range(0, N, 1024):
                keys = start + tl.arange(0, 1024)
                is_valid = tl.load(valid + keys, mask=keys < N, other=0) != 0
                total += tl.where(is_valid, _queries_of(keys, M, N, window, CAUSAL, WINDOW), 0).to(tl.float32)
            divisor = H * tl.sum(total, 0)
    weight = 1.0 / tl.maximum(divisor, 1.0)
    tl.store(WEIGHT + bh, weight, mask=block == 0)
    tl.store(KL + place, (tl.sum(of_keys, 0) + of_rows) * weight)


@triton.jit
def weibull_prepare_kernel(
    OUT, GRAD, GRAD_KL, PRODUCTS, LSE, PRIOR, VALID, WEIGHT, KEY_SUMS, ALPHA_SUMS, DELTA, START_Q,
    GRAD_Q, GRAD_COLUMNS, GRAD_LSE, GRAD_PRIOR,
    stride_gb, stride_gh, stride_gm, stride_kl, stride_pb, stride_ph, stride_vb,
    H, M, N, D, DV, window, scale, log_alpha_shift, slope, log_beta, log_cap,
    HAS_PRIOR: tl.constexpr, HAS_VALID: tl.constexpr, RAW: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    ONE_PASS: tl.constexpr, BLOCK: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """Prepare the backward kernels: compute δ_i = O_i · dO_i, the initial values of dQ, and the gradients of the KL.

        dT_j = −α_j        dLSE_i = R_i'  or  Σ_j α_j        d ln α_j = α_j (m_j (slope + ψ(1 + α_j)) − P_j) − m_j

    dQ_i starts at scale Σ_j dT_j k_j over the whole key blocks of query i: a row per block, or one for all.
    """
    block, bh, blocks = block_and_head(tl.maximum(M, N), BLOCK)  # type: ignore[misc]
    batch, head, row = (bh // H).to(tl.int64), (bh % H).to(tl.int64), bh.to(tl.int64)
    pull = tl.load(GRAD_KL + batch * stride_kl).to(tl.float32) * tl.load(WEIGHT + bh)
    r, rd, rv = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BD), tl.arange(0, BDV)
    inside = (r < M)[:, None] & (rv < DV)[None, :]
    outs = OUT + ((batch * M + r) * H + head)[:, None] * DV + rv[None, :]
    out = tl.load(outs, mask=inside, other=0.0).to(tl.float32)
    grads = GRAD + batch * stride_gb + head * stride_gh
    grad = tl.load(grads + r[:, None] * stride_gm + rv[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(DELTA + row * M + r, tl.sum(out * grad, 1), mask=r < M)
    prior, valid = PRIOR + batch * stride_pb + head * stride_ph, VALID + batch * stride_vb
    _keys, alpha, count = _load_keys(  # type: ignore[misc]  (the type of a jitted call is not known)
        prior, valid, r, M, N, window, log_alpha_shift, HAS_PRIOR, HAS_VALID, CAUSAL, WINDOW
    )
    tl.store(GRAD_COLUMNS + row * N + r, -alpha * pull, mask=r < N)
    if HAS_PRIOR:
        products = tl.load(PRODUCTS + row * N + r, mask=r < N, other=0.0)
        grad_prior = tl.where(count > 0.0, count * key_term_slope(alpha, slope) - alpha * products, 0.0)
        tl.store(GRAD_PRIOR + row * N + r, grad_prior * pull, mask=r < N)
    low, high = whole_key_blocks(block, tl.cdiv(N, BLOCK), window, BLOCK, CAUSAL, WINDOW)
    whole = add_rows(KEY_SUMS + row * blocks * D, low, high, rd, D, BD)
    alphas = tl.zeros([BLOCK], tl.float32) + add_numbers(ALPHA_SUMS + row * blocks, low, high, 1)
    if CAUSAL:
        alphas += tl.sum(tl.where(in_band(r, r, window, WINDOW), alpha[None, :], 0.0), 1)
        if WINDOW:
            for near in range(tl.maximum(block * BLOCK - window + 1, 0) // BLOCK, tl.minimum(block, low)):
                rn = near * BLOCK + tl.arange(0, BLOCK)
                _near_keys, near_alpha, _near_count = _load_keys(  # type: ignore[misc]
                    prior, valid, rn, M, N, window, log_alpha_shift, HAS_PRIOR, HAS_VALID, CAUSAL, WINDOW
                )
                alphas += tl.sum(tl.where(in_band(r, rn, window, WINDOW), near_alpha[None, :], 0.0), 1)
    if RAW:
        alphas = row_mass_slope(tl.load(LSE + row * M + r, mask=r < M, other=0.0), log_beta, log_cap)
    tl.store(GRAD_LSE + row * M + r, alphas * pull, mask=r < M)
    if ONE_PASS:
        start = tl.zeros([BLOCK, BD], tl.float32) + (whole * (-pull * scale))[None, :]
        in_rows = (r < M)[:, None] & (rd < D)[None, :]
        tl.store(GRAD_Q + (row * M + r)[:, None] * D + rd[None, :], start, mask=in_rows)
    elif CAUSAL:
        tl.store(START_Q + (row * blocks + block) * D + rd, whole * -pull, mask=rd < D)
    else:
        tl.store(START_Q + row * D + rd, whole * -pull, mask=(rd < D) & (block == 0))
