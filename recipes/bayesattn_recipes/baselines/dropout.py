"""MC dropout (Gal and Ghahramani, 2016): soft attention with dropout on its weights, kept on when predicting."""

from jaxtyping import Float
from torch import Tensor, nn

from bayesattn_recipes.baselines.config import AttentionChoice
from bayesattn_recipes.baselines.module import RivalWeights
from bayesattn_recipes.baselines.rows import Rows


class DropoutWeights(RivalWeights):
    """softmax(Φ) with dropout in training and inside `sampling(model, dropout=True)`, with all other dropout.

    Args:
        config: One of variant `mc-dropout`; its `attention_dropout` is used.
    """

    def __init__(self, config: AttentionChoice) -> None:
        super().__init__(config, "mc-dropout")
        # a layer of its own: `sampling(model, dropout=True)` finds it among the others
        self.dropout = nn.Dropout(config.attention_dropout)

    @property
    def is_idle(self) -> bool:
        """Whether dropout is off."""
        return not self.dropout.training

    def draw(self, scores: Float[Tensor, "..."], rows: Rows) -> tuple[Float[Tensor, "..."], None]:
        """Return softmax(scores), with dropout if it is on."""
        weights = rows.softmax(scores)
        return (weights * rows.keep(weights, self.dropout.p) if self.dropout.training else weights), None
