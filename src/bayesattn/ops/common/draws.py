"""Random numbers inside a kernel: what `bayesattn.noise` specifies, tile by tile.

Scores and noise are in units of log 2, because the hardware has exp2 and log2. A tile of scores is always [BM, BN],
queries by keys, so that the eight draws of one Philox call fall into one thread in every kernel.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
MINUS_2_LN_2 = tl.constexpr(-1.3862943611198906)
TWO_PI = tl.constexpr(6.283185307179586)
ROUNDS = tl.constexpr(7)
UNIFORM_SHIFT = tl.constexpr(128.0 - 2.0**-17)
DROPOUT_STREAM = tl.constexpr(1 << 31)


@triton.jit
def fast_log2(x, FAST: tl.constexpr):
    """log2(x); tl.log2 is an accurate routine of a dozen instructions, the hardware's own has an absolute error of 2^-22."""
    if FAST:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.log2(x)


@triton.jit
def fast_exp2(x, FAST: tl.constexpr):
    """2^x by the hardware."""
    if FAST:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.exp2(x)


@triton.jit
def log2_of_minus_log2(x, FAST: tl.constexpr):
    """log2(−log2(x)) in one piece: Triton's minus is a subtraction from zero, the hardware's logarithm negates for free."""
    if FAST:
        return tl.inline_asm_elementwise(
            "{.reg .f32 t; lg2.approx.ftz.f32 t, $1; neg.f32 t, t; lg2.approx.ftz.f32 $0, t;}",
            "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.log2(-tl.log2(x))


@triton.jit
def cos_sin(turns, FAST: tl.constexpr):
    """Return cosine and sine of turns in (−1/2, 1/2), where the hardware's own are exact to 2^-20."""
    angle = turns * TWO_PI
    if FAST:
        cos = tl.inline_asm_elementwise("cos.approx.ftz.f32 $0, $1;", "=f,f", [angle], tl.float32, True, 1)
        return cos, tl.inline_asm_elementwise("sin.approx.ftz.f32 $0, $1;", "=f,f", [angle], tl.float32, True, 1)
    else:
        return tl.cos(angle), tl.sin(angle)


@triton.jit
def uniform(word, base, HIGH: tl.constexpr, FAST: tl.constexpr):
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
def draw(word, strength, WEIBULL: tl.constexpr, FAST: tl.constexpr):
    """Turn one word into the log2-noise of two neighboring keys."""
    # 128.0, hidden from the compiler: it would write the constant into the instruction and fetch the permutation each time
    base = tl.where(strength < 0, 0, 0x43000000).to(tl.uint32)
    low, high = uniform(word, base, False, FAST), uniform(word, base, True, FAST)
    if WEIBULL:
        # log2 of E up to the factor ln 2, which a row shares
        return strength * log2_of_minus_log2(low, FAST), strength * log2_of_minus_log2(high, FAST)
    else:
        # half a turn back, and both signs with it
        radius = tl.sqrt(fast_log2(low, FAST) * MINUS_2_LN_2) * -strength
        cos, sin = cos_sin(high - 0.5, FAST)
        return radius * cos, radius * sin


@triton.jit
def _words(seed, rm, start_n, head, batch, BM: tl.constexpr, BN: tl.constexpr):
    """Return the four words of every Philox call of a tile: [BM, BN / 32, 4]."""
    calls = 4 * (start_n // 32 + tl.arange(0, BN // 32))[:, None] + tl.arange(0, 4)[None, :]
    zero = tl.zeros([BM, BN // 32, 4], tl.uint32)
    return tl.philox(
        seed,
        zero + calls.to(tl.uint32)[None, :, :],
        zero + rm.to(tl.uint32)[:, None, None],
        zero + head.to(tl.uint32),
        zero + batch.to(tl.uint32),
        ROUNDS,
    )


@triton.jit
def _as_tile(a0, a1, b0, b1, c0, c1, d0, d1, BM: tl.constexpr, BN: tl.constexpr):
    """Put the numbers made from the halves of four words where their keys are.

    A call serves keys 32 g + 8 w + 2 t + half for its four words w and two halves: exactly those that one thread
    holds of a row in the tensor cores' accumulator layout, so nothing has to be moved between threads.
    """
    pairs = tl.join(tl.join(tl.join(a0, a1), tl.join(b0, b1)), tl.join(tl.join(c0, c1), tl.join(d0, d1)))
    # axes: row, g, t, half, low and high bit of w → row, (g, w, t, half)
    return tl.reshape(tl.permute(pairs, (0, 1, 5, 4, 2, 3)), [BM, BN])


@triton.jit
def noise_tile(
    seed, rm, start_n, head, batch, strength, BM: tl.constexpr, BN: tl.constexpr, WEIBULL: tl.constexpr, FAST: tl.constexpr
):
    """Return the log2-noise of a tile, as `bayesattn.noise` specifies it."""
    # Triton's type stub declares that calling a device function outside a kernel raises
    w0, w1, w2, w3 = _words(seed, rm, start_n, head, batch, BM, BN)  # type: ignore[misc]
    a0, a1 = draw(w0, strength, WEIBULL, FAST)
    b0, b1 = draw(w1, strength, WEIBULL, FAST)
    c0, c1 = draw(w2, strength, WEIBULL, FAST)
    d0, d1 = draw(w3, strength, WEIBULL, FAST)
    return _as_tile(a0, a1, b0, b1, c0, c1, d0, d1, BM, BN)


@triton.jit
def _kept(word, dropped, kept):
    """Return the factors of two neighboring keys."""
    return tl.where((word & 0xFFFF) >= dropped, kept, 0.0), tl.where((word >> 16) >= dropped, kept, 0.0)


@triton.jit
def dropout_tile(seed, rm, start_n, head, batch, dropped, kept, BM: tl.constexpr, BN: tl.constexpr):
    """Return what dropout multiplies the weights of a tile by: 0, or `kept`."""
    w0, w1, w2, w3 = _words(  # type: ignore[misc]
        seed, rm, start_n, head, batch.to(tl.uint32) + DROPOUT_STREAM, BM, BN
    )
    a0, a1 = _kept(w0, dropped, kept)
    b0, b1 = _kept(w1, dropped, kept)
    c0, c1 = _kept(w2, dropped, kept)
    d0, d1 = _kept(w3, dropped, kept)
    return _as_tile(a0, a1, b0, b1, c0, c1, d0, d1, BM, BN)
