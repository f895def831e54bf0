"""Closed-form KLs: right by quadrature, right gradients, finite at every setting of the paper."""

import math

import numpy as np
import pytest
import scipy.integrate
import torch
from torch.distributions import Gamma, Weibull, kl_divergence

from bayesattn.divergences import (
    kl_lognormal_lognormal,
    kl_weibull_gamma,
    lognormal_constant,
    weibull_gamma_key_term,
)
from helpers import assert_finite, kl_lognormal_oracle, kl_weibull_gamma_oracle, number

POINTS = [(0.3, 10.0, 0.2, 1e-2), (-1.5, 5.0, 1.7, 2.0), (2.0, 1.0, 0.05, 1e-4), (-0.5, 0.7, 2.2, 1.3), (0.0, 1.0, 1.0, 1.0)]
LOG_POINTS = [(0.4, 0.1, -2.0, 1e3), (-1.0, 0.5, 0.3, 2.0), (1.5, 2.0, -0.5, 1.5)]


def _double(*values: float) -> list[torch.Tensor]:
    return [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in values]


@pytest.mark.parametrize(("phi", "k", "alpha", "beta"), POINTS)
def test_weibull_gamma_equals_numerical_integration(phi, k, alpha, beta):
    log_lambda = phi - math.lgamma(1 + 1 / k)

    def integrand(log_s: float) -> float:
        scaled = k * (log_s - log_lambda)
        log_q = math.log(k) + scaled - math.exp(scaled)
        log_p = alpha * math.log(beta) - math.lgamma(alpha) + alpha * log_s - beta * math.exp(log_s)
        return math.exp(log_q) * (log_q - log_p)

    # beyond exp(3.7) = 40 and exp(−36) of the scale the density is below 1e-16
    value, _ = scipy.integrate.quad(integrand, log_lambda - 36 / k, log_lambda + 3.7 / k, epsabs=1e-11, limit=400)
    scores, log_alpha = _double(phi, math.log(alpha))
    assert number(kl_weibull_gamma(scores, log_alpha, weibull_k=k, gamma_beta=beta)) == pytest.approx(value, abs=1e-8)


@pytest.mark.parametrize(("phi", "k", "alpha", "beta"), POINTS)
def test_weibull_gamma_gradients_equal_the_formulas_and_finite_differences(phi, k, alpha, beta):
    scores, log_alpha = _double(phi, math.log(alpha))
    kl = kl_weibull_gamma(scores, log_alpha, weibull_k=k, gamma_beta=beta)
    to_phi, to_log_alpha = torch.autograd.grad(kl, (scores, log_alpha))
    assert number(to_phi) == pytest.approx(beta * math.exp(phi) - alpha, abs=1e-12)
    shift = math.lgamma(1 + 1 / k) + np.euler_gamma / k
    to_alpha = number(torch.digamma(torch.tensor(alpha, dtype=torch.float64))) - math.log(beta) - phi + shift
    assert number(to_log_alpha) == pytest.approx(alpha * to_alpha, abs=1e-12)
    # gradcheck compares with central differences
    assert torch.autograd.gradcheck(lambda s, a: kl_weibull_gamma(s, a, weibull_k=k, gamma_beta=beta), (scores, log_alpha))


@pytest.mark.parametrize(("phi", "sigma_q", "mu", "sigma_p"), LOG_POINTS)
def test_lognormal_gradients_equal_the_formulas_and_finite_differences(phi, sigma_q, mu, sigma_p):
    scores, mu_p = _double(phi, mu)
    kl = kl_lognormal_lognormal(scores, mu_p, sigma_q=sigma_q, sigma_p=sigma_p)
    assert number(kl) == pytest.approx(kl_lognormal_oracle(phi, sigma_q, mu, sigma_p), abs=1e-12)
    to_phi, to_mu = torch.autograd.grad(kl, (scores, mu_p))
    assert number(to_phi) == pytest.approx((phi - sigma_q**2 / 2 - mu) / sigma_p**2, abs=1e-12)
    assert number(to_mu) == pytest.approx(-number(to_phi), abs=1e-15)
    assert torch.autograd.gradcheck(
        lambda s, m: kl_lognormal_lognormal(s, m, sigma_q=sigma_q, sigma_p=sigma_p), (scores, mu_p)
    )


def test_the_weibull_gamma_minimum_is_at_log_alpha_over_beta():
    scores = torch.tensor(math.log(0.7 / 0.2), dtype=torch.float64)
    log_alpha = torch.tensor(math.log(0.7), dtype=torch.float64)
    best = kl_weibull_gamma(scores, log_alpha, weibull_k=3.0, gamma_beta=0.2)
    for step in (-1e-3, 1e-3):
        assert number(kl_weibull_gamma(scores + step, log_alpha, weibull_k=3.0, gamma_beta=0.2)) > number(best)


