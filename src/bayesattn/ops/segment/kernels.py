"""Triton kernels of stochastic attention on edges: one forward, one or two backward. README.md derives them.

A program processes HB heads of one run of edges with a common end (a target forward, a source backward; a long row is
several runs). Tiles are [BE edges, HB heads] and [BE edges, HB heads, BD features]. The noise, whose arithmetic is in
`ops/common/draws.py`, and the noisy log-sum-exp are in units of log 2; scores and the clean log-sum-exp are in nats.
"""

import triton
import triton.language as tl

from bayesattn.ops.attention.kl_kernels import key_term_slope
from bayesattn.ops.common.draws import LN_2, LOG2_E, ROUNDS, draw, fast_exp2


@triton.jit
def _noise(seed, numbers, head, strength, BE: tl.constexpr, HB: tl.constexpr, WEIBULL: tl.constexpr, FAST: tl.constexpr):
    """Return the log2-noise [BE, HB] of edges and the heads from `head` on, as specified in `draws.py`.

    A Philox call makes the draws of eight heads, of which HB are used: a power of two up to 8 that divides `head`.
    """
    zero = tl.zeros([BE], tl.uint32)
    calls = zero + (4 * (head // 8)).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, calls, numbers.to(tl.uint32), zero, zero, ROUNDS)
    if HB == 8:
        a0, a1 = draw(w0, strength, WEIBULL, FAST)
        b0, b1 = draw(w1, strength, WEIBULL, FAST)
        c0, c1 = draw(w2, strength, WEIBULL, FAST)
        d0, d1 = draw(w3, strength, WEIBULL, FAST)
        pairs = tl.join(tl.join(tl.join(a0, a1), tl.join(b0, b1)), tl.join(tl.join(c0, c1), tl.join(d0, d1)))
        # axes: edge, half, low and high bit of the word → edge, (word, half)
        return tl.reshape(tl.permute(pairs, (0, 3, 2, 1)), [BE, HB])
    elif HB == 4:
        is_upper = (head // 4) % 2 == 1
        a0, a1 = draw(tl.where(is_upper, w2, w0), strength, WEIBULL, FAST)
        b0, b1 = draw(tl.where(is_upper, w3, w1), strength, WEIBULL, FAST)
        pairs = tl.join(tl.join(a0, a1), tl.join(b0, b1))
        return tl.reshape(tl.permute(pairs, (0, 2, 1)), [BE, HB])
    else:
        number = (head // 2) % 4
        word = tl.where(number < 2, tl.where(number == 0, w0, w1), tl.where(number == 2, w2, w3))
        low, high = draw(word, strength, WEIBULL, FAST)
        if HB == 2:
            return tl.reshape(tl.join(low, high), [BE, HB])
        else:
            return tl.reshape(tl.where(head % 2 == 0, low, high), [BE, HB])


@triton.jit
def _gather(ROWS, node, heads, inside, H):
    return tl.load(ROWS + node.to(tl.int64)[:, None] * H + heads[None, :], mask=inside, other=0.0)


@triton.jit
def _prior(PRIOR, node, position, heads, inside, constant, H, KIND: tl.constexpr, BE: tl.constexpr, HB: tl.constexpr):
    """Return α or μ of a tile, by KIND: 0 is one number for all, 1 a row per source, 2 a row per edge."""
    if KIND == 1:
        return _gather(PRIOR, node, heads, inside, H)
    elif KIND == 2:
        return _gather(PRIOR, position, heads, inside, H)
    else:
        return tl.zeros([BE, HB], tl.float32) + constant


@triton.jit
def edge_forward_kernel(
    SCORES, SOURCE_SCORES, TARGET_SCORES, VALUE, PRIOR, SEED, SOURCE, NUMBERS, NODES, BEGIN, OUT, LSE, CLEAN_LSE, FIRST,
    SECOND,
    H, D, strength, constant, negative_slope,
    BE: tl.constexpr, HB: tl.constexpr, BD: tl.constexpr, WEIBULL: tl.constexpr, CLEAN: tl.constexpr,
    MOMENTS: tl.constexpr, KIND: tl.constexpr, PAIR: tl.constexpr, SPLIT: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Compute output, noisy and clean log-sum-exp and the KL's two moments of one run of edges into a target.

    Scores made of a PAIR are stored for the backward pass. The clean log-sum-exp is 0 for a row without edges, but −inf for
    an empty run where rows are SPLIT into runs.
    """
    run, head = tl.program_id(0), tl.program_id(1) * HB
    begin, end = tl.load(BEGIN + run), tl.load(BEGIN + run + 1)
    heads, rd = head + tl.arange(0, HB), tl.arange(0, BD)
    seed = tl.load(SEED)
    acc = tl.zeros([HB, BD], tl.float32)
    top, total = tl.full([HB], -float("inf"), tl.float32), tl.zeros([HB], tl.float32)
    clean_top, clean = tl.full([HB], -float("inf"), tl.float32), tl.zeros([HB], tl.float32)
    first, second = tl.zeros([HB], tl.float32), tl.zeros([HB], tl.float32)
    if PAIR:
        node = tl.load(NODES + run).to(tl.int64)
        own = tl.load(TARGET_SCORES + node * H + heads, mask=heads < H, other=0.0).to(tl.float32)
    for start in range(begin, end, BE):
        position = start + tl.arange(0, BE)
        is_edge = position < end
        inside = is_edge[:, None] & (heads < H)[None, :]
        source = tl.load(SOURCE + position, mask=is_edge, other=0)
        numbers = tl.load(NUMBERS + position, mask=is_edge, other=0)
        entry = position.to(tl.int64)[:, None] * H + heads[None, :]
        if PAIR:
            scores = own[None, :] + _gather(SOURCE_SCORES, source, heads, inside, H).to(tl.float32)
            scores = tl.where(scores > 0.0, scores, scores * negative_slope)
            tl.store(SCORES + entry, scores, mask=inside)
        else:
            scores = tl.load(SCORES + entry, mask=inside, other=0.0)
        log2_s = scores * LOG2_E + _noise(seed, numbers, head, strength, BE, HB, WEIBULL, FAST)
        log2_s = tl.where(is_edge[:, None], log2_s, -float("inf"))
        new_top = tl.maximum(top, tl.max(log2_s, 0))
        weights = fast_exp2(log2_s - new_top[None, :], FAST)
        shrink = fast_exp2(top - new_top, FAST)
        top, total = new_top, total * shrink + tl.sum(weights, 0)
        pointers = VALUE + (source.to(tl.int64)[:, None] * H + heads[None, :])[:, :, None] * D + rd[None, None, :]
        value = tl.load(pointers, mask=inside[:, :, None] & (rd < D)[None, None, :], other=0.0).to(tl.float32)
        acc = acc * shrink[:, None] + tl.sum(weights[:, :, None] * value, 0)
        if CLEAN:
            plain = tl.where(is_edge[:, None], scores * LOG2_E, -float("inf"))
            new_top = tl.maximum(clean_top, tl.max(plain, 0))
            clean = clean * fast_exp2(clean_top - new_top, FAST) + tl.sum(fast_exp2(plain - new_top[None, :], FAST), 0)
            clean_top = new_top
        if MOMENTS:
            prior = _prior(PRIOR, source, position, heads, inside, constant, H, KIND, BE, HB)
            if WEIBULL:
                # Σ α and Σ α Φ
                first += tl.sum(tl.where(inside, prior, 0.0), 0)
                second += tl.sum(tl.where(inside, prior * scores, 0.0), 0)
            else:
                deviation = tl.where(inside, scores - prior, 0.0)
                first += tl.sum(deviation, 0)
                second += tl.sum(deviation * deviation, 0)
    has_edge = begin < end
    row, is_head = run.to(tl.int64) * H + heads, heads < H
    out = acc / tl.where(has_edge, total, 1.0)[:, None]
    tl.store(OUT + row[:, None] * D + rd[None, :], out.to(OUT.dtype.element_ty), mask=is_head[:, None] & (rd < D)[None, :])
    tl.store(LSE + row, tl.where(has_edge, top + tl.log2(tl.where(has_edge, total, 1.0)), -float("inf")), mask=is_head)
    if CLEAN:
        lse = (clean_top + tl.log2(tl.where(has_edge, clean, 1.0))) * LN_2
        tl.store(CLEAN_LSE + row, tl.where(has_edge, lse, -float("inf") if SPLIT else 0.0), mask=is_head)
    if MOMENTS:
        tl.store(FIRST + row, first, mask=is_head)
        tl.store(SECOND + row, second, mask=is_head)


@triton.jit
def edge_backward_kernel(
    SCORES, VALUE, PRIOR, SEED, TARGET, NUMBERS, POSITIONS, NODES, BEGIN, GRAD, LSE, CLEAN_LSE, DELTA, GRAD_LSE, GRAD_FIRST,
    GRAD_SECOND, GRAD_SCORES, GRAD_VALUE, GRAD_PRIOR,
    H, D, strength, constant, slope, negative_slope,
    BE: tl.constexpr, HB: tl.constexpr, BD: tl.constexpr, WEIBULL: tl.constexpr, CLEAN: tl.constexpr,
    MOMENTS: tl.constexpr, KIND: tl.constexpr, PAIR: tl.constexpr, FUSED: tl.constexpr, RAW: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Compute dΦ of one run of edges out of a source, and the run's part of the source's dV and prior gradient.

    Every edge belongs to one run, so nothing is atomic: dΦ_e is stored at the position of the edge. With a FUSED Weibull KL,
    the moments' gradients are ds_i = −pull and da_i = pull LSE_i (0 with RAW scores). GRAD_SECOND then holds the one number
    `pull`, and GRAD_PRIOR becomes the gradient of ln α, including that of c. For scores made of a PAIR, the stored gradient
    is that of the sum before the LeakyReLU.
    """
    run, head = tl.program_id(0), tl.program_id(1) * HB
    begin, end = tl.load(BEGIN + run), tl.load(BEGIN + run + 1)
    node = tl.load(NODES + run).to(tl.int64)
    heads, rd = head + tl.arange(0, HB), tl.arange(0, BD)
    is_head, is_feature = heads < H, rd < D
    seed = tl.load(SEED)
    row = node * H + heads
    value = tl.load(VALUE + row[:, None] * D + rd[None, :], mask=is_head[:, None] & is_feature[None, :], other=0.0).to(
        tl.float32
    )
    acc = tl.zeros([HB, BD], tl.float32)
    acc_prior = tl.zeros([HB], tl.float32)
    if KIND == 1:
        own = tl.load(PRIOR + row, mask=is_head, other=0.0)
    if FUSED:
        pull = tl.load(GRAD_SECOND)
    for start in range(begin, end, BE):
        place = start + tl.arange(0, BE)
        is_edge = place < end
        inside = is_edge[:, None] & is_head[None, :]
        position = tl.load(POSITIONS + place, mask=is_edge, other=0)
        target = tl.load(TARGET + position, mask=is_edge, other=0)
        numbers = tl.load(NUMBERS + position, mask=is_edge, other=0)
        entry = position.to(tl.int64)[:, None] * H + heads[None, :]
        scores = tl.load(SCORES + entry, mask=inside, other=0.0)
        lse = tl.load(LSE + target.to(tl.int64)[:, None] * H + heads[None, :], mask=inside, other=float("inf"))
        noise = _noise(seed, numbers, head, strength, BE, HB, WEIBULL, FAST)
        weights = fast_exp2(scores * LOG2_E + noise - lse, FAST)
        pointers = GRAD + (target.to(tl.int64)[:, None] * H + heads[None, :])[:, :, None] * D + rd[None, None, :]
        grad = tl.load(pointers, mask=inside[:, :, None] & is_feature[None, None, :], other=0.0).to(tl.float32)
        acc += tl.sum(weights[:, :, None] * grad, 0)
        delta = _gather(DELTA, target, heads, inside, H)
        grad_scores = weights * (tl.sum(grad * value[None, :, :], 2) - delta)
        if CLEAN:
            clean = _gather(CLEAN_LSE, target, heads, inside, H)
            grad_lse = _gather(GRAD_LSE, target, heads, inside, H)
            grad_scores += fast_exp2((scores - clean) * LOG2_E, FAST) * grad_lse
        if MOMENTS:
            if KIND == 1:
                prior = own[None, :]
            else:
                prior = _prior(PRIOR, target, position, heads, inside, constant, H, KIND, BE, HB)
            if FUSED:
                grad_scores -= prior * pull
                grad_prior = -pull * scores if RAW else pull * (clean - scores)
            else:
                grad_first = _gather(GRAD_FIRST, target, heads, inside, H)
                grad_second = _gather(GRAD_SECOND, target, heads, inside, H)
                if WEIBULL:
                    grad_scores += prior * grad_second
                    grad_prior = grad_first + scores * grad_second
                else:
                    tilt = grad_first + 2.0 * (scores - prior) * grad_second
                    grad_scores += tilt
                    grad_prior = -tilt
            if KIND == 1:
                acc_prior += tl.sum(tl.where(inside, grad_prior, 0.0), 0)
            if KIND == 2:
                tl.store(GRAD_PRIOR + entry, grad_prior, mask=inside)
        if PAIR:
            grad_scores = tl.where(scores > 0.0, grad_scores, grad_scores * negative_slope)
        tl.store(GRAD_SCORES + entry, grad_scores, mask=inside)
    place = run.to(tl.int64) * H + heads
    tl.store(
        GRAD_VALUE + place[:, None] * D + rd[None, :],
        acc.to(GRAD_VALUE.dtype.element_ty),
        mask=is_head[:, None] & is_feature[None, :],
    )
    if KIND == 1:
        if FUSED:
            acc_prior = own * acc_prior + pull * (end - begin).to(tl.float32) * key_term_slope(own, slope)
        tl.store(GRAD_PRIOR + place, acc_prior, mask=is_head)


@triton.jit
def _sum_of_run(X, POSITIONS, BEGIN, run, heads, H, IN_ORDER: tl.constexpr, BE: tl.constexpr, HB: tl.constexpr):
    """Return the sum of X over the edges of a run, whose entries are IN_ORDER or at POSITIONS."""
    begin, end = tl.load(BEGIN + run), tl.load(BEGIN + run + 1)
    acc = tl.zeros([BE, HB], tl.float32)
    for start in range(begin, end, BE):
        place = start + tl.arange(0, BE)
        is_edge = place < end
        position = place if IN_ORDER else tl.load(POSITIONS + place, mask=is_edge, other=0)
        acc += _gather(X, position, heads, is_edge[:, None] & (heads < H)[None, :], H)
    return tl.sum(acc, 0)


@triton.jit
def edge_pair_grad_kernel(
    GRAD_SCORES, POSITIONS, BEGIN_SOURCE, BEGIN, GRAD_SOURCE, GRAD_TARGET, H, RUNS, BE: tl.constexpr, HB: tl.constexpr
):
    """Sum the gradients of one run of edges: out of a source in the first RUNS programs, into a target in the others."""
    run, heads = tl.program_id(0), tl.program_id(1) * HB + tl.arange(0, HB)
    if run < RUNS:
        total = _sum_of_run(GRAD_SCORES, POSITIONS, BEGIN_SOURCE, run, heads, H, False, BE, HB)
        tl.store(GRAD_SOURCE + run.to(tl.int64) * H + heads, total, mask=heads < H)
    else:
        run -= RUNS
        total = _sum_of_run(GRAD_SCORES, POSITIONS, BEGIN, run, heads, H, True, BE, HB)
        tl.store(GRAD_TARGET + run.to(tl.int64) * H + heads, total, mask=heads < H)
