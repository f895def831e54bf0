"""The noise has the distribution it claims and no visible dependence.

Seeds are fixed, so nothing here is flaky; `FAILURE_RATE` (5.7e-7 a check, about 400 checks) is the chance that a
perfect generator would have failed with another seed.
"""

import math

import numpy as np
import pytest
import scipy.stats
import torch

from bayesattn import AttentionConfig, noise
from bayesattn.functional import attention_weights
from helpers import FAILURE_RATE, STANDARD_ERRORS, assert_within_standard_errors

DRAWS = 10_000_000
LARGE = (2, 5, 1000, 1000)
# Dvoretzky–Kiefer–Wolfowitz: P(sup |F_n − F| > d) ≤ 2 exp(−2 n d²); for n = 1e7 this is 8.7e-4
KS_LIMIT = math.sqrt(math.log(2.0 / FAILURE_RATE) / (2 * DRAWS))


def _ks_distance(draws: torch.Tensor, cdf) -> float:
    values = cdf(np.sort(draws.flatten().numpy()))
    steps = np.arange(values.size + 1) / values.size
    return float(max((steps[1:] - values).max(), (values - steps[:-1]).max()))


@pytest.mark.parametrize("seed", [1, None], ids=["counter", "generator"])
def test_exponential_draws_follow_the_cdf_at_ten_million(seed):
    assert math.prod(LARGE) == DRAWS
    assert _ks_distance(noise.exponential(seed, LARGE), scipy.stats.expon.cdf) < KS_LIMIT


@pytest.mark.parametrize("seed", [2, None], ids=["counter", "generator"])
def test_normal_draws_follow_the_cdf_at_ten_million(seed):
    assert _ks_distance(noise.normal(seed, LARGE), scipy.stats.norm.cdf) < KS_LIMIT


@pytest.mark.parametrize("source", ["counter", "generator"])
def test_the_sixteen_bit_integers_are_uniform_on_their_grid(source):
    """Pearson's χ² over all 65536 values: sensitive where the KS test, with limit 8.7e-4, cannot see the grid."""
    halves = (
        noise.counter_halves(3, LARGE, "cpu")[..., : LARGE[-1]]
        if source == "counter"
        else noise.generator_halves(LARGE, "cpu")
    )
    counts = np.bincount(halves.flatten().numpy().astype(np.int64) + 2**15, minlength=2**16)
    assert counts.size == 2**16
    expected = DRAWS / 2**16
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    assert scipy.stats.chi2.sf(chi_squared, 2**16 - 1) > FAILURE_RATE
    assert scipy.stats.chi2.cdf(chi_squared, 2**16 - 1) > FAILURE_RATE  # nor too even


def test_the_grid_is_within_two_to_the_minus_seventeen_of_the_exact_cdf():
    grid = noise.to_uniform(torch.arange(-(2**15), 2**15, dtype=torch.int16), torch.float64)
    exact = np.sort(scipy.stats.expon.cdf(-torch.log(grid).numpy()))
    below, above = np.arange(2**16) / 2**16, np.arange(1, 2**16 + 1) / 2**16
    # rounding of log and exp at 1e-16 is far below the grid
    assert max(np.abs(exact - below).max(), np.abs(exact - above).max()) <= 2.0**-17 + 1e-12


def _is_uncorrelated(first: torch.Tensor, second: torch.Tensor) -> bool:
    first, second = first.double().flatten(), second.double().flatten()
    correlation = float(torch.corrcoef(torch.stack([first, second]))[0, 1])
    return abs(correlation) * math.sqrt(first.numel()) < STANDARD_ERRORS


SHAPE = (4, 6, 48, 504)  # 580 608 draws


@pytest.mark.parametrize("draw", [noise.exponential, noise.normal])
@pytest.mark.parametrize("power", [1, 2], ids=["draws", "squares"])
@pytest.mark.parametrize("seed", [11, None], ids=["counter", "generator"])
def test_no_correlation_along_any_axis(draw, power, seed):
    """Batch entries, heads, rows, columns; column lags inside a word (1), a call (8, 16, 24), a group of 32 and beyond."""
    draws = draw(seed, SHAPE) ** power
    lags = [
        (0, 1),
        (1, 1),
        (2, 1),
        (2, 2),
        (2, 8),
        *((3, lag) for lag in (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 24, 31, 32, 33, 64)),
    ]
    for axis, lag in lags:
        length = SHAPE[axis] - lag
        assert _is_uncorrelated(draws.narrow(axis, 0, length), draws.narrow(axis, lag, length)), (axis, lag)


@pytest.mark.parametrize("draw", [noise.exponential, noise.normal])
def test_no_correlation_between_the_two_axes_of_a_square(draw):
    """Counter words for query and key must not be interchangeable."""
    draws = draw(5, (1, 1, 504, 504))
    upper = torch.ones(504, 504, dtype=torch.bool).triu(1)
    assert _is_uncorrelated(draws[0, 0][upper], draws[0, 0].T[upper])


