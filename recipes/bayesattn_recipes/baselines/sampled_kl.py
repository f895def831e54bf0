"""The ablation of the closed-form KL: ln q(S) − ln p(S) at the drawn S, a one-draw estimate of the same KL.

The paper reports that training with it "becomes very unstable" (Sec. 4.3). Differentiated along the draw, as here, ln q
loses its noise: the gradient in Φ is β S − α for the Weibull (closed form: β exp(Φ) − α) and that of a normal for the
lognormal. So the noise is of the size of β, and only the paper's raw scores with a large β make it large.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bayesattn import noise
from bayesattn.config import AttentionConfig
from bayesattn.distributions import log_gamma_1p_inverse, lognormal_log_sample, weibull_log_sample
from bayesattn.functional.parts import Allowed, log_alpha, lognormal_location, masked_logsumexp, noisy_softmax
from bayesattn.nn import BayesianWeights
from bayesattn_recipes.baselines.config import AttentionChoice


def sampled_kl(
    phi: Float[Tensor, "b h m n"],
    standard: Float[Tensor, "b h m n"],
    log_prior: Float[Tensor, "#b #h 1 n"] | None,
    mask: Bool[Tensor, "#b #h #m n"] | None,
    config: AttentionConfig,
) -> Float[Tensor, " b"]:
    """Return ln q(S) − ln p(S) of each example at the S given by `standard`, reduced by `config.kl_reduction`.

        Weibull    ln q = ln k − k ln λ + (k−1) ln S − (S/λ)^k,   ln p = α ln β − ln Γ(α) + (α−1) ln S − β S
        Lognormal  the same with two normal densities of ln S

    Args:
        phi: Φ, the logarithm of the posterior's mean, in the form of `config.score_form`.
        standard: The noise behind S: E ~ Exp(1), or ε ~ N(0, 1).
        log_prior: ln Ψ of a contextual prior.
        mask: Which entries exist.
        config: Family, prior and conventions.
    """
    b, h, m, n = phi.shape
    allowed = Allowed(mask, False, (b, h, m, n))
    if config.family == "weibull":
        k, beta = config.weibull_k, config.gamma_beta
        log_s = weibull_log_sample(phi, standard, weibull_k=k)
        log_scale = phi - log_gamma_1p_inverse(k)
        log_a = log_alpha(log_prior, allowed, config, phi)
        alpha = torch.exp(log_a)
        log_q = math.log(k) - k * log_scale + (k - 1.0) * log_s - standard
        # ln Γ(α) as ln Γ(1+α) − ln α, as everywhere: α may be tiny
        log_p = alpha * math.log(beta) - torch.lgamma(1.0 + alpha) + log_a + (alpha - 1.0) * log_s
        entries = log_q - log_p + torch.exp(log_s + math.log(beta))
    else:
        log_s = lognormal_log_sample(phi, standard, sigma_q=config.sigma_q)
        location = lognormal_location(log_prior, allowed, config)
        deviation = (log_s - location) / config.sigma_p
        entries = math.log(config.sigma_p) - math.log(config.sigma_q) + 0.5 * (deviation.square() - standard.square())
    if mask is not None:
        entries = entries.masked_fill(~mask, 0.0)
    total = entries.flatten(1).sum(dim=1)
    return total if config.kl_reduction == "sum" else total / allowed.count(per_entry=config.kl_reduction == "mean")


class SampledKLWeights(BayesianWeights):
    """`BayesianWeights` whose recorded KL is an estimate at the draw instead of the closed form.

    Args:
        config: A Bayesian variant with a KL and `sampled_kl`.
        key_dim: Features of a key; needed for contextual priors.
        num_heads: Heads of the scores; matters only for `prior_per_head`.
    """

    def __init__(self, config: AttentionChoice, *, key_dim: int | None = None, num_heads: int = 1) -> None:
        if not config.sampled_kl:
            raise ValueError("config must have sampled_kl=True, got False")
        super().__init__(config, key_dim=key_dim, num_heads=num_heads)

    def draw(
        self,
        scores: Float[Tensor, "*bh m n"],
        keys: Float[Tensor, "..."] | None = None,
        *,
        mask: Bool[Tensor, "..."] | None = None,
        log_prior: Float[Tensor, "#b #h 1 n"] | None = None,
    ) -> tuple[Float[Tensor, "*bh m n"], Float[Tensor, " b"] | None]:
        """Return the weights of one draw and the KL at that draw; without a draw, the same as `BayesianWeights`."""
        if not (self.is_sampling and self.needs_kl):
            return super().draw(scores, keys, mask=mask, log_prior=log_prior)
        log_prior = self.log_prior_of(scores, keys, mask) if log_prior is None else log_prior
        if log_prior is None and self.bayes_prior is not None:
            raise ValueError(
                f"log_prior must be ln Ψ of the keys for {self.config.variant}, got None. Otherwise give `keys`"
            )
        shape = scores.shape
        full = scores.to(torch.promote_types(scores.dtype, torch.float32))
        full = full.reshape(shape[0], shape[1] if len(shape) == 4 else 1, *shape[-2:])
        if mask is not None:
            mask = (mask.unsqueeze(1) if len(shape) == 3 else mask).expand(full.shape)
            full = full.masked_fill(~mask, 0.0)
        b, h, m, n = full.shape
        log_noise = noise.log_noise(None, (b, h, m, n), self.config, device=full.device, dtype=full.dtype)
        weights = noisy_softmax(full, log_noise, mask)
        return weights.to(scores.dtype).reshape(shape), self.kl_at(full, self.standard_noise(log_noise), log_prior, mask)

    def standard_noise(self, log_noise: Float[Tensor, "*b n"]) -> Float[Tensor, "*b n"]:
        """Return E or ε from the noise added to the scores, ln E / k or σ_q ε (`noise.log_noise`)."""
        if self.config.family == "weibull":
            return torch.exp(self.config.weibull_k * log_noise)
        return log_noise / self.config.sigma_q

    def kl_at(
        self,
        scores: Float[Tensor, "b h m n"],
        standard: Float[Tensor, "b h m n"],
        log_prior: Float[Tensor, "#b #h 1 n"] | None,
        mask: Bool[Tensor, "#b #h #m n"] | None,
    ) -> Float[Tensor, " b"]:
        """Return `sampled_kl` of scores, after the config's form turns them into Φ."""
        if self.config.score_form == "log_softmax":
            scores = scores - masked_logsumexp(scores, mask).unsqueeze(-1)
        return sampled_kl(scores, standard, log_prior, mask, self.config)
