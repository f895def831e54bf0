"""Hard attention: one key is chosen (Xu et al., 2015), with the gradient of REINFORCE or of a relaxation."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bayesattn_recipes.baselines.config import AttentionChoice
from bayesattn_recipes.baselines.module import RivalWeights
from bayesattn_recipes.baselines.rows import DenseRows, Rows
from bayesattn_recipes.baselines.score_function import Choice, ChoosingWeights


class HardWeights(ChoosingWeights):
    """Choose one key, z ~ Categorical(softmax Φ); train inside `with_score_function`. Eval mode: softmax(Φ).

    Args:
        config: One of variant `hard-reinforce`; its `baseline` and `entropy_bonus` are used.
    """

    def __init__(self, config: AttentionChoice) -> None:
        super().__init__(config, "hard-reinforce")

    def draw(self, scores: Float[Tensor, "..."], rows: Rows) -> tuple[Float[Tensor, "..."], None]:
        """Return one-hot weights by the Gumbel-max rule argmax(ln p − ln E), or softmax(scores) in eval mode."""
        if not self.is_sampling:
            return rows.softmax(scores), None
        log_p = rows.log_probs(scores)
        chosen = rows.largest(log_p.detach() - rows.exponential(log_p).log())
        self._choose(lambda: _choice(log_p, chosen, rows))
        return chosen, None

    def note(
        self, scores: Float[Tensor, "*bh m n"], chosen: Float[Tensor, "*bh m n"], mask: Bool[Tensor, "..."] | None
    ) -> None:
        """Note choices that were made elsewhere: one-hot weights of these scores."""
        rows = DenseRows.of(scores, mask)
        self._choose(lambda: _choice(rows.log_probs(scores), chosen, rows))


def _choice(log_p: Float[Tensor, "..."], chosen: Float[Tensor, "..."], rows: Rows) -> Choice:
    # a row without keys has no choice to reward
    known = rows.opened(log_p)
    return Choice(rows.by_query(chosen * known), -rows.by_query(torch.exp(log_p) * known))


class GumbelWeights(RivalWeights):
    """Relax the choice: W = softmax((Φ + G) / τ) with Gumbel noise G (Jang et al., 2017). Eval mode: softmax(Φ).

    Args:
        config: One of variant `hard-gumbel`; its `temperature` τ and `straight_through` are used.
    """

    def __init__(self, config: AttentionChoice) -> None:
        super().__init__(config, "hard-gumbel")

    def draw(self, scores: Float[Tensor, "..."], rows: Rows) -> tuple[Float[Tensor, "..."], None]:
        """Return nearly one-hot weights, or softmax(scores) in eval mode."""
        if not self.is_sampling:
            return rows.softmax(scores), None
        weights = rows.softmax((scores - rows.exponential(scores).log()) / self.config.temperature)
        if self.config.straight_through:
            # forward the choice, backward the relaxation
            weights = rows.largest(weights.detach()) + weights - weights.detach()
        return weights, None
