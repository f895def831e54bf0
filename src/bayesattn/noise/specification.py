"""Counter-based noise: every draw is a function of (seed, batch, head, query index, key index).

Any backend that follows this specification reproduces the noise draw for draw, in any order and with any tiling.
Backward passes, recomputation and other kernels thus use the same sample.

    counter  c = (4 (j div 32) + (j div 2) mod 4, i, h, b)      j key, i query, h head, b batch entry; each below 2^32
    key          (seed mod 2^32, seed div 2^32)
    words    w_0 … w_3 = Philox-4x32-7(c, key)                             Salmon et al. 2011
    bits     r = the low (j even) or high (j odd) half of w_t,  t = (j div 8) mod 4
    uniform  u = (r + 1/2) / 2^16                                           in (0, 1), never 0 or 1
    E        −ln u                                                          ~ Exp(1)
    ε        keys 2l and 2l+1 share a word: R = √(−2 ln u_{2l}), θ = 2π u_{2l+1};
             ε_{2l} = R cos θ, ε_{2l+1} = R sin θ                           ~ N(0, 1), Box–Muller
    dropout  an entry is dropped where r < round(2^16 p), with b + 2^31 in place of b: separate bits

One call serves eight keys of a group of 32: those of a row that one GPU thread holds after the tensor cores have computed
the scores. Scores and noise are thus in the same thread.

Sixteen bits per draw halve the generator's cost, and the error is far too small to matter for attention: the CDF is
within 2^-17 of the exact one, E lies in [7.6e-6, 11.8] and |ε| ≤ 4.86. `tests/statistical` measures both.

A seed is one 64-bit integer for the whole call, or one per batch entry. With one per entry the counter's
batch word is 0, so an example's noise does not depend on its position in the batch.
"""

import math
from typing import Any

import torch
from jaxtyping import Float, Int, Int16
from torch import Tensor

from bayesattn.config import AttentionConfig

PHILOX_ROUNDS = 7
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
GROUP = 32

_LOW_32 = 0xFFFFFFFF
_LOW_16 = 0xFFFF
_HALF_RANGE = 0x8000
_RANGE = 0x10000
# added to the batch word for the bits that decide dropout
DROPOUT_STREAM = 1 << 31

Seed = int | Int[Tensor, ""] | Int[Tensor, " b"]
Shape4 = tuple[int, int, int, int]


def draw_seed(device: torch.device | str = "cpu") -> Int[Tensor, ""]:
    """Draw a 63-bit seed from torch's generator for `device`, so `torch.manual_seed` controls it.

    Example:
        >>> with torch.random.fork_rng(devices=[]):
        ...     first = torch.manual_seed(0) and draw_seed()
        ...     again = torch.manual_seed(0) and draw_seed()
        >>> first.dtype, bool(first == again)
        (torch.int64, True)
    """
    return torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device=device)


def as_seed(seed: Seed, batch: int, device: torch.device | str) -> Int[Tensor, ""] | Int[Tensor, " b"]:
    """Check a seed and return it as an int64 tensor on `device`: one number for all, or one per batch entry.

    Example:
        >>> as_seed(7, batch=2, device="cpu")
        tensor(7)
        >>> as_seed(torch.tensor([7, 8]), batch=2, device="cpu")  # one per batch entry
        tensor([7, 8])
    """
    if isinstance(seed, Tensor):
        is_fine = seed.dtype == torch.int64 and (seed.ndim == 0 or tuple(seed.shape) == (batch,))
        value = f"a {seed.dtype} tensor of shape {tuple(seed.shape)}"
    else:
        is_fine = isinstance(seed, int) and not isinstance(seed, bool) and -(2**63) <= seed < 2**63
        value = repr(seed)
    if not is_fine:
        raise ValueError(f"seed must be a 64-bit integer, or an int64 tensor with one or {batch} entries, got {value}")
    return torch.as_tensor(seed, dtype=torch.int64, device=device)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Return the four words of Philox-4x32-7 as int64 tensors with values below 2^32.

    The arithmetic is in int64. The product of two 32-bit words wraps modulo 2^64, so all 64 bits are right, and the mask
    after the arithmetic shift removes the sign.

    Example:
        >>> zero = torch.tensor(0)
        >>> [hex(int(word)) for word in philox((zero, zero, zero, zero), (zero, zero))]
        ['0x5f6fb709', '0xd893f64', '0x4f121f81', '0x4f730a48']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(PHILOX_ROUNDS):
        product_0 = c0 * PHILOX_MULTIPLIERS[0]
        product_1 = c2 * PHILOX_MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product_1 >> 32) & _LOW_32) ^ c1 ^ k0,
            product_1 & _LOW_32,
            ((product_0 >> 32) & _LOW_32) ^ c3 ^ k1,
            product_0 & _LOW_32,
        )
        k0 = (k0 + PHILOX_WEYL[0]) & _LOW_32
        k1 = (k1 + PHILOX_WEYL[1]) & _LOW_32
    return [c0, c1, c2, c3]


