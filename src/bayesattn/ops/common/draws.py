"""Random numbers inside a kernel: the noise of `bayesattn.noise`, one tile at a time.

Scores and noise are in units of log 2, because the hardware has exp2 and log2. A tile of scores is always [BM, BN],
queries by keys, so that in every kernel the eight draws of a Philox call belong to one thread.
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
    """Return log2(x): FAST is one instruction with an absolute error of 2^-22, tl.log2 a dozen accurate ones."""
    if FAST:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.log2(x)


@triton.jit
def fast_exp2(x, FAST: tl.constexpr):
    """Return 2^x; FAST is the hardware's instruction."""
    if FAST:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.exp2(x)


@triton.jit
def log2_of_minus_log2(x, FAST: tl.constexpr):
    """Return log2(−log2(x)).

    FAST is one piece of assembly, in which the negation is free. Triton's minus is a subtraction from zero.
    """
    if FAST:
        return tl.inline_asm_elementwise(
            "{.reg .f32 t; lg2.approx.ftz.f32 t, $1; neg.f32 t, t; lg2.approx.ftz.f32 $0, t;}",
            "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.log2(-tl.log2(x))


@triton.jit
def cos_sin(turns, FAST: tl.constexpr):
    """Return cosine and sine of turns in (−1/2, 1/2), where the hardware's instructions are exact to 2^-20."""
    angle = turns * TWO_PI
    if FAST:
        cos = tl.inline_asm_elementwise("cos.approx.ftz.f32 $0, $1;", "=f,f", [angle], tl.float32, True, 1)
        return cos, tl.inline_asm_elementwise("sin.approx.ftz.f32 $0, $1;", "=f,f", [angle], tl.float32, True, 1)
    else:
        return tl.cos(angle), tl.sin(angle)


@triton.jit
def uniform(word, base, HIGH: tl.constexpr, FAST: tl.constexpr):
    """Return (r + 1/2) / 2^16 for one half r of a word; `base` holds the bits of 128.0.

    As the last bits of its mantissa, r makes 128 + r / 2^16: a byte permutation instead of a conversion. This number,
    128 − 2^-17 and their difference are exact in float32.
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
    """Return the log2-noise of two neighboring keys from one word."""
    # 128.0, hidden from the compiler, which would put a constant into the instruction and load the permutation each time
    base = tl.where(strength < 0, 0, 0x43000000).to(tl.uint32)
    low, high = uniform(word, base, False, FAST), uniform(word, base, True, FAST)
    if WEIBULL:
        # log2(E / ln 2): the factor ln 2 is the same for a row and cancels
        return strength * log2_of_minus_log2(low, FAST), strength * log2_of_minus_log2(high, FAST)
    else:
        # half a turn less flips both signs; the minus flips them back
        radius = tl.sqrt(fast_log2(low, FAST) * MINUS_2_LN_2) * -strength
        cos, sin = cos_sin(high - 0.5, FAST)
        return radius * cos, radius * sin


@triton.jit
def _words(seed, rm, start_n, head, batch, BM: tl.constexpr, BN: tl.constexpr):
    """Return the four words of a tile's Philox calls, each [BM, BN / 32, 4]."""
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
    """Arrange the numbers from both halves of four words in the order of their keys.

    Call t of group g serves keys 32 g + 8 w + 2 t + half, for its four words w and two halves. In the accumulator layout
    of the tensor cores, one thread holds exactly these keys of a row, so no data moves between threads.
    """
    pairs = tl.join(tl.join(tl.join(a0, a1), tl.join(b0, b1)), tl.join(tl.join(c0, c1), tl.join(d0, d1)))
    # axes: row, g, t, half, low and high bit of w → row, (g, w, t, half)
    return tl.reshape(tl.permute(pairs, (0, 1, 5, 4, 2, 3)), [BM, BN])


@triton.jit
def noise_tile(
    seed, rm, start_n, head, batch, strength, BM: tl.constexpr, BN: tl.constexpr, WEIBULL: tl.constexpr, FAST: tl.constexpr
):
    """Return the log2-noise of a tile, as specified in `bayesattn.noise`."""
    # Triton's type stub declares that calling a device function outside a kernel raises
    w0, w1, w2, w3 = _words(seed, rm, start_n, head, batch, BM, BN)  # type: ignore[misc]
    a0, a1 = draw(w0, strength, WEIBULL, FAST)
    b0, b1 = draw(w1, strength, WEIBULL, FAST)
    c0, c1 = draw(w2, strength, WEIBULL, FAST)
    d0, d1 = draw(w3, strength, WEIBULL, FAST)
    return _as_tile(a0, a1, b0, b1, c0, c1, d0, d1, BM, BN)


@triton.jit
def _kept(word, dropped, kept):
    """Return the dropout factors of two neighboring keys."""
    return tl.where((word & 0xFFFF) >= dropped, kept, 0.0), tl.where((word >> 16) >= dropped, kept, 0.0)


@triton.jit
def dropout_tile(seed, rm, start_n, head, batch, dropped, kept, BM: tl.constexpr, BN: tl.constexpr):
    """Return the dropout factors of a tile: 0 or `kept`."""
    w0, w1, w2, w3 = _words(  # type: ignore[misc]
        seed, rm, start_n, head, batch.to(tl.uint32) + DROPOUT_STREAM, BM, BN
    )
    a0, a1 = _kept(w0, dropped, kept)
    b0, b1 = _kept(w1, dropped, kept)
    c0, c1 = _kept(w2, dropped, kept)
    d0, d1 = _kept(w3, dropped, kept)
    return _as_tile(a0, a1, b0, b1, c0, c1, d0, d1, BM, BN)
