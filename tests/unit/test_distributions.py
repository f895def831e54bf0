"""Posteriors and priors: the right law, the right mean, in log space."""

import math

import numpy as np
import pytest
import scipy.stats
import torch

from bayesattn import distributions as d

PHI = torch.linspace(-4.0, 3.0, 7, dtype=torch.float64)


@pytest.mark.parametrize("k", [0.5, 1.0, 10.0, 2000.0])
def test_weibull_samples_are_the_quantiles_scipy_has(k):
    level = torch.tensor([0.001, 0.1, 0.37, 0.5, 0.8, 0.99, 0.99999], dtype=torch.float64)
    log_s = d.weibull_log_sample(PHI, -torch.log1p(-level), weibull_k=k)
    scale = np.exp(PHI.numpy()) / math.gamma(1 + 1 / k)
    np.testing.assert_allclose(log_s.numpy(), np.log(scipy.stats.weibull_min.ppf(level, k, scale=scale)), atol=1e-11)


@pytest.mark.parametrize("sigma_q", [1e-3, 0.1, 1.0, 3.0])
def test_lognormal_samples_are_the_quantiles_scipy_has(sigma_q):
    level = np.array([0.001, 0.1, 0.37, 0.5, 0.8, 0.99, 0.99999])
    log_s = d.lognormal_log_sample(PHI, torch.from_numpy(scipy.stats.norm.ppf(level)), sigma_q=sigma_q)
    scale = np.exp(PHI.numpy() - sigma_q**2 / 2)
    np.testing.assert_allclose(log_s.numpy(), np.log(scipy.stats.lognorm.ppf(level, sigma_q, scale=scale)), atol=1e-11)


@pytest.mark.parametrize("k", [0.5, 1.0, 10.0, 2000.0])
def test_the_weibull_posterior_has_mean_exp_phi(k):
    posterior = d.weibull_posterior(PHI, weibull_k=k)
    torch.testing.assert_close(posterior.mean, PHI.exp(), rtol=1e-12, atol=0.0)
    assert torch.equal(posterior.concentration, torch.full_like(PHI, k))


@pytest.mark.parametrize("sigma_q", [1e-3, 0.1, 1.0])
def test_the_lognormal_posterior_has_mean_exp_phi(sigma_q):
    torch.testing.assert_close(d.lognormal_posterior(PHI, sigma_q=sigma_q).mean, PHI.exp(), rtol=1e-12, atol=0.0)


def test_the_gamma_prior_takes_a_rate():
    prior = d.gamma_prior(torch.log(torch.tensor([3.0, 0.5])), gamma_beta=2.0)
    torch.testing.assert_close(prior.mean, torch.tensor([1.5, 0.25]))


def test_the_lognormal_prior_has_the_given_parameters():
    prior = d.lognormal_prior(torch.tensor([0.3, -2.0]), sigma_p=1.7)
    assert torch.equal(prior.loc, torch.tensor([0.3, -2.0]))
    torch.testing.assert_close(prior.scale, torch.tensor([1.7, 1.7]))


def test_the_noise_vanishes_in_both_limits():
    exponential = torch.empty(7, dtype=torch.float64).exponential_()
    # ln E is within ±40 for any float64 draw, so the distance is at most 40/k and 10 σ
    torch.testing.assert_close(d.weibull_log_sample(PHI, exponential, weibull_k=1e12), PHI, rtol=0.0, atol=1e-10)
    normal = torch.randn(7, dtype=torch.float64)
    torch.testing.assert_close(d.lognormal_log_sample(PHI, normal, sigma_q=1e-15), PHI, rtol=0.0, atol=1e-14)


def test_the_sample_follows_the_scores_one_to_one():
    scores = PHI.clone().requires_grad_()
    for log_s in (
        d.weibull_log_sample(scores, torch.ones(7, dtype=torch.float64), weibull_k=5.0),
        d.lognormal_log_sample(scores, torch.ones(7, dtype=torch.float64), sigma_q=0.5),
    ):
        (gradient,) = torch.autograd.grad(log_s.sum(), scores)
        assert torch.equal(gradient, torch.ones_like(scores))


@pytest.mark.parametrize(
    "call",
    [
        lambda: d.weibull_log_sample(PHI, PHI.exp(), 5.0),
        lambda: d.lognormal_log_sample(PHI, PHI, 0.1),
        lambda: d.weibull_posterior(PHI, 5.0),
        lambda: d.lognormal_posterior(PHI, 0.1),
        lambda: d.gamma_prior(PHI, 1.0),
        lambda: d.lognormal_prior(PHI, 1.0),
    ],
)
def test_parameters_are_keyword_only(call):
    with pytest.raises(TypeError, match="positional"):
        call()
