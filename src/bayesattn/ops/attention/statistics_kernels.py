"""Triton kernel of attention statistics: one pass over the scores of a block of queries, without an m × n array.

Conventions are those of `forward_kernels.py`.
"""

import triton
import triton.language as tl

from bayesattn.ops.attention.band_sums import key_blocks
from bayesattn.ops.common.draws import LN_2, LOG2_E, fast_exp2
from bayesattn.ops.common.tiles import FULL_MASK, allowed_entries, block_and_head, edge_start, load_tile


@triton.jit
def _fold(
    top, total, weighted, shared, keys, q, k_base, mask, bias, positions, rm, low, high, split, gap, scale,
    softcap, M, N, D, stride_kn, stride_mm, stride_mn, stride_am, stride_an,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_POSITIONS: tl.constexpr, SOFTCAP: tl.constexpr, CHECK: tl.constexpr, EVEN_D: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the key blocks of [low, high), shifted by `edge_start`, to the running sums of a block of queries."""
    rd = tl.arange(0, BD)
    for at in range(low, high, BN):
        start = edge_start(at, split, gap, CHECK)
        rn = start + tl.arange(0, BN)
        k = load_tile(k_base, rn, stride_kn, rd, N, D, not CHECK, EVEN_D)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if SOFTCAP:
            # tanh(x) = 1 − 2 / (e^2x + 1), in base 2
            bounded = 1.0 - 2.0 / (tl.exp2(scores * (2.0 / softcap)) + 1.0)
            scores = softcap * LOG2_E * bounded
        if HAS_BIAS:
            inside = (rm < M)[:, None] & (rn < N)[None, :]
            added = tl.load(bias + rm[:, None] * stride_am + rn[None, :] * stride_an, mask=inside, other=0.0)
            scores += added.to(tl.float32) * LOG2_E
        if CHECK:
            allowed = allowed_entries(rm, rn, M, N, mask, stride_mm, stride_mn, CAUSAL, HAS_MASK)
            scores = tl.where(allowed, scores, -float("inf"))
            keys += tl.sum(allowed.to(tl.float32), 1)
        else:
            keys += BN
        new_top = tl.maximum(top, tl.max(scores, 1))
        pivot = tl.where(new_top == -float("inf"), 0.0, new_top) if CHECK else new_top
        fall = tl.where(top == -float("inf"), 0.0, top - pivot)
        shrink = tl.where(top == -float("inf"), 0.0, fast_exp2(fall, FAST))
        centered = scores - pivot[:, None]
        weights = fast_exp2(centered, FAST)
        # Σ w (s − top), relative to the new maximum
        finite = tl.where(centered == -float("inf"), 0.0, centered) if CHECK else centered
        weighted = (weighted + total * fall) * shrink + tl.sum(weights * finite, 1)
        total = total * shrink + tl.sum(weights, 1)
        if HAS_POSITIONS:
            chosen = tl.load(positions + rn, mask=rn < N, other=0) != 0
            shared = shared * shrink + tl.sum(tl.where(chosen[None, :], weights, 0.0), 1)
        top = new_top
    return top, total, weighted, shared, keys


@triton.jit
def statistics_kernel(
    Q, K, MASK, BIAS, POSITIONS, ENTROPY, LARGEST, SHARE, KEYS,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_mb, stride_mh, stride_mm, stride_mn,
    stride_ab, stride_ah, stride_am, stride_an, stride_pb, H, GROUP, M, N, D, scale, softcap,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_POSITIONS: tl.constexpr, SOFTCAP: tl.constexpr, EVEN_D: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute entropy, largest weight, share on positions and number of keys of a block of queries."""
    block, bh, _blocks = block_and_head(M, BM, CAUSAL)  # type: ignore[misc]
    head, batch = (bh % H).to(tl.int64), (bh // H).to(tl.int64)
    rm = block * BM + tl.arange(0, BM)
    rd = tl.arange(0, BD)
    q = load_tile(Q + batch * stride_qb + head * stride_qh, rm, stride_qm, rd, M, D, False, EVEN_D)
    k_base = K + batch * stride_kb + (head // GROUP) * stride_kh
    mask = MASK + batch * stride_mb + head * stride_mh
    bias = BIAS + batch * stride_ab + head * stride_ah
    positions = POSITIONS + batch * stride_pb
    top = tl.full([BM], -float("inf"), tl.float32)
    total, weighted = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    shared, keys = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    begin, easy, rest, end = key_blocks(  # type: ignore[misc]
        mask, stride_mn, block, N, 0, BM, BN, BM, CAUSAL, False, HAS_MASK, False
    )
    if HAS_MASK != FULL_MASK:
        top, total, weighted, shared, keys = _fold(
            top, total, weighted, shared, keys, q, k_base, mask, bias, positions, rm, easy, rest, 0, 0,
            scale * LOG2_E, softcap, M, N, D, stride_kn, stride_mm, stride_mn, stride_am, stride_an,
            BM, BN, BD, CAUSAL, HAS_MASK, HAS_BIAS, HAS_POSITIONS, SOFTCAP, False, EVEN_D, FAST, PRECISION,
        )  # fmt: skip
    gap = rest - easy
    top, total, weighted, shared, keys = _fold(
        top, total, weighted, shared, keys, q, k_base, mask, bias, positions, rm, begin, end - gap, easy, gap,
        scale * LOG2_E, softcap, M, N, D, stride_kn, stride_mm, stride_mn, stride_am, stride_an,
        BM, BN, BD, CAUSAL, HAS_MASK, HAS_BIAS, HAS_POSITIONS, SOFTCAP, True, EVEN_D, FAST, PRECISION,
    )  # fmt: skip
    row, inside, has_key = bh.to(tl.int64) * M + rm, rm < M, total > 0.0
    safe = tl.where(has_key, total, 1.0)
    # LSE − E[Φ], both relative to the maximum; rounding may give a value slightly below 0
    entropy = tl.maximum((tl.log2(safe) - weighted / safe) * LN_2, 0.0)
    tl.store(ENTROPY + row, tl.where(has_key, entropy, 0.0), mask=inside)
    tl.store(LARGEST + row, tl.where(has_key, 1.0 / safe, 0.0), mask=inside)
    tl.store(KEYS + row, keys, mask=inside)
    if HAS_POSITIONS:
        tl.store(SHARE + row, shared / safe, mask=inside)
