"""Triton kernels of the Weibull KL and of its gradients: vectors in, vectors out, one launch each way.

As a chain of torch operations the same arithmetic takes some sixty launches, which cost more than the attention itself
when sequences are short. The formulas are those of `kl.py` for keys that all queries may attend to, or none:

    KL = Σ_j (m c_j − α_j T_j) + Σ_i R_i            R_i = β exp(LSE_i)  or  β + LSE_i A,   A = Σ_j α_j
"""

import triton
import triton.language as tl

HALF_LOG_TWO_PI = tl.constexpr(0.9189385332046727)


@triton.jit
def _log_gamma_1p(x):
    """Return ln Γ(1 + x) for x ≥ 0: Stirling's series at x + 5, where it has float32's precision, and back by recurrence."""
    z = x + 5.0
    inverse = 1.0 / z
    square = inverse * inverse
    series = inverse * (1.0 / 12.0 - square * (1.0 / 360.0 - square * (1.0 / 1260.0)))
    shifted = (z - 0.5) * tl.log(z) - z + HALF_LOG_TWO_PI + series
    return shifted - tl.log((x + 1.0) * (x + 2.0) * ((x + 3.0) * (x + 4.0)))


@triton.jit
def _digamma_1p(x):
    """Return ψ(1 + x) for x ≥ 0, the derivative of `_log_gamma_1p`."""
    z = x + 5.0
    inverse = 1.0 / z
    square = inverse * inverse
    series = 0.5 * inverse + square * (1.0 / 12.0 - square * (1.0 / 120.0 - square * (1.0 / 252.0)))
    steps = 1.0 / (x + 1.0) + 1.0 / (x + 2.0) + 1.0 / (x + 3.0) + 1.0 / (x + 4.0)
    return tl.log(z) - series - steps


@triton.jit
def _load_keys(PRIOR, VALID, r, N, log_alpha_shift, HAS_PRIOR: tl.constexpr, HAS_VALID: tl.constexpr):
    """Return ln α of a block of keys and which of them count; the others get ln α = 0, never −inf."""
    used = r < N
    if HAS_VALID:
        used = used & (tl.load(VALID + r, mask=used, other=0) != 0)
    log_alpha = tl.zeros_like(r).to(tl.float32) + log_alpha_shift
    if HAS_PRIOR:
        log_alpha += tl.load(PRIOR + r, mask=used, other=0.0)
    return log_alpha, used


@triton.jit
def weibull_kl_kernel(
    COLUMNS, LSE, PRIOR, VALID, KL, STATS, stride_pb, stride_ph, stride_vb, H, M, N,
    log_alpha_shift, slope, constant, beta, log_beta, log_cap, cap,
    HAS_PRIOR: tl.constexpr, HAS_VALID: tl.constexpr, RAW: tl.constexpr, PER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """KL of one head of one example, divided as asked (PER 0: sum, 1: rows, 2: entries); A, Σ LSE and the divisor aside."""
    bh = tl.program_id(0)
    batch, head = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    prior, valid = PRIOR + batch * stride_pb + head * stride_ph, VALID + batch * stride_vb
    entries, alphas, used_keys = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, N, BLOCK):
        r = start + tl.arange(0, BLOCK)
        log_alpha, used = _load_keys(prior, valid, r, N, log_alpha_shift, HAS_PRIOR, HAS_VALID)
        alpha = tl.exp(log_alpha)
        column = tl.load(COLUMNS + bh.to(tl.int64) * N + r, mask=used, other=0.0)
        key_term = alpha * slope + _log_gamma_1p(alpha) - log_alpha + constant
        entries += tl.where(used, M * key_term - alpha * column, 0.0)
        alphas += tl.where(used, alpha, 0.0)
        used_keys += tl.where(used, 1.0, 0.0)
    total_alpha, num_keys = tl.sum(alphas, 0), tl.sum(used_keys, 0)
    rows, lses = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, M, BLOCK):
        r = start + tl.arange(0, BLOCK)
        lse = tl.load(LSE + bh.to(tl.int64) * M + r, mask=r < M, other=0.0)
        lses += lse
        if RAW:
            x = lse + log_beta
            row = tl.where(x < log_cap, tl.exp(tl.minimum(x, log_cap)), cap * (1.0 + x - log_cap))
        else:
            row = beta + lse * total_alpha
        rows += tl.where(r < M, row, 0.0)
    # no key, no row: nothing counts, and the divisor is 1
    weight = tl.where(num_keys > 0.0, 1.0, 0.0)
    if PER == 1:
        weight = weight / (H * M)
    if PER == 2:
        weight = weight / tl.maximum(num_keys * (H * M), 1.0)
    tl.store(KL + bh, (tl.sum(entries, 0) + tl.sum(rows, 0)) * weight)
    tl.store(STATS + 3 * bh, total_alpha)
    tl.store(STATS + 3 * bh + 1, tl.sum(lses, 0))
    tl.store(STATS + 3 * bh + 2, weight)


@triton.jit
def weibull_kl_grad_kernel(
    GRAD, COLUMNS, LSE, PRIOR, VALID, STATS, GRAD_COLUMNS, GRAD_LSE, GRAD_PRIOR,
    stride_g, stride_pb, stride_ph, stride_vb, H, M, N, log_alpha_shift, slope, log_beta, log_cap,
    HAS_PRIOR: tl.constexpr, HAS_VALID: tl.constexpr, RAW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of the KL: dT_j = −α_j, dLSE_i = R_i', d ln α_j = α_j (m (slope + ψ(1 + α_j)) − T_j + Σ_i LSE_i) − m."""
    block, bh = tl.program_id(0), tl.program_id(1)
    batch, head, row = (bh // H).to(tl.int64), (bh % H).to(tl.int64), bh.to(tl.int64)
    total_alpha, total_lse = tl.load(STATS + 3 * bh), tl.load(STATS + 3 * bh + 1)
    grad = tl.load(GRAD + batch * stride_g).to(tl.float32) * tl.load(STATS + 3 * bh + 2)
    r = block * BLOCK + tl.arange(0, BLOCK)
    log_alpha, used = _load_keys(  # type: ignore[misc]  (the type of a jitted call is not known)
        PRIOR + batch * stride_pb + head * stride_ph, VALID + batch * stride_vb, r, N, log_alpha_shift, HAS_PRIOR, HAS_VALID
    )
    alpha = tl.exp(log_alpha)
    tl.store(GRAD_COLUMNS + row * N + r, tl.where(used, -alpha * grad, 0.0), mask=r < N)
    if HAS_PRIOR:
        column = tl.load(COLUMNS + row * N + r, mask=used, other=0.0)
        pull = M * (slope + _digamma_1p(alpha)) - column
        if not RAW:
            pull += total_lse
        tl.store(GRAD_PRIOR + row * N + r, tl.where(used, (alpha * pull - M) * grad, 0.0), mask=r < N)
    if RAW:
        lse = tl.load(LSE + row * M + r, mask=r < M, other=0.0)
        grad_row = tl.exp(tl.minimum(lse + log_beta, log_cap)) * grad
    else:
        grad_row = tl.zeros([BLOCK], tl.float32) + total_alpha * grad
    tl.store(GRAD_LSE + row * M + r, grad_row, mask=r < M)
