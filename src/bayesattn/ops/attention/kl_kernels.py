"""Triton kernels of the Weibull KL and of its gradients, for calls in which all queries share their keys.

The formulas are those of `kl.py`: with T_j = scale · k_j · Σ_i q_i, one number c_j per key and m queries,

    KL = Σ_j (m c_j − α_j T_j) + Σ_i R_i            R_i = β exp(LSE_i)  or  β + LSE_i A,   A = Σ_j α_j

As a chain of torch operations this takes some sixty launches, which cost more than the attention itself when sequences
are short. Here it is one kernel forward, and the backward pass gets it with what it prepares anyway.
"""

import triton
import triton.language as tl

from bayesattn.ops.common.tiles import load_tile

HALF_LOG_TWO_PI = tl.constexpr(0.9189385332046727)
# what the forward kernel keeps per head: A, Σ_i LSE_i, and the factor by which the KL is divided
NUM_STATS = tl.constexpr(3)


@triton.jit
def log_gamma_1p(x):
    """Return ln Γ(1 + x) for x ≥ 0: Stirling's series at x + 5, where it has float32's precision, and back by recurrence."""
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
    """Return c of a key, as `divergences.weibull_gamma_key_term` has it."""
    return alpha * slope + log_gamma_1p(alpha) - log_alpha + constant


@triton.jit
def key_term_slope(alpha, slope):
    """Return dc/d ln α."""
    return alpha * (slope + digamma_1p(alpha)) - 1.0


@triton.jit
def row_mass(lse, log_beta, log_cap, cap):
    """Return R = β exp(LSE) of a row, a straight line beyond the cap, as `kl.capped_exp` has it."""
    x = lse + log_beta
    return tl.where(x < log_cap, tl.exp(tl.minimum(x, log_cap)), cap * (1.0 + x - log_cap))


@triton.jit
def row_mass_slope(lse, log_beta, log_cap):
    """Return dR/dLSE."""
    return tl.exp(tl.minimum(lse + log_beta, log_cap))


@triton.jit
def _load_keys(PRIOR, VALID, r, N, log_alpha_shift, HAS_PRIOR: tl.constexpr, HAS_VALID: tl.constexpr):
    """Return ln α of a block of keys and which of them count; the others get a finite ln α, never −inf."""
    used = r < N
    if HAS_VALID:
        used = used & (tl.load(VALID + r, mask=used, other=0) != 0)
    log_alpha = tl.zeros_like(r).to(tl.float32) + log_alpha_shift
    if HAS_PRIOR:
        log_alpha += tl.load(PRIOR + r, mask=used, other=0.0)
    return log_alpha, used


