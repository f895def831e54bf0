"""Closed-form KL divergences from the attention posterior to its prior, per entry (Sec. 3.2).

Both depend only on the scores Φ, not on the sample, so they add no gradient noise (Lemma 1). Sums over whole attention
rows, which need neither a second pass nor the m × n entries, are in `ops/attention`.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Gamma, Weibull
from torch.distributions.kl import register_kl

from bayesattn.distributions import EULER_GAMMA, log_gamma_1p_inverse
from bayesattn.scalars import check_positive


def kl_weibull_gamma(
    scores: Float[Tensor, "*#shape"], log_alpha: Float[Tensor, "*#shape"], *, weibull_k: float, gamma_beta: float
) -> Float[Tensor, "*#shape"]:
    """Return KL(Weibull(k, λ) ‖ Gamma(α, β)) with λ = exp(Φ)/Γ(1 + 1/k).

        γα/k − α(Φ − ln Γ(1 + 1/k)) + ln k + β exp(Φ) − γ − 1 − α ln β + ln Γ(α)

    Its derivatives are β exp(Φ) − α in Φ, and ψ(α) − ln β − Φ + ln Γ(1 + 1/k) + γ/k in α.

    Args:
        scores: Φ, the logarithm of the posterior's mean.
        log_alpha: ln α of the prior; a logarithm, because α may be 1e-15 and ln Γ(α) needs ln α exactly.
        weibull_k: Posterior shape k > 0.
        gamma_beta: Prior rate β > 0.

    Example:
        >>> from bayesattn.distributions import gamma_prior, weibull_posterior
        >>> scores, log_alpha = torch.tensor([0.0, 1.0]), torch.tensor([0.0, 0.0])
        >>> kl_weibull_gamma(scores, log_alpha, weibull_k=10.0, gamma_beta=1.0)
        tensor([1.7332, 2.4515])
        >>> posterior, prior = weibull_posterior(scores, weibull_k=10.0), gamma_prior(log_alpha, gamma_beta=1.0)
        >>> torch.distributions.kl_divergence(posterior, prior)  # the same from torch's own classes
        tensor([1.7332, 2.4515])
    """
    alpha = torch.exp(log_alpha)
    per_key = weibull_gamma_key_term(log_alpha, weibull_k=weibull_k, gamma_beta=gamma_beta)
    return per_key - alpha * scores + torch.exp(scores + math.log(gamma_beta))


def log_alpha_shift(has_prior: bool, alpha_form: str | None, *, gamma_alpha: float, gamma_beta: float) -> float:
    """Return ln α − ln Ψ of the Gamma prior: ln β if α = βΨ, 0 if α = Ψ; without a Ψ, return ln α itself.

    Example:
        >>> log_alpha_shift(True, "psi", gamma_alpha=2.0, gamma_beta=4.0)
        0.0
        >>> round(log_alpha_shift(True, "beta_psi", gamma_alpha=2.0, gamma_beta=4.0), 4)  # ln 4
        1.3863
    """
    if not has_prior:
        return math.log(gamma_alpha)
    return math.log(gamma_beta) if alpha_form == "beta_psi" else 0.0


def weibull_gamma_key_term(log_alpha: Float[Tensor, "*s"], *, weibull_k: float, gamma_beta: float) -> Float[Tensor, "*s"]:
    """Return the part of KL(Weibull ‖ Gamma) that does not depend on Φ: one number per key.

        α(γ/k + ln Γ(1 + 1/k) − ln β) + ln Γ(α) + ln k − γ − 1

    ln Γ(α) is computed as ln Γ(1 + α) − ln α, whose gradient in ln α is finite however small α is.

    Example:
        >>> scores, log_alpha = torch.tensor(1.0), torch.tensor(0.0)
        >>> per_key = weibull_gamma_key_term(log_alpha, weibull_k=10.0, gamma_beta=1.0)
        >>> per_key - log_alpha.exp() * scores + scores.exp()
        tensor(2.4515)
        >>> kl_weibull_gamma(scores, log_alpha, weibull_k=10.0, gamma_beta=1.0)
        tensor(2.4515)
    """
    check_positive(weibull_k=weibull_k, gamma_beta=gamma_beta)
    alpha = torch.exp(log_alpha)
    slope = EULER_GAMMA / weibull_k + log_gamma_1p_inverse(weibull_k) - math.log(gamma_beta)
    return alpha * slope + torch.lgamma(1.0 + alpha) - log_alpha + (math.log(weibull_k) - EULER_GAMMA - 1.0)


def kl_lognormal_lognormal(
    scores: Float[Tensor, "*#shape"], mu_p: Float[Tensor, "*#shape"], *, sigma_q: float, sigma_p: float
) -> Float[Tensor, "*#shape"]:
    """Return KL(Lognormal(Φ − σ_q²/2, σ_q) ‖ Lognormal(μ_p, σ_p)).

        ln σ_p − ln σ_q + (σ_q² + (Φ − σ_q²/2 − μ_p)²) / (2 σ_p²) − 1/2

    Squares are taken after dividing by σ_p, and the constants are Python floats, so σ_p = 1e15 with σ_q = 1e-15
    neither overflows nor underflows.

    Example:
        >>> kl_lognormal_lognormal(torch.tensor([0.5, 1.5]), torch.tensor(0.0), sigma_q=1.0, sigma_p=1.0)
        tensor([0.0000, 0.5000])
    """
    check_positive(sigma_q=sigma_q, sigma_p=sigma_p)
    deviation = (scores - 0.5 * sigma_q**2 - mu_p) / sigma_p
    return 0.5 * deviation.square() + lognormal_constant(sigma_q=sigma_q, sigma_p=sigma_p)


def lognormal_constant(*, sigma_q: float, sigma_p: float) -> float:
    """Return ln σ_p − ln σ_q + (σ_q/σ_p)²/2 − 1/2, the part that depends on neither Φ nor μ_p.

    Example:
        >>> lognormal_constant(sigma_q=1.0, sigma_p=1.0)
        0.0
        >>> round(lognormal_constant(sigma_q=0.5, sigma_p=1.0), 4)
        0.3181
    """
    return math.log(sigma_p) - math.log(sigma_q) + 0.5 * (sigma_q / sigma_p) ** 2 - 0.5


@register_kl(Weibull, Gamma)
def _kl_weibull_gamma(q: Weibull, p: Gamma) -> Tensor:
    # torch's Weibull has k and λ per entry, so Φ = ln λ + ln Γ(1 + 1/k) and the formula holds entry by entry
    k, scale = q.concentration, q.scale
    alpha, beta = p.concentration, p.rate
    t1 = EULER_GAMMA * alpha / k - alpha * torch.log(scale) + torch.log(k)
    t2 = beta * scale * torch.exp(torch.lgamma(1.0 + 1.0 / k)) - EULER_GAMMA - 1.0
    t3 = -alpha * torch.log(beta) + torch.lgamma(alpha)
    return t1 + t2 + t3
