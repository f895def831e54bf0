"""Triton kernels of stochastic attention: one forward, three for the backward pass. README.md derives them.

Conventions: sizes M N D, tiles BM BN BD; `rm`, `rn` are the row (query) and column (key) indices of a tile; scores,
noise and log-sum-exps are in units of log 2, because the hardware has exp2 and log2. A tile of scores is always
[BM, BN], queries by keys, so that the eight draws of one Philox call fall into one thread in every kernel.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
MINUS_2_LN_2 = tl.constexpr(-1.3862943611198906)
TWO_PI = tl.constexpr(6.283185307179586)
ROUNDS = tl.constexpr(7)
UNIFORM_SHIFT = tl.constexpr(128.0 - 2.0**-17)
# HAS_MASK: 0, FULL_MASK, or KEY_MASK where all queries have the same keys
FULL_MASK, KEY_MASK = tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _log2(x, FAST: tl.constexpr):
    # tl.log2 is an accurate routine of a dozen instructions; the hardware's own has an absolute error of 2^-22
    if FAST:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.log2(x)


@triton.jit
def _exp2(x, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.exp2(x)


@triton.jit
def _log2_of_minus_log2(x, FAST: tl.constexpr):
    # in one piece: Triton's minus is a subtraction from zero, while the hardware's logarithm negates for nothing
    if FAST:
        return tl.inline_asm_elementwise(
            "{.reg .f32 t; lg2.approx.ftz.f32 t, $1; neg.f32 t, t; lg2.approx.ftz.f32 $0, t;}",
            "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.log2(-tl.log2(x))


@triton.jit
def _cos_sin(turns, FAST: tl.constexpr):
    """Return cosine and sine of turns in (−1/2, 1/2), where the hardware's own are exact to 2^-20."""
    angle = turns * TWO_PI
    if FAST:
        cos = tl.inline_asm_elementwise("cos.approx.ftz.f32 $0, $1;", "=f,f", [angle], tl.float32, True, 1)
        return cos, tl.inline_asm_elementwise("sin.approx.ftz.f32 $0, $1;", "=f,f", [angle], tl.float32, True, 1)
    else:
        return tl.cos(angle), tl.sin(angle)


@triton.jit
def _uniform(word, base, HIGH: tl.constexpr, FAST: tl.constexpr):
    """Return (r + 1/2) / 2^16 for one half r of a word; `base` has the bits of 128.0.

    As the last bits of its mantissa, r makes 128 + r / 2^16: a permutation of bytes, no conversion. A float32 holds that,
    128 − 2^-17 and their difference exactly.
    """
    if FAST:
        if HIGH:
            bits = tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [word, base], tl.uint32, True, 1)
        else:
            bits = tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x7610;", "=r,r,r", [word, base], tl.uint32, True, 1)
    else:
        bits = (word >> 16 if HIGH else word & 0xFFFF) | base
    return bits.to(tl.float32, bitcast=True) - UNIFORM_SHIFT


@triton.jit
def _draw(word, strength, WEIBULL: tl.constexpr, FAST: tl.constexpr):
    """Turn one word into the log2-noise of two neighbouring keys."""
    # 128.0, hidden from the compiler: it would write the constant into the instruction and fetch the permutation each time
    base = tl.where(strength < 0, 0, 0x43000000).to(tl.uint32)
    low, high = _uniform(word, base, False, FAST), _uniform(word, base, True, FAST)
    if WEIBULL:
        # log2 of E up to the factor ln 2, which a row shares
        return strength * _log2_of_minus_log2(low, FAST), strength * _log2_of_minus_log2(high, FAST)
    else:
        # half a turn back, and both signs with it
        radius = tl.sqrt(_log2(low, FAST) * MINUS_2_LN_2) * -strength
        cos, sin = _cos_sin(high - 0.5, FAST)
        return radius * cos, radius * sin


