"""Gaussian attention, in two versions: noise on the context vector (Bahuleyan et al., 2018) and on the weights.

Bahuleyan et al. draw the *context* around its deterministic value, c ~ N(Σ_j W_j v_j, diag σ²), which trains. The paper on
Bayesian attention describes Gaussian *weights*, possibly negative and not summing to one, and reports that they end in NaN.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from bayesattn.precision import upcast
from bayesattn_recipes.baselines.config import AttentionChoice
from bayesattn_recipes.baselines.module import RivalModule, RivalWeights
from bayesattn_recipes.baselines.rows import DenseRows, Rows


def kl_gaussian(
    mean: Float[Tensor, "*#s"], log_sigma: Float[Tensor, "*#s"], prior_mean: Float[Tensor, "*#s"] | float = 0.0
) -> Float[Tensor, "*#s"]:
    """Return KL(N(μ, σ²) ‖ N(μ_p, 1)) = (σ² + (μ − μ_p)² − 1)/2 − ln σ, entry by entry."""
    return 0.5 * (torch.exp(2.0 * log_sigma) + (mean - prior_mean).square() - 1.0) - log_sigma


class GaussianContext(RivalModule):
    """Draw the context around its soft value, with a deviation that depends on it: ln σ = A tanh(B c).

    Args:
        config: One of variant `gaussian-context`; its `context_prior` is used.
        value_dim: Features of the context.
    """

    def __init__(self, config: AttentionChoice, value_dim: int) -> None:
        super().__init__(config, "gaussian-context")
        self.hidden = nn.Linear(value_dim, value_dim)
        self.log_sigma = nn.Linear(value_dim, value_dim)
        # σ starts at e⁻¹: with σ = 1 the noise hides the values before anything is learned
        nn.init.constant_(self.log_sigma.bias, -1.0)

    def forward(
        self,
        context: Float[Tensor, "b m d"],
        value: Float[Tensor, "b n d"],
        mask: Bool[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b m d"]:
        """Return one draw of the context and record its KL; in eval mode, return the context as it is."""
        if self.is_idle:
            return context
        rows = DenseRows(None, torch.Size((*context.shape[:2], value.shape[1])))
        drawn, entries = self.draw(context, rows, lambda: _mean_value(value, mask).unsqueeze(1))
        return self.record(drawn, None if entries is None else entries.flatten(1).sum(dim=1))

    def shift(self, context: Float[Tensor, "b m d"], noise: Float[Tensor, "b #m d"]) -> Float[Tensor, "b m d"]:
        """Return the draw of the context for noise ε ~ N(0, 1)."""
        return (upcast(context) + torch.exp(self._log_sigma(context)) * noise).to(context.dtype)

    def kl(
        self, context: Float[Tensor, "b m d"], value: Float[Tensor, "b n d"], mask: Bool[Tensor, "b n"] | None = None
    ) -> Float[Tensor, "b m"]:
        """Return the KL of every context from its soft value."""
        entries = self._kl(upcast(context), self._log_sigma(context), lambda: _mean_value(value, mask).unsqueeze(1))
        return entries.sum(dim=-1)

    def _log_sigma(self, context: Float[Tensor, "*s d"]) -> Float[Tensor, "*s d"]:
        return upcast(self.log_sigma(torch.tanh(self.hidden(context.to(self.hidden.weight.dtype)))))

    def _kl(
        self, mean: Float[Tensor, "*s d"], log_sigma: Float[Tensor, "*s d"], mean_value: Callable[[], Float[Tensor, "..."]]
    ) -> Float[Tensor, "*s d"]:
        return kl_gaussian(mean, log_sigma, upcast(mean_value()) if self.config.context_prior == "keys" else 0.0)

    def draw(
        self, context: Float[Tensor, "*s d"], rows: Rows, mean_value: Callable[[], Float[Tensor, "..."]]
    ) -> tuple[Float[Tensor, "*s d"], Float[Tensor, "*s d"] | None]:
        """Return one draw of the context, and the KL of its features if it is recorded.

        Args:
            context: Σ W v, of any number of heads: they share σ's network.
            rows: Source of the noise, and which rows exist.
            mean_value: Computes the mean of the values that each query may attend to.
        """
        if context.shape[-1] != self.hidden.in_features:
            raise ValueError(
                f"the context must have {self.hidden.in_features} features, the number this {self.config.variant} was built "
                f"with, got {context.shape[-1]}"
            )
        mean, log_sigma = upcast(context), self._log_sigma(context)
        drawn = mean + torch.exp(log_sigma) * rows.normal(mean) if self.is_sampling else mean
        kl = self._kl(mean, log_sigma, mean_value) if self.needs_kl else None
        if rows.has_entry is not None:
            # a row without keys stays 0 and has no KL
            drawn = drawn.masked_fill(~rows.has_entry, 0.0)
            kl = None if kl is None else kl.masked_fill(~rows.has_entry, 0.0)
        return drawn.to(context.dtype), kl


def _mean_value(value: Float[Tensor, "b n d"], mask: Bool[Tensor, "b n"] | None) -> Float[Tensor, "b d"]:
    if mask is None:
        return value.mean(dim=1)
    share = mask.to(value.dtype)
    return (share.unsqueeze(-1) * value).sum(dim=1) / share.sum(dim=1, keepdim=True).clamp(min=1.0)


class GaussianWeights(RivalWeights):
    """Draw unnormalized weights S ~ N(Φ, σ²) and divide by their sum, W = S / Σ_j S_j, with one learned σ.

    Kept to show why it fails: the sum comes arbitrarily close to 0, so W is heavy-tailed, and neither its mean nor that of
    its gradient exists. Eval mode: Φ / ΣΦ.

    Args:
        config: One of variant `gaussian-weights`; σ starts at its `gaussian_sigma`.
    """

    def __init__(self, config: AttentionChoice) -> None:
        super().__init__(config, "gaussian-weights")
        self.log_sigma = nn.Parameter(torch.tensor(math.log(config.gaussian_sigma)))

    @property
    def is_idle(self) -> bool:
        """Never: its mean is not the softmax."""
        return False

    def draw(self, scores: Float[Tensor, "..."], rows: Rows) -> tuple[Float[Tensor, "..."], Float[Tensor, " b"] | None]:
        """Return weights that sum to one and may have any size and sign."""
        drawn = scores + torch.exp(self.log_sigma) * rows.normal(scores) if self.is_sampling else scores
        drawn, kl = rows.opened(drawn), None
        if self.needs_kl:
            kl = rows.reduce(rows.opened(kl_gaussian(scores, self.log_sigma)), self.config.kl_reduction)
        total = rows.total(drawn)
        # a row without keys sums to 0
        return drawn / torch.where(total == 0.0, 1.0, total), kl