def test_identical_distributions_have_no_divergence():
    """Weibull with k = 1 and Gamma with α = 1 are both Exponential."""
    zero = torch.zeros((), dtype=torch.float64)
    scores = torch.tensor(-0.8, dtype=torch.float64)
    rate = math.exp(0.8)
    assert number(kl_weibull_gamma(scores, zero, weibull_k=1.0, gamma_beta=rate)) == pytest.approx(0.0, abs=1e-14)
    same = kl_lognormal_lognormal(scores, scores - 0.5 * 0.3**2, sigma_q=0.3, sigma_p=0.3)
    assert number(same) == pytest.approx(0.0, abs=1e-14)


def test_the_key_term_is_what_does_not_depend_on_the_scores():
    log_alpha = torch.linspace(-20.0, 1.0, 9, dtype=torch.float64)
    at_zero = kl_weibull_gamma(torch.zeros(9, dtype=torch.float64), log_alpha, weibull_k=7.0, gamma_beta=0.3)
    key_term = weibull_gamma_key_term(log_alpha, weibull_k=7.0, gamma_beta=0.3)
    torch.testing.assert_close(at_zero - 0.3, key_term, rtol=1e-13, atol=1e-13)


def test_arrays_broadcast_entry_by_entry():
    scores, log_alpha = torch.randn(5, 1, 7, dtype=torch.float64), torch.randn(1, 3, 7, dtype=torch.float64)
    kl = kl_weibull_gamma(scores, log_alpha, weibull_k=5.0, gamma_beta=0.1)
    expected = kl_weibull_gamma_oracle(scores.numpy(), 5.0, log_alpha.exp().numpy(), 0.1)
    np.testing.assert_allclose(kl.numpy(), expected, rtol=1e-12)


def test_the_registered_kl_takes_k_and_rate_per_entry_and_differentiates():
    parameters = [torch.rand(7, dtype=torch.float64).add_(0.3).requires_grad_() for _ in range(4)]
    scale, k, alpha, beta = parameters
    kl = kl_divergence(Weibull(scale, k), Gamma(alpha, beta))
    for entry in range(7):
        phi = math.log(number(scale[entry])) + math.lgamma(1 + 1 / number(k[entry]))
        expected = kl_weibull_gamma_oracle(phi, number(k[entry]), number(alpha[entry]), number(beta[entry]))
        assert number(kl[entry]) == pytest.approx(float(expected), rel=1e-12)
    assert torch.autograd.gradcheck(lambda s, k, a, b: kl_divergence(Weibull(s, k), Gamma(a, b)), parameters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("alpha", [1e-15, 1e-30, 1e-8, 1.0, 1e3])
@pytest.mark.parametrize("beta", [1e-15, 1e-2, 1.0])
@pytest.mark.parametrize("k", [0.5, 10.0, 2000.0])
def test_weibull_gamma_is_finite_and_right_at_extreme_settings(dtype, alpha, beta, k):
    scores = torch.tensor([-20.0, 0.0, 3.0], dtype=dtype, requires_grad=True)
    log_alpha = torch.full((3,), math.log(alpha), dtype=dtype, requires_grad=True)
    kl = kl_weibull_gamma(scores, log_alpha, weibull_k=k, gamma_beta=beta)
    gradients = torch.autograd.grad(kl.sum(), (scores, log_alpha))
    assert_finite(kl, *gradients)
    expected = kl_weibull_gamma_oracle(scores.detach().double().numpy(), k, alpha, beta)
    # terms up to |ln α| = 70 or α ln α = 7000 cancel: relative to the largest of them
    size = max(abs(math.log(alpha)), alpha * (abs(math.log(alpha)) + abs(math.log(beta)) + 20.0), 1.0)
    tolerance = (2e-6 if dtype == torch.float32 else 1e-13) * size
    np.testing.assert_allclose(kl.detach().double().numpy(), expected, atol=tolerance, rtol=tolerance / size)


@pytest.mark.parametrize(("sigma_q", "sigma_p"), [(1e-15, 1e15), (1e-9, 1e9), (0.1, 1e15), (1e-15, 1.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lognormal_is_finite_at_extreme_settings(sigma_q, sigma_p, dtype):
    scores = torch.tensor([-1e4, 0.0, 1e4], dtype=dtype, requires_grad=True)
    mu_p = torch.zeros(3, dtype=dtype, requires_grad=True)
    kl = kl_lognormal_lognormal(scores, mu_p, sigma_q=sigma_q, sigma_p=sigma_p)
    assert_finite(kl, *torch.autograd.grad(kl.sum(), (scores, mu_p)))
    assert lognormal_constant(sigma_q=sigma_q, sigma_p=sigma_p) == pytest.approx(
        math.log(sigma_p) - math.log(sigma_q) - 0.5 + 0.5 * (sigma_q / sigma_p) ** 2
    )


@pytest.mark.parametrize("scores_first", [True, False])
def test_parameters_are_keyword_only(scores_first):
    zero = torch.zeros(3)
    with pytest.raises(TypeError, match="positional"):
        kl_weibull_gamma(zero, zero, 1.0, 1.0) if scores_first else kl_lognormal_lognormal(zero, zero, 1.0, 1.0)
