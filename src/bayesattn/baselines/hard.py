"""Hard attention: one key is chosen (Xu et al., 2015), with the gradient of REINFORCE or of a relaxation."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bayesattn import noise
from bayesattn.baselines import categorical
from bayesattn.baselines._base import RivalWeights
from bayesattn.baselines.config import AttentionChoice
from bayesattn.baselines.score_function import Choice, ChoosingWeights, chosen_log_prob
from bayesattn.ops.attention.masking import masked_softmax


def valid_keys(mask: Bool[Tensor, "..."] | None, scores: Float[Tensor, "*bh m n"]) -> Bool[Tensor, "*bh m n"] | None:
    """Return the mask with the axes of the scores."""
    return None if mask is None else mask.expand(scores.shape)


class HardWeights(ChoosingWeights):
    """Choose one key, z ~ Categorical(softmax Φ); train inside `with_score_function`. Eval mode: softmax(Φ).

    Args:
        config: Of variant `hard-reinforce`; its `baseline` and `entropy_bonus` are used.
    """

    def __init__(self, config: AttentionChoice) -> None:
        super().__init__(config, "hard-reinforce")

    def forward(
        self, scores: Float[Tensor, "*bh m n"], keys=None, *, mask: Bool[Tensor, "..."] | None = None, prior: None = None
    ) -> Float[Tensor, "*bh m n"]:
        """Return one-hot weights, or softmax(scores) in eval mode."""
        mask = valid_keys(mask, scores)
        if not self.is_sampling:
            return masked_softmax(scores.to(torch.promote_types(scores.dtype, torch.float32)), mask).to(scores.dtype)
        log_p = categorical.log_probs(scores, mask)
        index = categorical.draw(log_p)
        self._choose(lambda: _choice(log_p, index))
        return categorical.one_hot(index, log_p).to(scores.dtype)


def _choice(log_p: Float[Tensor, "*bh m n"], index: Tensor) -> Choice:
    log_prob = chosen_log_prob(log_p, index)
    # a row without a key has no choice to reward
    log_prob, entropy = log_prob.masked_fill(log_prob == -torch.inf, 0.0), categorical.entropy(log_p)
    if log_p.ndim == 4:
        log_prob, entropy = log_prob.sum(dim=1), entropy.sum(dim=1)
    return Choice(log_prob, entropy)


class GumbelWeights(RivalWeights):
    """Relax the choice: W = softmax((Φ + G) / τ) with Gumbel noise G (Jang et al., 2017). Eval mode: softmax(Φ).

    Args:
        config: Of variant `hard-gumbel`; its `temperature` τ and `straight_through` are used.
    """

    def __init__(self, config: AttentionChoice) -> None:
        super().__init__(config, "hard-gumbel")

    def forward(
        self, scores: Float[Tensor, "*bh m n"], keys=None, *, mask: Bool[Tensor, "..."] | None = None, prior: None = None
    ) -> Float[Tensor, "*bh m n"]:
        """Return nearly one-hot weights, or softmax(scores) in eval mode."""
        mask, full = valid_keys(mask, scores), scores.to(torch.promote_types(scores.dtype, torch.float32))
        if not self.is_sampling:
            return masked_softmax(full, mask).to(scores.dtype)
        gumbel = -noise.exponential(None, (1, 1, 1, full.numel()), device=full.device, dtype=full.dtype).log()
        weights = masked_softmax((full + gumbel.view(full.shape)) / self.config.temperature, mask)
        if self.config.straight_through:
            chosen = categorical.one_hot(weights.argmax(dim=-1), torch.log(weights.detach()))
            # forward the choice, backward the relaxation
            weights = chosen + weights - weights.detach()
        return weights.to(scores.dtype)