@triton.jit
def _noise(
    seed, rm, start_n, head, batch, strength, BM: tl.constexpr, BN: tl.constexpr, WEIBULL: tl.constexpr, FAST: tl.constexpr
):
    """Return the log2-noise of a tile, as `bayesattn.noise` specifies it.

    A call serves keys 32 g + 8 w + 2 t + half for its four words w and two halves: exactly those that one thread
    holds of a row in the tensor cores' accumulator layout, so nothing has to be moved between threads.
    """
    calls = 4 * (start_n // 32 + tl.arange(0, BN // 32))[:, None] + tl.arange(0, 4)[None, :]
    zero = tl.zeros([BM, BN // 32, 4], tl.uint32)
    w0, w1, w2, w3 = tl.philox(
        seed,
        zero + calls.to(tl.uint32)[None, :, :],
        zero + rm.to(tl.uint32)[:, None, None],
        zero + head.to(tl.uint32),
        zero + batch.to(tl.uint32),
        ROUNDS,
    )
    a0, a1 = _draw(w0, strength, WEIBULL, FAST)
    b0, b1 = _draw(w1, strength, WEIBULL, FAST)
    c0, c1 = _draw(w2, strength, WEIBULL, FAST)
    d0, d1 = _draw(w3, strength, WEIBULL, FAST)
    pairs = tl.join(tl.join(tl.join(a0, a1), tl.join(b0, b1)), tl.join(tl.join(c0, c1), tl.join(d0, d1)))
    # axes: row, g, t, half, low and high bit of w → row, (g, w, t, half)
    return tl.reshape(tl.permute(pairs, (0, 1, 5, 4, 2, 3)), [BM, BN])


@triton.jit
def _saturate(x, DTYPE: tl.constexpr):
    """Cast a gradient; in float16, which alone ends within reach of a KL's gradients, to its largest number at most."""
    if DTYPE == tl.float16:  # noqa: SIM300  (not a constant but a parameter)
        x = tl.clamp(x, -65504.0, 65504.0, tl.PropagateNan.ALL)
    return x.to(DTYPE)


@triton.jit
def _allowed(rm, rn, M, N, mask, stride_mm, stride_mn, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr):
    allowed = (rn < N)[None, :] & (rm < M)[:, None]
    if CAUSAL:
        allowed = allowed & (rm[:, None] >= rn[None, :])
    if HAS_MASK == KEY_MASK:
        allowed = allowed & (tl.load(mask + rn * stride_mn, mask=rn < N, other=0) != 0)[None, :]
    elif HAS_MASK:
        allowed = allowed & (tl.load(mask + rm[:, None] * stride_mm + rn[None, :] * stride_mn, mask=allowed, other=0) != 0)
    return allowed


@triton.jit
def _load(base, rows, stride, columns, limit, D, EVEN_ROWS: tl.constexpr, EVEN_D: tl.constexpr):
    """Load a [rows, columns] tile; what lies outside is 0."""
    pointers = base + rows[:, None] * stride + columns[None, :]
    if EVEN_ROWS:
        if EVEN_D:
            return tl.load(pointers)
        return tl.load(pointers, mask=(columns < D)[None, :], other=0.0)
    return tl.load(pointers, mask=(rows < limit)[:, None] & (columns < D)[None, :], other=0.0)


@triton.jit
def _forward_range(
    acc, top, total, clean, first, second, q, k_base, v_base, mask, mu, seed, rm, low, high, head, batch, scale, strength,
    M, N, D, DV, stride_kn, stride_vn, stride_mm, stride_mn,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, WEIBULL: tl.constexpr, CLEAN: tl.constexpr,
    MOMENTS: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, CHECK: tl.constexpr, EVEN_D: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold the key blocks of [low, high) into the running output and sums of one block of queries."""
    rd, rv = tl.arange(0, BD), tl.arange(0, BDV)
    for start in range(low, high, BN):
        rn = start + tl.arange(0, BN)
        k = _load(k_base, rn, stride_kn, rd, N, D, not CHECK, EVEN_D)
        products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if MOMENTS:
            deviation = products * (scale * LN_2) - tl.load(mu + rn, mask=rn < N, other=0.0)[None, :]
        if CHECK:
            allowed = _allowed(rm, rn, M, N, mask, stride_mm, stride_mn, CAUSAL, HAS_MASK)
            products = tl.where(allowed, products, -float("inf"))
            if MOMENTS:
                deviation = tl.where(allowed, deviation, 0.0)
        # the maximum is of the clean scores: the noise is bounded, and both sums can share it
        new_top = tl.maximum(top, tl.max(products, 1) * scale)
        pivot = tl.where(new_top == -float("inf"), 0.0, new_top) if CHECK else new_top
        shrink = _exp2(top - pivot, FAST)
        centred = products * scale - pivot[:, None]
        noise = _noise(seed, rm, start, head, batch, strength, BM, BN, WEIBULL, FAST)
        weights = _exp2(centred + noise, FAST)
        total = total * shrink + tl.sum(weights, 1)
        if CLEAN:
            clean = clean * shrink + tl.sum(_exp2(centred, FAST), 1)
        if MOMENTS:
            first += tl.sum(deviation, 1)
            second += tl.sum(deviation * deviation, 1)
        v = _load(v_base, rn, stride_vn, rv, N, DV, not CHECK, EVEN_D)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        top = new_top
    return acc, top, total, clean, first, second


@triton.jit
def forward_kernel(
    Q, K, V, MASK, MU, SEED, OUT, LSE, CLEAN_LSE, FIRST, SECOND,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_mb, stride_mh, stride_mm, stride_mn, stride_ub, stride_uh,
    H, GROUP, M, N, D, DV, seed_stride, scale, strength,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, WEIBULL: tl.constexpr, CLEAN: tl.constexpr,
    MOMENTS: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, EVEN_N: tl.constexpr, EVEN_D: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Output, noisy and clean log-sum-exp (and the lognormal KL's moments) of one block of queries."""
    block, bh = tl.program_id(0), tl.program_id(1)
    head, batch = bh % H, bh // H
    rm = block * BM + tl.arange(0, BM)
    rd, rv = tl.arange(0, BD), tl.arange(0, BDV)
    wide_b, wide_h = batch.to(tl.int64), head.to(tl.int64)
    q = _load(Q + wide_b * stride_qb + wide_h * stride_qh, rm, stride_qm, rd, M, D, False, EVEN_D)
    k_base = K + wide_b * stride_kb + (wide_h // GROUP) * stride_kh
    v_base = V + wide_b * stride_vb + (wide_h // GROUP) * stride_vh
    mask = MASK + wide_b * stride_mb + wide_h * stride_mh
    mu = MU + wide_b * stride_ub + wide_h * stride_uh
    seed = tl.load(SEED + batch * seed_stride)
    # one seed per example: the noise must not depend on where in the batch the example stands
    noise_batch = tl.where(seed_stride == 0, batch, 0)
    acc = tl.zeros([BM, BDV], tl.float32)
    top = tl.full([BM], -float("inf"), tl.float32)
    total, clean = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    first, second = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    end = tl.minimum(N, (block + 1) * BM) if CAUSAL else N
    if HAS_MASK:
        easy = 0
    elif CAUSAL:
        easy = tl.minimum(block * BM, N) // BN * BN
    elif EVEN_N:
        easy = N
    else:
        easy = N // BN * BN
    acc, top, total, clean, first, second = _forward_range(
        acc, top, total, clean, first, second, q, k_base, v_base, mask, mu, seed, rm, 0, easy, head, noise_batch,
        scale * LOG2_E, strength, M, N, D, DV, stride_kn, stride_vn, stride_mm, stride_mn,
        BM, BN, BD, BDV, WEIBULL, CLEAN, MOMENTS, CAUSAL, HAS_MASK, False, EVEN_D, FAST, PRECISION,
    )  # fmt: skip
    if HAS_MASK or CAUSAL or not EVEN_N:
        acc, top, total, clean, first, second = _forward_range(
            acc, top, total, clean, first, second, q, k_base, v_base, mask, mu, seed, rm, easy, end, head, noise_batch,
            scale * LOG2_E, strength, M, N, D, DV, stride_kn, stride_vn, stride_mm, stride_mn,
            BM, BN, BD, BDV, WEIBULL, CLEAN, MOMENTS, CAUSAL, HAS_MASK, True, EVEN_D, FAST, PRECISION,
        )  # fmt: skip
    has_key = top > -float("inf")
    out = acc / tl.where(has_key, total, 1.0)[:, None]
    row = bh.to(tl.int64) * M + rm
    inside = rm < M
    tl.store(OUT + row[:, None] * DV + rv[None, :], out.to(OUT.dtype.element_ty), mask=inside[:, None] & (rv < DV)[None, :])
    # +inf makes every weight of a row without keys 0 in the backward pass
    tl.store(LSE + row, tl.where(has_key, top + tl.log2(tl.where(has_key, total, 1.0)), float("inf")), mask=inside)
    if CLEAN:
        lse = (top + tl.log2(tl.where(has_key, clean, 1.0))) * LN_2
        tl.store(CLEAN_LSE + row, tl.where(has_key, lse, 0.0), mask=inside)
    if MOMENTS:
        tl.store(FIRST + row, first, mask=inside)
        tl.store(SECOND + row, second, mask=inside)


@triton.jit
def columns_kernel(
    K, QUERY_SUMS, COLUMNS, stride_kb, stride_kh, stride_kn, stride_sum, H, GROUP, N, D, scale,
    BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """T_j = scale · k_j · Σ_i q_i, the column sums of the scores without the scores."""
    rn, rd, bh = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BD), tl.program_id(1)
    batch, key_head = (bh // H).to(tl.int64), ((bh % H) // GROUP).to(tl.int64)
    k = _load(K + batch * stride_kb + key_head * stride_kh, rn, stride_kn, rd, N, D, False, False).to(tl.float32)
    rows = tl.where(stride_sum == 0, 1, N)
    sums = _load(QUERY_SUMS + bh.to(tl.int64) * rows * D, rn, stride_sum, rd, N, D, False, False)
    tl.store(COLUMNS + bh.to(tl.int64) * N + rn, tl.sum(k * sums, 1) * scale, mask=rn < N)


@triton.jit
def prepare_kernel(
    OUT, GRAD, DELTA, START_Q, GRAD_Q, M, D, DV, H, stride_gb, stride_gh, stride_gm, stride_sum, scale,
    BM: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, COLUMNS: tl.constexpr, ONE_PASS: tl.constexpr,
):  # fmt: skip
    """δ_i = O_i · dO_i, which replaces the row sum of the softmax's backward; with ONE_PASS also what dQ starts from."""
    rm, rv, bh = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BDV), tl.program_id(1)
    row = bh.to(tl.int64) * M + rm
    inside = (rm < M)[:, None] & (rv < DV)[None, :]
    out = tl.load(OUT + row[:, None] * DV + rv[None, :], mask=inside, other=0.0).to(tl.float32)
    base = GRAD + (bh // H).to(tl.int64) * stride_gb + (bh % H).to(tl.int64) * stride_gh
    grad = tl.load(base + rm[:, None] * stride_gm + rv[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(DELTA + row, tl.sum(out * grad, 1), mask=rm < M)
    if ONE_PASS:
        rd = tl.arange(0, BD)
        start = tl.zeros([BM, BD], tl.float32)
        if COLUMNS:
            rows = tl.where(stride_sum == 0, 1, M)
            start = _load(START_Q + bh.to(tl.int64) * rows * D, rm, stride_sum, rd, M, D, False, False) * scale
        tl.store(GRAD_Q + row[:, None] * D + rd[None, :], start, mask=(rm < M)[:, None] & (rd < D)[None, :])


@triton.jit
def _grad_tile(
    q, k, v, grad, rm, rn, start_n, lse, clean_lse, delta, grad_lse, grad_first, grad_second,
    mask, mu, seed, head, batch, scale, strength, M, N, stride_mm, stride_mn,
    BM: tl.constexpr, BN: tl.constexpr, WEIBULL: tl.constexpr, CLEAN: tl.constexpr, MOMENTS: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, CHECK: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the sampled weights of a tile and the gradient of its scores.

    dΦ = W (dO Vᵀ − δ) + W_clean dLSE + dr₁ + 2 (Φ − μ) dr₂, the last two for the lognormal KL; dμ is their negative.
    What the column sums T_j = Σ_i Φ_ij of the Weibull KL add, dT_j, is the same for all queries: it enters dQ and dK
    once, outside the loop, and costs nothing here.
    """
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if MOMENTS:
        slope = grad_first[:, None] + 2.0 * grad_second[:, None] * (scores * LN_2 - mu[None, :])
    if CHECK:
        allowed = _allowed(rm, rn, M, N, mask, stride_mm, stride_mn, CAUSAL, HAS_MASK)
        scores = tl.where(allowed, scores, -float("inf"))
    noise = _noise(seed, rm, start_n, head, batch, strength, BM, BN, WEIBULL, FAST)
    weights = _exp2(scores - lse[:, None] + noise, FAST)
    grad_scores = weights * (tl.dot(grad, tl.trans(v), input_precision=PRECISION) - delta[:, None])
    if CLEAN:
        grad_scores += _exp2(scores - clean_lse[:, None], FAST) * grad_lse[:, None]
    grad_mu = tl.zeros([BN], tl.float32)
    if MOMENTS:
        if CHECK:
            slope = tl.where(allowed, slope, 0.0)
        grad_scores += slope
        grad_mu = -tl.sum(slope, 0)
    return weights, grad_scores, grad_mu


@triton.jit
def _load_rows(ROWS, row, inside, other, USE: tl.constexpr):
    if USE:
        return tl.load(ROWS + row, mask=inside, other=other)
    else:
        return tl.zeros_like(inside).to(tl.float32)


@triton.jit
def grad_query_kernel(
    Q, K, V, MASK, MU, SEED, GRAD, LSE, CLEAN_LSE, DELTA, GRAD_LSE, GRAD_FIRST, GRAD_SECOND, START_Q, GRAD_Q,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_gb, stride_gh, stride_gm, stride_mb, stride_mh, stride_mm, stride_mn, stride_ub, stride_uh, stride_sum,
    H, GROUP, M, N, D, DV, seed_stride, scale, strength,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, WEIBULL: tl.constexpr, CLEAN: tl.constexpr,
    COLUMNS: tl.constexpr, MOMENTS: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, CHECK: tl.constexpr,
    EVEN_D: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ of one block of queries, over all key blocks."""
    block, bh = tl.program_id(0), tl.program_id(1)
    head, batch = bh % H, bh // H
    wide_b, wide_h = batch.to(tl.int64), head.to(tl.int64)
    rm, rd, rv = block * BM + tl.arange(0, BM), tl.arange(0, BD), tl.arange(0, BDV)
    row, inside = bh.to(tl.int64) * M + rm, rm < M
    q = _load(Q + wide_b * stride_qb + wide_h * stride_qh, rm, stride_qm, rd, M, D, False, EVEN_D)
    grad = _load(GRAD + wide_b * stride_gb + wide_h * stride_gh, rm, stride_gm, rv, M, DV, False, EVEN_D)
    k_base = K + wide_b * stride_kb + (wide_h // GROUP) * stride_kh
    v_base = V + wide_b * stride_vb + (wide_h // GROUP) * stride_vh
    mask = MASK + wide_b * stride_mb + wide_h * stride_mh
    mu_base = MU + wide_b * stride_ub + wide_h * stride_uh
    seed = tl.load(SEED + batch * seed_stride)
    noise_batch = tl.where(seed_stride == 0, batch, 0)
    lse = tl.load(LSE + row, mask=inside, other=float("inf"))
    delta = tl.load(DELTA + row, mask=inside, other=0.0)
    clean_lse = _load_rows(CLEAN_LSE, row, inside, 0.0, CLEAN) * LOG2_E
    grad_lse = _load_rows(GRAD_LSE, row, inside, 0.0, CLEAN)
    grad_first = _load_rows(GRAD_FIRST, row, inside, 0.0, MOMENTS)
    grad_second = _load_rows(GRAD_SECOND, row, inside, 0.0, MOMENTS)
    acc = tl.zeros([BM, BD], tl.float32)
    if COLUMNS:
        # Σ_j dT_j k_j over the keys of each query; one row (stride 0) where all queries share them
        rows = tl.where(stride_sum == 0, 1, M)
        acc = _load(START_Q + bh.to(tl.int64) * rows * D, rm, stride_sum, rd, M, D, False, EVEN_D)
    end = tl.minimum(N, (block + 1) * BM) if CAUSAL else N
    for start in range(0, end, BN):
        rn = start + tl.arange(0, BN)
        k = _load(k_base, rn, stride_kn, rd, N, D, not CHECK, EVEN_D)
        v = _load(v_base, rn, stride_vn, rv, N, DV, not CHECK, EVEN_D)
        mu = _load_rows(mu_base, rn, rn < N, 0.0, MOMENTS)
        _, grad_scores, _ = _grad_tile(
            q, k, v, grad, rm, rn, start, lse, clean_lse, delta, grad_lse, grad_first, grad_second, mask, mu,
            seed, head, noise_batch, scale * LOG2_E, strength, M, N, stride_mm, stride_mn,
            BM, BN, WEIBULL, CLEAN, MOMENTS, CAUSAL, HAS_MASK, CHECK, FAST, PRECISION,
        )  # fmt: skip
        acc = tl.dot(_saturate(grad_scores, k.dtype), k, acc, input_precision=PRECISION)
    pointers = GRAD_Q + row[:, None] * D + rd[None, :]
    tl.store(pointers, _saturate(acc * scale, GRAD_Q.dtype.element_ty), mask=inside[:, None] & (rd < D)[None, :])


@triton.jit
def grad_key_kernel(
    Q, K, V, MASK, MU, SEED, GRAD, LSE, CLEAN_LSE, DELTA, GRAD_LSE, GRAD_FIRST, GRAD_SECOND,
    GRAD_COLUMNS, QUERY_SUMS, GRAD_Q, GRAD_K, GRAD_V, GRAD_MU,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_gb, stride_gh, stride_gm, stride_mb, stride_mh, stride_mm, stride_mn, stride_ub, stride_uh, stride_sum,
    H, GROUP, M, N, D, DV, seed_stride, scale, strength,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, WEIBULL: tl.constexpr, CLEAN: tl.constexpr,
    COLUMNS: tl.constexpr, MOMENTS: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, CHECK: tl.constexpr,
    EVEN_D: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr, ONE_PASS: tl.constexpr,
):  # fmt: skip
    """dK and dV (and dμ) of one block of keys, over all query blocks of the heads that share it; with ONE_PASS also dQ.

    ONE_PASS draws the noise once instead of twice, but has to add dQ atomically.
    """
    block, program = tl.program_id(0), tl.program_id(1)
    key_heads = H // GROUP
    batch, key_head = program // key_heads, program % key_heads
    wide_b, wide_kh = batch.to(tl.int64), key_head.to(tl.int64)
    rn, rd, rv = block * BN + tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, BDV)
    k = _load(K + wide_b * stride_kb + wide_kh * stride_kh, rn, stride_kn, rd, N, D, not CHECK, EVEN_D)
    v = _load(V + wide_b * stride_vb + wide_kh * stride_vh, rn, stride_vn, rv, N, DV, not CHECK, EVEN_D)
    seed = tl.load(SEED + batch * seed_stride)
    noise_batch = tl.where(seed_stride == 0, batch, 0)
    acc_k, acc_v = tl.zeros([BN, BD], tl.float32), tl.zeros([BN, BDV], tl.float32)
    begin = (block * BN) // BM * BM if CAUSAL else 0
    for member in range(0, GROUP):
        head = key_head * GROUP + member
        wide_h = head.to(tl.int64)
        first_row = (wide_b * H + wide_h) * M
        mask = MASK + wide_b * stride_mb + wide_h * stride_mh
        mu = _load_rows(MU + wide_b * stride_ub + wide_h * stride_uh, rn, rn < N, 0.0, MOMENTS)
        acc_mu = tl.zeros([BN], tl.float32)
        for start in range(begin, M, BM):
            rm = start + tl.arange(0, BM)
            row, inside = first_row + rm, rm < M
            q = _load(Q + wide_b * stride_qb + wide_h * stride_qh, rm, stride_qm, rd, M, D, not CHECK, EVEN_D)
            grad = _load(GRAD + wide_b * stride_gb + wide_h * stride_gh, rm, stride_gm, rv, M, DV, not CHECK, EVEN_D)
            lse = tl.load(LSE + row, mask=inside, other=float("inf"))
            delta = tl.load(DELTA + row, mask=inside, other=0.0)
            clean_lse = _load_rows(CLEAN_LSE, row, inside, 0.0, CLEAN) * LOG2_E
            grad_lse = _load_rows(GRAD_LSE, row, inside, 0.0, CLEAN)
            grad_first = _load_rows(GRAD_FIRST, row, inside, 0.0, MOMENTS)
            grad_second = _load_rows(GRAD_SECOND, row, inside, 0.0, MOMENTS)
            weights, grad_scores, grad_mu = _grad_tile(
                q, k, v, grad, rm, rn, block * BN, lse, clean_lse, delta, grad_lse, grad_first, grad_second,
                mask, mu, seed, head, noise_batch, scale * LOG2_E, strength, M, N, stride_mm, stride_mn,
                BM, BN, WEIBULL, CLEAN, MOMENTS, CAUSAL, HAS_MASK, CHECK, FAST, PRECISION,
            )  # fmt: skip
            acc_v = tl.dot(tl.trans(weights.to(grad.dtype)), grad, acc_v, input_precision=PRECISION)
            grad_scores = _saturate(grad_scores, q.dtype)
            acc_k = tl.dot(tl.trans(grad_scores), q, acc_k, input_precision=PRECISION)
            if ONE_PASS:
                part = tl.dot(grad_scores, k, input_precision=PRECISION) * scale
                # counted in 32 bits within a head: in this loop a 64-bit product costs as much as a random number
                pointers = GRAD_Q + first_row * D + (rm[:, None] * D + rd[None, :])
                if CHECK or not EVEN_D:
                    tl.atomic_add(pointers, part, mask=inside[:, None] & (rd < D)[None, :], sem="relaxed")
                else:
                    tl.atomic_add(pointers, part, sem="relaxed")
            if MOMENTS:
                acc_mu += grad_mu
        if MOMENTS:
            tl.store(GRAD_MU + (wide_b * H + wide_h) * N + rn, acc_mu, mask=rn < N)
    if COLUMNS:
        # dT_j Σ_i q_i over the queries of each key
        for member in range(0, GROUP):
            head_row = wide_b * H + key_head * GROUP + member
            sums = _load(
                QUERY_SUMS + head_row * tl.where(stride_sum == 0, 1, N) * D, rn, stride_sum, rd, N, D, False, EVEN_D
            )
            acc_k += tl.load(GRAD_COLUMNS + head_row * N + rn, mask=rn < N, other=0.0)[:, None] * sums
    column = program.to(tl.int64) * N + rn
    inside_n = (rn < N)[:, None]
    tl.store(
        GRAD_K + column[:, None] * D + rd[None, :],
        _saturate(acc_k * scale, GRAD_K.dtype.element_ty),
        mask=inside_n & (rd < D)[None, :],
    )
    tl.store(
        GRAD_V + column[:, None] * DV + rv[None, :],
        _saturate(acc_v, GRAD_V.dtype.element_ty),
        mask=inside_n & (rv < DV)[None, :],
    )