@triton.jit
def weibull_kl_kernel(
    Q, K, LSE, PRIOR, VALID, KL, STATS, COLUMNS, QUERY_SUMS, KEY_SUMS,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_pb, stride_ph, stride_vb,
    H, GROUP, M, N, D, scale, log_alpha_shift, slope, constant, beta, log_beta, log_cap, cap,
    HAS_PRIOR: tl.constexpr, HAS_VALID: tl.constexpr, RAW: tl.constexpr, PER: tl.constexpr, BLOCK: tl.constexpr,
    BD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """KL of one head of one example, divided as asked (PER 0: not, 1: by rows, 2: by entries), and what backward needs."""
    bh = tl.program_id(0)
    batch, head, row = (bh // H).to(tl.int64), (bh % H).to(tl.int64), bh.to(tl.int64)
    rd = tl.arange(0, BD)
    queries, rows, lses = tl.zeros([BLOCK, BD], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, M, BLOCK, num_stages=STAGES):
        r = start + tl.arange(0, BLOCK)
        q = load_tile(Q + batch * stride_qb + head * stride_qh, r, stride_qm, rd, M, D, False, False)
        queries += q.to(tl.float32)
        lse = tl.load(LSE + row * M + r, mask=r < M, other=0.0)
        lses += lse
        if RAW:
            rows += tl.where(r < M, row_mass(lse, log_beta, log_cap, cap), 0.0)
    query_sum, total_lse = tl.sum(queries, 0), tl.sum(lses, 0)
    entries, alphas, used_keys = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    keys = tl.zeros([BLOCK, BD], tl.float32)
    for start in tl.range(0, N, BLOCK, num_stages=STAGES):
        r = start + tl.arange(0, BLOCK)
        log_alpha, used = _load_keys(  # type: ignore[misc]  (the type of a jitted call is not known)
            PRIOR + batch * stride_pb + head * stride_ph, VALID + batch * stride_vb, r, N, log_alpha_shift,
            HAS_PRIOR, HAS_VALID,
        )  # fmt: skip
        alpha = tl.where(used, tl.exp(log_alpha), 0.0)
        k = load_tile(K + batch * stride_kb + (head // GROUP) * stride_kh, r, stride_kn, rd, N, D, False, False).to(
            tl.float32
        )
        column = tl.sum(k * query_sum[None, :], 1) * scale
        tl.store(COLUMNS + row * N + r, column, mask=r < N)
        entries += tl.where(used, M * key_term(alpha, log_alpha, slope, constant) - alpha * column, 0.0)
        alphas += alpha
        used_keys += tl.where(used, 1.0, 0.0)
        keys += alpha[:, None] * k
    total_alpha, num_keys = tl.sum(alphas, 0), tl.sum(used_keys, 0)
    mass_of_rows = tl.sum(rows, 0) if RAW else M * beta + total_lse * total_alpha
    # no key, no row: nothing counts, and the divisor is 1
    weight = tl.where(num_keys > 0.0, 1.0, 0.0)
    if PER == 1:
        weight = weight / (H * M)
    if PER == 2:
        weight = weight / tl.maximum(num_keys * (H * M), 1.0)
    tl.store(KL + bh, (tl.sum(entries, 0) + mass_of_rows) * weight)
    tl.store(STATS + NUM_STATS * bh, total_alpha)
    tl.store(STATS + NUM_STATS * bh + 1, total_lse)
    tl.store(STATS + NUM_STATS * bh + 2, weight)
    tl.store(QUERY_SUMS + row * D + rd, query_sum, mask=rd < D)
    tl.store(KEY_SUMS + row * D + rd, tl.sum(keys, 0), mask=rd < D)


@triton.jit
def weibull_prepare_kernel(
    OUT, GRAD, GRAD_KL, COLUMNS, LSE, PRIOR, VALID, STATS, KEY_SUMS, DELTA, START_Q,
    GRAD_Q, GRAD_COLUMNS, GRAD_LSE, GRAD_PRIOR,
    stride_gb, stride_gh, stride_gm, stride_kl, stride_pb, stride_ph, stride_vb,
    H, M, N, D, DV, scale, log_alpha_shift, slope, log_beta, log_cap,
    HAS_PRIOR: tl.constexpr, HAS_VALID: tl.constexpr, RAW: tl.constexpr, ONE_PASS: tl.constexpr, BLOCK: tl.constexpr,
    BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """What the backward kernels start from: δ_i = O_i · dO_i, the start of dQ, and the gradients of the KL.

        dT_j = −α_j        dLSE_i = R_i'        d ln α_j = α_j (m (slope + ψ(1 + α_j)) − T_j + Σ_i LSE_i) − m

    The sum over LSE is there only where R_i has it. dQ_i starts from scale Σ_j dT_j k_j, the same for all queries.
    """
    block, bh = tl.program_id(0), tl.program_id(1)
    batch, head, row = (bh // H).to(tl.int64), (bh % H).to(tl.int64), bh.to(tl.int64)
    total_alpha, total_lse = tl.load(STATS + NUM_STATS * bh), tl.load(STATS + NUM_STATS * bh + 1)
    pull = tl.load(GRAD_KL + batch * stride_kl).to(tl.float32) * tl.load(STATS + NUM_STATS * bh + 2)
    r, rd, rv = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BD), tl.arange(0, BDV)
    inside = (r < M)[:, None] & (rv < DV)[None, :]
    out = tl.load(OUT + (row * M + r)[:, None] * DV + rv[None, :], mask=inside, other=0.0).to(tl.float32)
    grads = GRAD + batch * stride_gb + head * stride_gh
    grad = tl.load(grads + r[:, None] * stride_gm + rv[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(DELTA + row * M + r, tl.sum(out * grad, 1), mask=r < M)
    if RAW:
        slope_of_row = row_mass_slope(tl.load(LSE + row * M + r, mask=r < M, other=0.0), log_beta, log_cap)
    else:
        slope_of_row = tl.zeros([BLOCK], tl.float32) + total_alpha
    tl.store(GRAD_LSE + row * M + r, slope_of_row * pull, mask=r < M)
    start = tl.load(KEY_SUMS + row * D + rd, mask=rd < D, other=0.0) * -pull
    if ONE_PASS:
        pointers = GRAD_Q + (row * M + r)[:, None] * D + rd[None, :]
        tl.store(
            pointers, tl.zeros([BLOCK, BD], tl.float32) + start[None, :] * scale, mask=(r < M)[:, None] & (rd < D)[None, :]
        )
    else:
        tl.store(START_Q + row * D + rd, start, mask=(rd < D) & (block == 0))
    log_alpha, used = _load_keys(  # type: ignore[misc]  (the type of a jitted call is not known)
        PRIOR + batch * stride_pb + head * stride_ph, VALID + batch * stride_vb, r, N, log_alpha_shift, HAS_PRIOR, HAS_VALID
    )
    alpha = tl.where(used, tl.exp(log_alpha), 0.0)
    tl.store(GRAD_COLUMNS + row * N + r, -alpha * pull, mask=r < N)
    if HAS_PRIOR:
        products = -tl.load(COLUMNS + row * N + r, mask=used, other=0.0)
        if not RAW:
            products += total_lse
        grad_prior = M * key_term_slope(alpha, slope) + alpha * products
        tl.store(GRAD_PRIOR + row * N + r, tl.where(used, grad_prior * pull, 0.0), mask=r < N)
