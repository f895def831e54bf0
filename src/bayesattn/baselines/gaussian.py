"""Gaussian attention, in two readings: noise on the context vector (Bahuleyan et al., 2018) and on the weights.

Bahuleyan et al. draw the *context* around its deterministic value, c ~ N(Σ_j W_j v_j, diag σ²), which trains. The paper on
Bayesian attention describes, and reports to end in NaN, Gaussian *weights*: possibly negative, not summing to one.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from bayesattn.baselines._base import RivalModule, RivalWeights
from bayesattn.baselines.config import AttentionChoice
from bayesattn.baselines.hard import valid_keys


def kl_gaussian(
    mean: Float[Tensor, "*#s"], log_sigma: Float[Tensor, "*#s"], prior_mean: Float[Tensor, "*#s"] | float = 0.0
) -> Float[Tensor, "*#s"]:
    """Return KL(N(μ, σ²) ‖ N(μ_p, 1)) = (σ² + (μ − μ_p)² − 1)/2 − ln σ, entry by entry."""
    return 0.5 * (torch.exp(2.0 * log_sigma) + (mean - prior_mean).square() - 1.0) - log_sigma


class GaussianContext(RivalModule):
    """Draw the context around its soft value, with a deviation that depends on it: ln σ = A tanh(B c).

    Args:
        config: Of variant `gaussian-context`; its `context_prior` is used.
        value_dim: Features of the context.
    """

    def __init__(self, config: AttentionChoice, value_dim: int) -> None:
        super().__init__(config, "gaussian-context")
        self.hidden = nn.Linear(value_dim, value_dim)
        self.log_sigma = nn.Linear(value_dim, value_dim)
        # σ starts at e⁻¹: a context drawn with σ = 1 drowns the values before they have learned anything
        nn.init.constant_(self.log_sigma.bias, -1.0)

    def forward(
        self,
        context: Float[Tensor, "b m d"],
        value: Float[Tensor, "b n d"],
        mask: Bool[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b m d"]:
        """Return one draw of the context and record its KL; in eval mode the context as it is."""
        needs_kl = self.needs_kl
        if not (self.is_sampling or needs_kl):
            return context
        dtype = torch.promote_types(context.dtype, torch.float32)
        log_sigma = self.log_sigma(torch.tanh(self.hidden(context))).to(dtype)
        mean = context.to(dtype)
        drawn = mean + torch.exp(log_sigma) * torch.randn_like(mean) if self.is_sampling else mean
        kl = None
        if needs_kl:
            prior = _mean_value(value, mask).unsqueeze(1).to(dtype) if self.config.context_prior == "keys" else 0.0
            kl = kl_gaussian(mean, log_sigma, prior).flatten(1).sum(dim=1)
        return self._record(drawn.to(context.dtype), kl)


def _mean_value(value: Float[Tensor, "b n d"], mask: Bool[Tensor, "b n"] | None) -> Float[Tensor, "b d"]:
    if mask is None:
        return value.mean(dim=1)
    share = mask.to(value.dtype)
    return (share.unsqueeze(-1) * value).sum(dim=1) / share.sum(dim=1, keepdim=True).clamp(min=1.0)


class GaussianWeights(RivalWeights):
    """Draw unnormalised weights S ~ N(Φ, σ²) and divide by their sum, W = S / Σ_j S_j, with one learned σ.

    Kept to show why it fails: the sum comes arbitrarily close to 0, so W is heavy-tailed, its mean does not exist, and
    neither do its gradient's. Eval mode: Φ / ΣΦ.

    Args:
        config: Of variant `gaussian-weights`; `gaussian_sigma` is where σ starts.
    """

    def __init__(self, config: AttentionChoice) -> None:
        super().__init__(config, "gaussian-weights")
        self.log_sigma = nn.Parameter(torch.tensor(math.log(config.gaussian_sigma)))

    def forward(
        self, scores: Float[Tensor, "*bh m n"], keys=None, *, mask: Bool[Tensor, "..."] | None = None, prior: None = None
    ) -> Float[Tensor, "*bh m n"]:
        """Return weights that sum to one and may have any size and sign."""
        mean, mask = scores.to(torch.promote_types(scores.dtype, torch.float32)), valid_keys(mask, scores)
        drawn = mean + torch.exp(self.log_sigma) * torch.randn_like(mean) if self.is_sampling else mean
        kl = None
        if mask is not None:
            drawn = drawn.masked_fill(~mask, 0.0)
        if self.needs_kl:
            entries = kl_gaussian(mean, self.log_sigma)
            kl = (entries if mask is None else entries.masked_fill(~mask, 0.0)).flatten(1).sum(dim=1)
        return self._record((drawn / drawn.sum(dim=-1, keepdim=True)).to(scores.dtype), kl)
