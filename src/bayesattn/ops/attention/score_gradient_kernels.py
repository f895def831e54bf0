"""Triton kernels of the squared score gradients: Σ_i dΦ_ij² per key, with dΦ_ij = P_ij (dO_i · v_j − δ_i).

There are two passes and no m × n array. The first computes the log-sum-exp of the scores and δ_i = O_i · dO_i per query. The
second computes the sums of each block of keys from these two numbers, looping over blocks of queries. If the log-sum-exp is
given, the first pass computes only δ; with few blocks of keys the second computes δ itself, so that one launch is enough.

Conventions are those of `forward_kernels.py`.
"""

import triton
import triton.language as tl

from bayesattn.ops.common.draws import LOG2_E, fast_exp2
from bayesattn.ops.common.tiles import allowed_entries, load_tile


@triton.jit
def _score_tile(
    q, k, rm, rn, mask, bias, scale, softcap, M, N, stride_mm, stride_mn, stride_am, stride_an,
    CAPPED: tl.constexpr, HAS_BIAS: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, CHECK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the scores of a tile with cap and bias; −inf where an entry does not exist."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2_E)
    if CAPPED:
        # tanh |x| = (1 − e^−2|x|) / (1 + e^−2|x|), which cannot overflow
        shrunk = tl.exp2(tl.abs(scores) * (-2.0 / softcap))
        capped = (softcap * LOG2_E) * (1.0 - shrunk) / (1.0 + shrunk)
        scores = tl.where(scores < 0.0, -capped, capped)
    if HAS_BIAS:
        inside = (rm < M)[:, None] & (rn < N)[None, :]
        added = tl.load(bias + rm[:, None] * stride_am + rn[None, :] * stride_an, mask=inside, other=0.0)
        scores += added.to(tl.float32) * LOG2_E
    if CHECK:
        allowed = allowed_entries(rm, rn, M, N, mask, stride_mm, stride_mn, CAUSAL, HAS_MASK)
        scores = tl.where(allowed, scores, -float("inf"))
    return scores


@triton.jit
def score_rows_kernel(
    Q, K, OUT, GRAD, MASK, BIAS, LSE, DELTA,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_ob, stride_oh, stride_om,
    stride_gb, stride_gh, stride_gm, stride_mb, stride_mh, stride_mm, stride_mn, stride_ab, stride_ah, stride_am, stride_an,
    H, GROUP, M, N, D, DV, blocks, scale, softcap,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, CAPPED: tl.constexpr, HAS_BIAS: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, CHECK: tl.constexpr, EVEN_D: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """Compute δ of a block of queries and, unless it is GIVEN, the log-sum-exp over all key blocks."""
    block, bh = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    batch, head = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    rm, rd, rv = block * BM + tl.arange(0, BM), tl.arange(0, BD), tl.arange(0, BDV)
    out = load_tile(OUT + batch * stride_ob + head * stride_oh, rm, stride_om, rv, M, DV, False, EVEN_D)
    grad = load_tile(GRAD + batch * stride_gb + head * stride_gh, rm, stride_gm, rv, M, DV, False, EVEN_D)
    row = bh.to(tl.int64) * M + rm
    tl.store(DELTA + row, tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1), mask=rm < M)
    if not GIVEN:
        q = load_tile(Q + batch * stride_qb + head * stride_qh, rm, stride_qm, rd, M, D, False, EVEN_D)
        k_base = K + batch * stride_kb + (head // GROUP) * stride_kh
        mask = MASK + batch * stride_mb + head * stride_mh
        bias = BIAS + batch * stride_ab + head * stride_ah
        top = tl.full([BM], -float("inf"), tl.float32)
        total = tl.zeros([BM], tl.float32)
        end = tl.minimum(N, (block + 1) * BM) if CAUSAL else N
        for start in range(0, end, BN):
            rn = start + tl.arange(0, BN)
            k = load_tile(k_base, rn, stride_kn, rd, N, D, not CHECK, EVEN_D)
            scores = _score_tile(
                q, k, rm, rn, mask, bias, scale, softcap, M, N, stride_mm, stride_mn, stride_am, stride_an,
                CAPPED, HAS_BIAS, CAUSAL, HAS_MASK, CHECK, PRECISION,
            )  # fmt: skip
            new_top = tl.maximum(top, tl.max(scores, 1))
            pivot = tl.where(new_top == -float("inf"), 0.0, new_top)
            total = total * fast_exp2(top - pivot, FAST) + tl.sum(fast_exp2(scores - pivot[:, None], FAST), 1)
            top = new_top
        has_key = top > -float("inf")
        # +inf makes every weight of a row without keys 0 in the second pass
        lse = tl.where(has_key, top + tl.log2(tl.where(has_key, total, 1.0)), float("inf"))
        # a NaN among the scores must reach the result
        tl.store(LSE + row, tl.where(total == total, lse, total), mask=rm < M)


@triton.jit
def score_columns_kernel(
    Q, K, V, OUT, GRAD, MASK, BIAS, LSE, DELTA, SQUARES,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_om, stride_lb, stride_lh, stride_lm,
    stride_gb, stride_gh, stride_gm, stride_mb, stride_mh, stride_mm, stride_mn, stride_ab, stride_ah, stride_am, stride_an,
    H, GROUP, M, N, D, DV, blocks, scale, softcap,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, CAPPED: tl.constexpr, HAS_BIAS: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, CHECK: tl.constexpr, EVEN_D: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr, GIVEN: tl.constexpr, HAS_DELTA: tl.constexpr,
):  # fmt: skip
    """Compute Σ_i dΦ_ij² of a block of keys and a query head over all query blocks; a GIVEN log-sum-exp is in base e."""
    block, bh = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    batch, head = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    rn, rd, rv = block * BN + tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, BDV)
    k = load_tile(K + batch * stride_kb + (head // GROUP) * stride_kh, rn, stride_kn, rd, N, D, not CHECK, EVEN_D)
    v = load_tile(V + batch * stride_vb + (head // GROUP) * stride_vh, rn, stride_vn, rv, N, DV, not CHECK, EVEN_D)
    q_base = Q + batch * stride_qb + head * stride_qh
    grad_base = GRAD + batch * stride_gb + head * stride_gh
    out_base = OUT + batch * stride_ob + head * stride_oh
    lse_base = LSE + batch * stride_lb + head * stride_lh
    mask = MASK + batch * stride_mb + head * stride_mh
    bias = BIAS + batch * stride_ab + head * stride_ah
    # summed over queries after the loop, so that no thread waits for another inside it
    squares = tl.zeros([BM, BN], tl.float32)
    for start in range((block * BN) // BM * BM if CAUSAL else 0, M, BM):
        rm = start + tl.arange(0, BM)
        inside = rm < M
        q = load_tile(q_base, rm, stride_qm, rd, M, D, not CHECK, EVEN_D)
        grad = load_tile(grad_base, rm, stride_gm, rv, M, DV, not CHECK, EVEN_D)
        lse = tl.load(lse_base + rm * stride_lm, mask=inside, other=float("inf"))
        if GIVEN:
            # +inf for a row without keys, as in `score_rows_kernel`, even if −inf was given
            lse = tl.where(lse == -float("inf"), float("inf"), lse * LOG2_E)
        if HAS_DELTA:
            delta = tl.load(DELTA + bh.to(tl.int64) * M + rm, mask=inside, other=0.0)
        else:
            out = load_tile(out_base, rm, stride_om, rv, M, DV, not CHECK, EVEN_D)
            delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
        scores = _score_tile(
            q, k, rm, rn, mask, bias, scale, softcap, M, N, stride_mm, stride_mn, stride_am, stride_an,
            CAPPED, HAS_BIAS, CAUSAL, HAS_MASK, CHECK, PRECISION,
        )  # fmt: skip
        weights = fast_exp2(scores - lse[:, None], FAST)
        grad_scores = weights * (tl.dot(grad, tl.trans(v), input_precision=PRECISION) - delta[:, None])
        squares += grad_scores * grad_scores
    tl.store(SQUARES + bh.to(tl.int64) * N + rn, tl.sum(squares, 0), mask=rn < N)
