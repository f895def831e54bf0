"""Bayesian weights for custom attention: any score tensor in, sampled weights out."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bayesattn import functional, sensitivity
from bayesattn.config import AttentionConfig
from bayesattn.nn.module import BayesianModule
from bayesattn.ops.attention import observers


class BayesianWeights(BayesianModule):
    """Use in place of the softmax: scores → sampled weights, with the KL recorded.

    Args:
        config: Variant, noise and prior.
        key_dim: Features per key and head; needed for contextual priors.
        num_heads: Heads of the scores; matters only for `prior_per_head`.
        prior_name: Distinguishes modules that are built one right after the other: contextual priors with the same
            name and generator state start from the same values.

    Example:
        >>> softmax = BayesianWeights(AttentionConfig("BAM-WC"), key_dim=8)
        >>> scores, keys = torch.randn(2, 4, 5, 7), torch.randn(2, 4, 7, 8)
        >>> softmax(scores, keys).shape
        torch.Size([2, 4, 5, 7])
    """

    def __init__(
        self,
        config: AttentionConfig,
        *,
        key_dim: int | None = None,
        num_heads: int = 1,
        prior_name: str = "",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        options = {"device": device, "dtype": dtype}
        self.init_bayesian(config, key_dim=key_dim, num_heads=num_heads, prior_name=prior_name, **options)

    def log_prior(
        self, keys: Float[Tensor, "b h n d"] | Float[Tensor, "b n d"], valid: Bool[Tensor, "..."] | None = None
    ) -> Float[Tensor, "b h 1 n"] | None:
        """Return ln Ψ of the keys if the next calls need it; compute it once where many steps share the keys."""
        if self.bayes_prior is None or not self.needs_kl:
            return None
        keys = keys.unsqueeze(1) if keys.ndim == 3 else keys
        return self.bayes_prior(keys, valid)

    def forward(
        self,
        scores: Float[Tensor, "*bh m n"],
        keys: Float[Tensor, "..."] | None = None,
        *,
        mask: Bool[Tensor, "..."] | None = None,
        log_prior: Float[Tensor, "#b #h 1 n"] | None = None,
    ) -> Float[Tensor, "*bh m n"]:
        """Return the weights of one draw, or softmax(scores) in eval mode.

        Args:
            scores: Φ of any alignment function.
            keys: Keys from which the contextual prior is computed; or give `log_prior`.
            mask: True where a query may attend.
            log_prior: ln Ψ from `log_prior`.
        """
        return self.record(*self.draw(scores, keys, mask=mask, log_prior=log_prior))

    def draw(
        self,
        scores: Float[Tensor, "*bh m n"],
        keys: Float[Tensor, "..."] | None = None,
        *,
        mask: Bool[Tensor, "..."] | None = None,
        log_prior: Float[Tensor, "#b #h 1 n"] | None = None,
    ) -> tuple[Float[Tensor, "*bh m n"], Float[Tensor, " b"] | None]:
        """Return weights and KL, the latter None where it is not recorded; arguments as for `forward`, which records it."""
        log_prior = self.log_prior_of(scores, keys, mask) if log_prior is None else log_prior
        if self.is_observed:
            observers.note_scores(self, scores, mask)
        if self.is_measured:
            scores = sensitivity.through_scores(scores, self)
        return functional.attention_weights(
            scores, config=self.config, log_prior=log_prior, mask=mask, sample=self.is_sampling, need_kl=self.needs_kl
        )

    def log_prior_of(self, scores: Tensor, keys: Tensor | None, mask: Tensor | None) -> Tensor | None:
        """Return ln Ψ of the keys that some query of the scores may attend to; None without keys, or if it is not needed."""
        if keys is None:
            return None
        return self.log_prior(keys, None if mask is None else _valid_keys(mask, scores))


def _valid_keys(mask: Tensor, scores: Tensor) -> Bool[Tensor, "#b #h n"]:
    full = mask.expand(mask.shape[:-1] + scores.shape[-1:])
    if full.ndim == 3 and scores.ndim == 3:
        full = full.unsqueeze(1)
    return full.reshape((1,) * (4 - full.ndim) + full.shape).any(dim=-2)
