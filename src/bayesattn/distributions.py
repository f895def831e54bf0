"""Posteriors and priors over the unnormalized attention weights S (Sec. 3.2 and 3.3 of the paper).

Everything is in log space: S itself is not needed, and log S does not overflow. Both posteriors are
parameterized by the scores Φ so that E[S] = exp(Φ); the variance vanishes as k → ∞ or σ_q → 0.

    Weibull    log S = Φ − ln Γ(1 + 1/k) + (1/k) ln E,   E ~ Exp(1)
    Lognormal  log S = Φ − σ_q²/2 + σ_q ε,               ε ~ N(0, 1)

The shift common to a row cancels in W = softmax(log S), so attention adds only the last term of each line.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Gamma, LogNormal, Weibull

from bayesattn.scalars import check_positive

EULER_GAMMA = 0.5772156649015329


def weibull_log_sample(
    scores: Float[Tensor, "*shape"], exponential: Float[Tensor, "*shape"], *, weibull_k: float
) -> Float[Tensor, "*shape"]:
    """Return log S for S ~ Weibull with shape k and mean exp(scores), from exponential noise.

    Args:
        scores: Φ.
        exponential: Exp(1) draws, all positive. The same draws give the same sample.
        weibull_k: Shape k > 0.

    Example:
        >>> log_s = weibull_log_sample(torch.zeros(3), torch.tensor([0.5, 1.0, 2.0]), weibull_k=10.0)
        >>> log_s.exp()  # around the mean, exp(0) = 1
        tensor([0.9807, 1.0511, 1.1266])
    """
    return scores - log_gamma_1p_inverse(weibull_k) + torch.log(exponential) / weibull_k


def lognormal_log_sample(
    scores: Float[Tensor, "*shape"], normal: Float[Tensor, "*shape"], *, sigma_q: float
) -> Float[Tensor, "*shape"]:
    """Return log S for S ~ Lognormal with log-deviation σ_q and mean exp(scores), from normal noise.

    Example:
        >>> lognormal_log_sample(torch.zeros(3), torch.tensor([-1.0, 0.0, 1.0]), sigma_q=0.2)
        tensor([-0.2200, -0.0200,  0.1800])
    """
    check_positive(sigma_q=sigma_q)
    return scores - 0.5 * sigma_q**2 + sigma_q * normal


def weibull_posterior(scores: Float[Tensor, "*shape"], *, weibull_k: float) -> Weibull:
    """Return torch's Weibull with mean exp(scores): λ = exp(Φ) / Γ(1 + 1/k).

    Example:
        >>> weibull_posterior(torch.tensor([0.0, 1.0]), weibull_k=10.0).mean  # exp(0) and exp(1)
        tensor([1.0000, 2.7183])
    """
    scale = torch.exp(scores - log_gamma_1p_inverse(weibull_k))
    return Weibull(scale=scale, concentration=torch.full_like(scale, weibull_k))


def lognormal_posterior(scores: Float[Tensor, "*shape"], *, sigma_q: float) -> LogNormal:
    """Return torch's LogNormal with mean exp(scores): μ_q = Φ − σ_q²/2.

    Example:
        >>> lognormal_posterior(torch.tensor([0.0, 1.0]), sigma_q=0.2).mean  # exp(0) and exp(1)
        tensor([1.0000, 2.7183])
    """
    check_positive(sigma_q=sigma_q)
    return LogNormal(loc=scores - 0.5 * sigma_q**2, scale=torch.full_like(scores, sigma_q))


def gamma_prior(log_alpha: Float[Tensor, "*shape"], *, gamma_beta: float) -> Gamma:
    """Return torch's Gamma with shape α and **rate** β.

    Example:
        >>> gamma_prior(torch.tensor([2.0]).log(), gamma_beta=4.0).mean  # α / β
        tensor([0.5000])
    """
    check_positive(gamma_beta=gamma_beta)
    return Gamma(concentration=torch.exp(log_alpha), rate=torch.full_like(log_alpha, gamma_beta))


def lognormal_prior(mu_p: Float[Tensor, "*shape"], *, sigma_p: float) -> LogNormal:
    """Return torch's LogNormal with parameters μ_p and σ_p.

    Example:
        >>> lognormal_prior(torch.tensor([0.0]), sigma_p=1.0).mean  # exp(μ_p + σ_p²/2)
        tensor([1.6487])
    """
    check_positive(sigma_p=sigma_p)
    return LogNormal(loc=mu_p, scale=torch.full_like(mu_p, sigma_p))


def log_gamma_1p_inverse(weibull_k: float) -> float:
    """Return ln Γ(1 + 1/k) as a Python float, because 1 + 1/1000 is exactly 1 in bfloat16.

    Example:
        >>> log_gamma_1p_inverse(1.0)
        0.0
        >>> round(log_gamma_1p_inverse(10.0), 4)
        -0.0499
    """
    check_positive(weibull_k=weibull_k)
    return math.lgamma(1.0 + 1.0 / weibull_k)
