"""Triton kernels of the Weibull KL on edges, and of the inputs of the backward pass. README.md derives them.

The formulas and their arithmetic are those of dense attention (`ops/attention/kl_kernels.py`). Here c is one number per
source and head, weighted by the source's out-degree, and a row's mass comes from its log-sum-exp. Entries of [nodes, heads]
are numbered consecutively. Each program writes one number, and the sum of these is the KL.
"""

import triton
import triton.language as tl

from bayesattn.ops.attention.kl_kernels import key_term, row_mass, row_mass_slope


@triton.jit
def _weight(ROWS, weight, PER_ROW: tl.constexpr):
    """Return the factor of the KL: `weight`, with PER_ROW divided by the number of rows."""
    if PER_ROW:
        return weight / tl.maximum(tl.load(ROWS), 1).to(tl.float32)
    else:
        return weight


@triton.jit
def edge_alpha_kernel(
    LOG_PRIOR, BEGIN, ROWS, ALPHA, KL, stride_n, stride_h, ENTRIES, H, weight, log_alpha_shift, slope, constant,
    PER_ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute α of sources and heads from ln Ψ (0 for a source without edges), and a share of Σ_j outdegree_j c_j."""
    program = tl.program_id(0)
    entry = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < ENTRIES
    node, head = entry // H, entry % H
    degree = tl.load(BEGIN + node + 1, mask=inside, other=0) - tl.load(BEGIN + node, mask=inside, other=0)
    used = degree > 0
    log_alpha = tl.load(LOG_PRIOR + node * stride_n + head * stride_h, mask=used, other=0.0) + log_alpha_shift
    alpha = tl.where(used, tl.exp(log_alpha), 0.0)
    tl.store(ALPHA + entry, alpha, mask=inside)
    terms = tl.where(used, degree.to(tl.float32) * key_term(alpha, log_alpha, slope, constant), 0.0)
    tl.store(KL + program, tl.sum(terms, 0) * _weight(ROWS, weight, PER_ROW))


@triton.jit
def edge_kl_kernel(
    CLEAN_LSE, FIRST, SECOND, BEGIN, ROWS, KL, FIRST_SHARE, ENTRIES, H, weight, beta, log_beta, log_cap, cap, key_terms,
    RAW: tl.constexpr, PER_ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute a share of Σ_i R_i − s_i (+ LSE_i a_i), the part of the KL that belongs to rows.

    If α is the same everywhere, `key_terms` is the part that belongs to keys. Otherwise `key_terms` is 0, and the shares of
    `edge_alpha_kernel` come first in KL.
    """
    program = tl.program_id(0)
    entry = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < ENTRIES
    row = entry // H
    degree = tl.load(BEGIN + row + 1, mask=inside, other=0) - tl.load(BEGIN + row, mask=inside, other=0)
    has_edge = degree > 0
    lse = tl.load(CLEAN_LSE + entry, mask=has_edge, other=0.0)
    terms = -tl.load(SECOND + entry, mask=has_edge, other=0.0)
    if RAW:
        terms += row_mass(lse, log_beta, log_cap, cap)
    else:
        terms += lse * tl.load(FIRST + entry, mask=has_edge, other=0.0) + beta
    total = tl.sum(tl.where(has_edge, terms, 0.0), 0) + tl.where(program == 0, key_terms, 0.0)
    tl.store(KL + FIRST_SHARE + program, total * _weight(ROWS, weight, PER_ROW))


@triton.jit
def edge_prepare_kernel(
    OUT, GRAD, CLEAN_LSE, FIRST, GRAD_KL, ROWS, DELTA, GRAD_LSE, PULL, ENTRIES, D, weight, log_beta, log_cap,
    WITH_KL: tl.constexpr, RAW: tl.constexpr, PER_ROW: tl.constexpr, BLOCK: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute δ_i = O_i · dO_i; with the KL also pull = dKL · weight, and dLSE_i = pull R_i' (RAW) or pull a_i."""
    program = tl.program_id(0)
    entry, rd = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BD)
    inside = entry < ENTRIES
    place, mask = entry[:, None] * D + rd[None, :], inside[:, None] & (rd < D)[None, :]
    out = tl.load(OUT + place, mask=mask, other=0.0)
    grad = tl.load(GRAD + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(DELTA + entry, tl.sum(out * grad, 1), mask=inside)
    if WITH_KL:
        pull = tl.load(GRAD_KL) * _weight(ROWS, weight, PER_ROW)
        if RAW:
            grad_lse = row_mass_slope(tl.load(CLEAN_LSE + entry, mask=inside, other=0.0), log_beta, log_cap)
        else:
            grad_lse = tl.load(FIRST + entry, mask=inside, other=0.0)
        tl.store(GRAD_LSE + entry, pull * grad_lse, mask=inside)
        tl.store(PULL, pull, mask=program == 0)
