"""Closed forms equal Monte Carlo within standard errors, in float64, at every row of the tables the paper was checked at."""

import math

import pytest
import torch
from torch.distributions import kl_divergence

from bayesattn.distributions import (
    gamma_prior,
    lognormal_log_sample,
    lognormal_posterior,
    lognormal_prior,
    weibull_log_sample,
    weibull_posterior,
)
from bayesattn.divergences import kl_lognormal_lognormal, kl_weibull_gamma
from helpers import assert_within_standard_errors

DRAWS = 1_000_000

# Φ, k, α, β, closed form
WEIBULL_GAMMA = [
    (0.0, 1.0, 1.0, 1.0, 0.0),
    (0.3, 10.0, 0.2, 1e-2, 3.125536),
    (-1.5, 5.0, 1.7, 2.0, 1.805442),
    (2.0, 1.0, 0.05, 1e-4, 1.781780),
    (-3.0, 100.0, 1e-3, 1e-3, 9.945091),
    (1.0, 1000.0, 0.3, 0.5, 7.693423),
    (-0.5, 0.7, 2.2, 1.3, 1.807042),
    (0.0, 10.0, 1e-15, 1e-10, 35.264146),
]
# Φ, σ_q, μ_p, σ_p, closed form
LOGNORMAL = [
    (0.4, 0.1, -2.0, 1e3, 8.710343),
    (-1.0, 0.5, 0.3, 2.0, 1.171372),
    (0.0, 1.0, 0.0, 1.0, 0.125),
    (1.5, 2.0, -0.5, 1.5, 0.101207),
]


def _draw_exponential() -> torch.Tensor:
    return torch.empty(DRAWS, dtype=torch.float64).exponential_()


@pytest.mark.parametrize(("phi", "k", "alpha", "beta", "expected"), WEIBULL_GAMMA)
def test_weibull_gamma_kl_equals_the_table_and_monte_carlo(phi, k, alpha, beta, expected):
    scores, log_alpha = torch.tensor(phi, dtype=torch.float64), torch.tensor(math.log(alpha), dtype=torch.float64)
    kl = kl_weibull_gamma(scores, log_alpha, weibull_k=k, gamma_beta=beta)
    assert float(kl) == pytest.approx(expected, abs=1e-6)  # the table has six decimals
    # the densities of log S written out, so that S itself, which may underflow, is never formed
    log_s = weibull_log_sample(scores.expand(DRAWS), _draw_exponential(), weibull_k=k)
    log_lambda = phi - math.lgamma(1 + 1 / k)
    log_q = math.log(k) + k * (log_s - log_lambda) - torch.exp(k * (log_s - log_lambda))
    log_p = alpha * math.log(beta) - math.lgamma(alpha) + alpha * log_s - beta * torch.exp(log_s)
    assert_within_standard_errors(log_q - log_p, float(kl))


@pytest.mark.parametrize(("phi", "sigma_q", "mu_p", "sigma_p", "expected"), LOGNORMAL)
def test_lognormal_kl_equals_the_table_and_monte_carlo(phi, sigma_q, mu_p, sigma_p, expected):
    scores, location = torch.tensor(phi, dtype=torch.float64), torch.tensor(mu_p, dtype=torch.float64)
    kl = kl_lognormal_lognormal(scores, location, sigma_q=sigma_q, sigma_p=sigma_p)
    assert float(kl) == pytest.approx(expected, abs=1e-6)
    log_s = lognormal_log_sample(scores.expand(DRAWS), torch.randn(DRAWS, dtype=torch.float64), sigma_q=sigma_q)
    log_q = -math.log(sigma_q) - 0.5 * ((log_s - phi + sigma_q**2 / 2) / sigma_q) ** 2
    log_p = -math.log(sigma_p) - 0.5 * ((log_s - mu_p) / sigma_p) ** 2
    assert_within_standard_errors(log_q - log_p, float(kl))


@pytest.mark.parametrize(("phi", "k", "alpha", "beta", "expected"), WEIBULL_GAMMA)
def test_the_registered_weibull_gamma_kl_equals_ours(phi, k, alpha, beta, expected):
    scores = torch.tensor([phi], dtype=torch.float64)
    log_alpha = torch.tensor([math.log(alpha)], dtype=torch.float64)
    registered = kl_divergence(weibull_posterior(scores, weibull_k=k), gamma_prior(log_alpha, gamma_beta=beta))
    assert float(registered) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("phi", "sigma_q", "mu_p", "sigma_p", "expected"), LOGNORMAL)
def test_torchs_lognormal_kl_equals_ours(phi, sigma_q, mu_p, sigma_p, expected):
    scores, location = torch.tensor([phi], dtype=torch.float64), torch.tensor([mu_p], dtype=torch.float64)
    torchs = kl_divergence(lognormal_posterior(scores, sigma_q=sigma_q), lognormal_prior(location, sigma_p=sigma_p))
    assert float(torchs) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("k", [0.7, 1.0, 5.0, 10.0, 1000.0])
@pytest.mark.parametrize("phi", [-3.0, 0.0, 1.5])
def test_the_weibull_sample_has_mean_exp_phi(k, phi):
    sample = weibull_log_sample(torch.full((DRAWS,), phi, dtype=torch.float64), _draw_exponential(), weibull_k=k).exp()
    assert_within_standard_errors(sample, math.exp(phi))


@pytest.mark.parametrize("sigma_q", [1e-3, 0.1, 1.0])
@pytest.mark.parametrize("phi", [-3.0, 0.0, 1.5])
def test_the_lognormal_sample_has_mean_exp_phi(sigma_q, phi):
    normal = torch.randn(DRAWS, dtype=torch.float64)
    sample = lognormal_log_sample(torch.full((DRAWS,), phi, dtype=torch.float64), normal, sigma_q=sigma_q).exp()
    assert_within_standard_errors(sample, math.exp(phi))
