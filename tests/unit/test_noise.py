"""The noise is the function of (seed, b, h, i, j) that `noise.py` specifies, draw for draw."""

import math

import pytest
import torch

from bayesattn.noise import specification as noise
from helpers import philox_scalar

# Random123's kat_vectors: counter, key, words after 7 and after 10 rounds
ZEROS, ONES = (0,) * 6, (0xFFFFFFFF,) * 6
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
KNOWN_ANSWERS = [
    (ZEROS, 7, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (ONES, 7, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (PI, 7, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
    (ZEROS, 10, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (ONES, 10, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (PI, 10, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


def _philox(words: tuple[int, ...]) -> tuple[int, ...]:
    c0, c1, c2, c3, k0, k1 = (torch.tensor(word) for word in words)
    return tuple(int(word) for word in noise.philox((c0, c1, c2, c3), (k0, k1)))


@pytest.mark.parametrize(("words", "rounds", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers_of_random123(words, rounds, expected, monkeypatch):
    assert philox_scalar(words[:4], words[4:], rounds) == expected
    monkeypatch.setattr(noise, "PHILOX_ROUNDS", rounds)
    assert _philox(words) == expected


def test_philox_with_seven_rounds_equals_scalar_python():
    assert noise.PHILOX_ROUNDS == 7
    words = torch.randint(0, 2**32, (6, 200))
    words[:, ::10] |= 0x80000000  # the int64 products wrap only when both factors are large
    ours = torch.stack(noise.philox(tuple(words[:4]), tuple(words[4:])))
    for column in range(words.shape[1]):
        counter, key = words[:4, column].tolist(), words[4:, column].tolist()
        assert tuple(ours[:, column].tolist()) == philox_scalar(tuple(counter), tuple(key), 7)


def _uniform(seed: int, b: int, h: int, i: int, j: int) -> float:
    key = (seed % 2**32, (seed // 2**32) % 2**32)
    counter = (4 * (j // 32) + (j // 2) % 4, i, h, b)
    word = philox_scalar(counter, key, 7)[(j // 8) % 4]
    return ((word >> 16 if j % 2 else word & 0xFFFF) + 0.5) / 65536


def _normal(seed: int, b: int, h: int, i: int, j: int) -> float:
    radius = math.sqrt(-2.0 * math.log(_uniform(seed, b, h, i, j - j % 2)))
    angle = 2.0 * math.pi * _uniform(seed, b, h, i, j - j % 2 + 1)
    return radius * (math.sin(angle) if j % 2 else math.cos(angle))


@pytest.mark.parametrize("seed", [0, 7, 2**32 + 3, 2**63 - 1, -1, -(2**63)])
def test_each_draw_follows_the_specification(seed):
    shape = (2, 3, 5, 71)
    exponential = noise.exponential(seed, shape, dtype=torch.float64)
    normal = noise.normal(seed, shape, dtype=torch.float64)
    for entry in [(0, 0, 0, 0), (0, 1, 2, 70), *((1, 2, 4, j) for j in range(71))]:
        # one unit in the last place of log, sqrt, cos and sin each: 1e-14 is ample
        assert float(exponential[entry]) == pytest.approx(-math.log(_uniform(seed, *entry)), rel=1e-13)
        assert float(normal[entry]) == pytest.approx(_normal(seed, *entry), rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("draw", [noise.exponential, noise.normal])
def test_a_smaller_array_is_a_block_of_a_larger_one(draw):
    large = draw(42, (3, 5, 7, 67))
    for b, h, m, n in [(1, 1, 1, 1), (2, 3, 5, 8), (3, 5, 7, 11), (1, 2, 6, 32), (3, 1, 1, 33), (2, 5, 2, 66)]:
        assert torch.equal(draw(42, (b, h, m, n)), large[:b, :h, :m, :n])


@pytest.mark.parametrize("draw", [noise.exponential, noise.normal])
def test_a_seed_per_example_does_not_depend_on_the_place_in_the_batch(draw):
    seeds = torch.tensor([5, 2**40 + 1, -3])
    together = draw(seeds, (3, 2, 3, 11))
    for order in ([2, 0, 1], [1, 1], [0]):
        assert torch.equal(draw(seeds[order], (len(order), 2, 3, 11)), together[order])
    assert torch.equal(draw(5, (1, 2, 3, 11)), together[:1])


def test_draws_differ_in_every_coordinate_and_seed():
    draws = noise.exponential(1, (2, 2, 2, 16), dtype=torch.float64)
    for axis in range(4):
        assert not torch.equal(draws.select(axis, 0), draws.select(axis, 1))
    assert not torch.equal(draws, noise.exponential(2, (2, 2, 2, 16), dtype=torch.float64))
    assert not torch.equal(draws, noise.exponential(1 + 2**32, (2, 2, 2, 16), dtype=torch.float64))


def test_a_tensor_seed_equals_the_integer():
    assert torch.equal(noise.normal(torch.tensor(9), (2, 1, 3, 5)), noise.normal(9, (2, 1, 3, 5)))


@pytest.mark.parametrize("draw", [noise.exponential, noise.normal])
def test_the_random_integers_do_not_depend_on_the_dtype(draw):
    single, double = draw(3, (2, 3, 5, 7), dtype=torch.float32), draw(3, (2, 3, 5, 7), dtype=torch.float64)
    # float32 of log, sqrt, cos at arguments up to 2π: a few parts in 1e7 of values up to 12
    torch.testing.assert_close(single.double(), double, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_extreme_integers_give_finite_noise(dtype):
    halves = torch.tensor([-(2**15), -(2**15) + 1, -1, 0, 2**15 - 2, 2**15 - 1], dtype=torch.int16)
    uniform = noise.to_uniform(halves, dtype)
    expected = (torch.tensor([0, 1, 2**15 - 1, 2**15, 2**16 - 2, 2**16 - 1], dtype=torch.float64) + 0.5) / 2**16
    assert torch.equal(uniform.double(), expected)
    assert bool((torch.log(-torch.log(uniform)).isfinite()).all())


@pytest.mark.parametrize("draw", [noise.exponential, noise.normal])
def test_a_seed_leaves_torchs_generator_alone_and_no_seed_uses_it(draw):
    state = torch.get_rng_state()
    draw(1, (2, 3, 5, 7))
    assert torch.equal(torch.get_rng_state(), state)
    first, second = draw(None, (2, 3, 5, 7)), draw(None, (2, 3, 5, 7))
    assert not torch.equal(first, second)
    torch.set_rng_state(state)
    assert torch.equal(draw(None, (2, 3, 5, 7)), first)


def test_draw_seed_is_governed_by_manual_seed():
    torch.manual_seed(3)
    first = [int(noise.draw_seed()) for _ in range(5)]
    torch.manual_seed(3)
    assert [int(noise.draw_seed()) for _ in range(5)] == first
    assert len(set(first)) == 5
    assert all(0 <= seed < 2**63 for seed in first)


@pytest.mark.parametrize("shape", [(0, 2, 3, 5), (2, 0, 3, 5), (2, 3, 0, 5), (2, 3, 5, 0), (1, 1, 1, 1)])
@pytest.mark.parametrize("seed", [None, 4])
def test_empty_and_single_shapes(shape, seed):
    assert noise.exponential(seed, shape).shape == shape
    assert noise.normal(seed, shape).shape == shape


def test_dropout_follows_the_specification():
    """Bits of the counter with b + 2^31; a seed per example has 2^31 alone."""
    seed, shape, p = (5 << 33) + 7, (2, 3, 5, 37), 0.3
    dropped, kept = noise.dropout_numbers(p)
    factors = noise.dropout_factor(seed, shape, p)
    for b, h, i, j in ((0, 0, 0, 0), (1, 2, 4, 36), (1, 0, 3, 17), (0, 2, 1, 31)):
        counter = (4 * (j // 32) + (j // 2) % 4, i, h, b + 2**31)
        word = philox_scalar(counter, (seed % 2**32, seed // 2**32), noise.PHILOX_ROUNDS)[(j // 8) % 4]
        half = word >> 16 if j % 2 else word & 0xFFFF
        assert float(factors[b, h, i, j]) == pytest.approx(0.0 if half < dropped else kept)
    per_example = noise.dropout_factor(torch.tensor([seed, seed]), shape, p)
    assert torch.equal(per_example[0], factors[0])
    assert torch.equal(per_example[0], per_example[1])
    assert not noise.dropout_factor(seed, shape, 1.0).any()
    assert bool((noise.dropout_factor(seed, shape, 0.0) == 1.0).all())