def counter_halves(seed: Seed, shape: Shape4, device: torch.device | str, *, stream: int = 0) -> Int16[Tensor, "b h m n32"]:
    """Return the 16-bit integers of each entry, shifted by −2^15 to fit int16; the keys are padded to groups of 32.

    Args:
        seed: One number for all, or one per batch entry.
        shape: Batch, heads, queries, keys.
        device: Device of the result.
        stream: Added to the batch word: 0 for noise, or `DROPOUT_STREAM`.

    Example:
        >>> halves = counter_halves(0, (1, 2, 3, 5), "cpu")  # batch, heads, queries, keys
        >>> halves.shape, halves.dtype
        (torch.Size([1, 2, 3, 32]), torch.int16)
    """
    b, h, m, n = shape
    seed = as_seed(seed, b, device)
    per_example = seed.ndim == 1

    def axis(length: int, position: int) -> Tensor:
        view = [1, 1, 1, 1]
        view[position] = length
        return torch.arange(length, device=device).view(view)

    groups = -(-n // GROUP)
    batch = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=device) if per_example else axis(b, 0)
    seed = seed.view(-1, 1, 1, 1)
    words = philox(
        (axis(4 * groups, 3), axis(m, 2), axis(h, 1), batch + stream),
        (seed & _LOW_32, (seed >> 32) & _LOW_32),
    )
    halves = [torch.stack([word & _LOW_16, word >> 16], dim=-1).unflatten(-2, (groups, 4)) for word in words]
    # axes: …, group, word, call within the group, half → the key index
    keys = torch.stack(halves, dim=-3) - _HALF_RANGE
    return keys.to(torch.int16).expand(b, h, m, groups, 4, 4, 2).flatten(-4)