@pytest.mark.parametrize("draw", [noise.exponential, noise.normal])
@pytest.mark.parametrize("step", [1, 2, 2**31, 2**32, 2**33 + 1])
def test_no_correlation_between_neighboring_seeds(draw, step):
    assert _is_uncorrelated(draw(100, SHAPE), draw(100 + step, SHAPE))


def test_no_correlation_between_examples_with_consecutive_seeds():
    draws = noise.exponential(torch.arange(40), (40, 3, 37, 104))
    assert _is_uncorrelated(draws[:-1], draws[1:])


@pytest.mark.parametrize("seed", [21, None], ids=["counter", "generator"])
def test_moments_and_tails_of_the_exponential(seed):
    draws = noise.exponential(seed, (1, 4, 1000, 1000), dtype=torch.float64)
    # the grid's own bias in the k-th moment is below 2^-17 · k · 11.8^(k−1), under the standard error for k ≤ 3
    for power, moment in ((1, 1.0), (2, 2.0), (3, 6.0)):
        assert_within_standard_errors(draws**power, moment, power)
    assert_within_standard_errors(torch.log(draws), -np.euler_gamma, "E[ln E], the term of the Weibull KL")
    for threshold in (0.001, 0.01, 0.1, 1.0, 3.0, 6.0, 9.0):
        # at a threshold between grid points the exact probability is off by at most 2^-17
        share = (draws > threshold).double()
        slack = STANDARD_ERRORS * float(share.std()) / math.sqrt(share.numel()) + 2.0**-17
        assert abs(float(share.mean()) - math.exp(-threshold)) < slack, threshold
    assert float(draws.min()) >= 7.6e-6
    assert float(draws.max()) <= 11.8


def test_moments_and_tails_of_the_normal():
    draws = noise.normal(22, (1, 4, 1000, 1000), dtype=torch.float64)
    for power, moment in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)):
        assert_within_standard_errors(draws**power, moment, power)
    for threshold in (0.5, 1.0, 2.0, 3.0, 4.0):
        assert_within_standard_errors((draws.abs() > threshold).double(), 2 * scipy.stats.norm.sf(threshold), threshold)
    assert float(draws.abs().max()) <= 4.86


def test_the_two_normals_of_a_word_are_independent():
    """Box–Muller gives a cosine and a sine of one radius: joint tails must factorise."""
    pairs = noise.normal(23, (1, 4, 1000, 1000)).unflatten(-1, (-1, 2))
    for threshold in (0.5, 1.0, 2.0):
        both = (pairs.abs() > threshold).all(dim=-1)
        assert_within_standard_errors(both.double(), (2 * scipy.stats.norm.sf(threshold)) ** 2, threshold)


@pytest.mark.parametrize("seed", [31, None], ids=["counter", "generator"])
@pytest.mark.parametrize("ratio", [0.02, 0.5, 3.0, 200.0])
def test_the_mean_weight_of_two_keys_has_its_closed_form(ratio, seed):
    """k = 1: W = a E₁ / (a E₁ + E₂) with E[W] = a (a − 1 − ln a) / (a − 1)²."""
    scores = torch.tensor([math.log(ratio), 0.0], dtype=torch.float64).expand(1, 1, 400_000, 2)
    weights, _ = attention_weights(scores, config=AttentionConfig("BAM-NOKL", weibull_k=1.0), seed=seed)
    assert_within_standard_errors(weights[..., 0], ratio * (ratio - 1 - math.log(ratio)) / (ratio - 1) ** 2, ratio)


@pytest.mark.parametrize("seed", [32, None], ids=["counter", "generator"])
def test_the_mean_lognormal_weight_of_two_keys_equals_quadrature(seed):
    """The difference of two scores is Gaussian, so E[W] is a one-dimensional integral."""
    sigma, gap = 0.8, 1.3
    nodes, factors = np.polynomial.hermite_e.hermegauss(80)
    expected = float((factors / (1 + np.exp(-(gap + sigma * math.sqrt(2) * nodes)))).sum() / math.sqrt(2 * math.pi))
    scores = torch.tensor([gap, 0.0], dtype=torch.float64).expand(1, 1, 400_000, 2)
    weights, _ = attention_weights(scores, config=AttentionConfig("BAM-LF", sigma_q=sigma), seed=seed)
    assert_within_standard_errors(weights[..., 0], expected)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.97])
def test_dropout_keeps_the_mean_and_does_not_look_at_the_noise(p):
    shape = (1, 4, 700, 700)
    factors = noise.dropout_factor(41, shape, p, dtype=torch.float64)
    assert_within_standard_errors(factors, 1.0, p)
    # the share of the grid that is dropped is within half a step of p
    assert abs(noise.dropout_numbers(p)[0] / 2**16 - p) <= 2.0**-17
    draws = noise.exponential(41, shape, dtype=torch.float64)
    assert_within_standard_errors((factors - 1.0) * (draws - 1.0), 0.0, p)