def generator_halves(
    shape: Shape4, device: torch.device | str, generator: torch.Generator | None = None
) -> Int16[Tensor, "b h m n"]:
    """Draw integers like those of `counter_halves` from torch's generator, without a seed: on a CPU several times faster.

    Example:
        >>> halves = generator_halves((1, 2, 3, 5), "cpu", torch.Generator().manual_seed(0))
        >>> halves.shape, halves.dtype
        (torch.Size([1, 2, 3, 5]), torch.int16)
    """
    numel = math.prod(shape)
    size, limits = (-(-numel // 4),), (-(2**63), 2**63 - 1)
    # torch.compile supports data-dependent sizes only where no generator is passed, not even None
    named: dict[str, Any] = {} if generator is None else {"generator": generator}
    words = torch.randint(*limits, size, dtype=torch.int64, device=device, **named)
    return words.view(torch.int16)[:numel].view(shape)


def to_uniform(halves: Int16[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """Return u = (r + 1/2) / 2^16 from the shifted integers.

    Example:
        >>> to_uniform(torch.tensor([-32768, 0, 32767], dtype=torch.int16), torch.float64)
        tensor([7.6294e-06, 5.0001e-01, 9.9999e-01], dtype=torch.float64)
    """
    return halves.to(dtype).add_(_HALF_RANGE + 0.5).mul_(2.0**-16)


def to_exponential(halves: Int16[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """Return E = −ln u from the shifted integers.

    Example:
        >>> to_exponential(torch.tensor([-32768, 0, 32767], dtype=torch.int16), torch.float64)
        tensor([1.1784e+01, 6.9313e-01, 7.6294e-06], dtype=torch.float64)
    """
    return to_uniform(halves, dtype).log_().neg_()


def to_normal(halves: Int16[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """Return ε by Box–Muller from the shifted integers; neighbors on the last axis, whose length is even, share a word.

    Example:
        >>> to_normal(torch.tensor([0, -32768, 0, 0], dtype=torch.int16), torch.float64)  # two words, two keys each
        tensor([ 1.1774e+00,  5.6441e-05, -1.1774e+00, -5.6441e-05],
               dtype=torch.float64)
    """
    pairs = to_uniform(halves, dtype).unflatten(-1, (-1, 2))
    radius, angle = torch.sqrt(-2.0 * torch.log(pairs[..., 0])), 2.0 * math.pi * pairs[..., 1]
    return torch.stack([radius * torch.cos(angle), radius * torch.sin(angle)], dim=-1).flatten(-2)


def exponential(
    seed: Seed | None,
    shape: Shape4,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "b h m n"]:
    """Return E ~ Exp(1) for each entry; strictly positive, so its logarithm is finite.

    Args:
        seed: Seed of the counter-based draw, or None to draw from torch's generator.
        shape: Batch, heads, queries, keys.
        device: Device of the result.
        dtype: Type of the result; the random integers do not depend on it.
        generator: Used without a seed, instead of torch's default generator.

    Example:
        >>> draws = exponential(0, (1, 1, 1, 10_000))
        >>> bool((draws > 0).all()), bool((draws.mean() - 1).abs() < 0.05)
        (True, True)
    """
    halves = generator_halves(shape, device, generator) if seed is None else counter_halves(seed, shape, device)
    return to_exponential(halves[..., : shape[-1]], dtype)


def normal(
    seed: Seed | None,
    shape: Shape4,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "b h m n"]:
    """Return ε ~ N(0, 1) for each entry, with a seed two per word by Box–Muller; arguments as for `exponential`.

    Example:
        >>> draws = normal(0, (1, 1, 1, 10_000))
        >>> bool(draws.mean().abs() < 0.05), bool((draws.std() - 1).abs() < 0.05)
        (True, True)
        >>> torch.equal(draws, normal(0, (1, 1, 1, 10_000)))  # the same seed, the same draws
        True
    """
    if seed is None:
        # torch's own sampler is exact and faster, and without a seed there are no draws to match
        return torch.randn(shape, device=device, dtype=dtype, generator=generator)
    return to_normal(counter_halves(seed, shape, device), dtype)[..., : shape[-1]]


def log_noise(
    seed: Seed | None,
    shape: Shape4,
    config: AttentionConfig,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "b h m n"]:
    """Return the noise that sampling adds to the scores, up to a constant per row: ln E / k, or σ_q ε.

    Example:
        >>> noise = log_noise(0, (1, 1, 1, 10_000), AttentionConfig("BAM-LF", sigma_q=0.3))
        >>> bool((noise.std() - 0.3).abs() < 0.01)
        True
    """
    options = {"device": device, "dtype": dtype, "generator": generator}
    if config.family == "weibull":
        return exponential(seed, shape, **options).log_().div_(config.weibull_k)
    return normal(seed, shape, **options).mul_(config.sigma_q)


def log_noise_variance(config: AttentionConfig) -> float:
    """Return the variance of `log_noise`: π²/(6k²), or σ_q².

    Example:
        >>> log_noise_variance(AttentionConfig("BAM-LF", sigma_q=0.5))
        0.25
        >>> round(log_noise_variance(AttentionConfig("BAM-WF", weibull_k=10.0)), 6)  # π² / (6 k²)
        0.016449
    """
    if config.family == "weibull":
        return math.pi**2 / (6.0 * config.weibull_k**2)
    return config.sigma_q**2


def dropout_numbers(p: float) -> tuple[int, float]:
    """Return how many of the 2^16 values of an entry's bits drop it, and the factor of entries that are kept.

    Example:
        >>> dropout_numbers(0.25)
        (16384, 1.3333333333333333)
    """
    dropped = round(_RANGE * p)
    return dropped, _RANGE / (_RANGE - dropped) if dropped < _RANGE else 0.0


def dropout_factor(
    seed: Seed, shape: Shape4, p: float, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Float[Tensor, "b h m n"]:
    """Return the factors of dropout: 0 with probability p (to 2^-17), otherwise the number that preserves the mean.

    Args:
        seed: Seed of the noise; dropout uses separate bits.
        shape: Batch, heads, queries, keys.
        p: Probability of 0.
        device: Device of the result.
        dtype: Type of the result.

    Example:
        >>> factor = dropout_factor(0, (1, 1, 1, 10_000), 0.5)
        >>> factor.unique(), bool((factor.mean() - 1).abs() < 0.05)
        (tensor([0., 2.]), True)
    """
    dropped, kept = dropout_numbers(p)
    halves = counter_halves(seed, shape, device, stream=DROPOUT_STREAM)[..., : shape[-1]]
    return (halves.to(torch.int32) >= dropped - _HALF_RANGE).to(dtype) * kept
