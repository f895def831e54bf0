"""Uniform attention, a control: every key has the same weight. Where it does as well as soft, attention is not needed."""

import math

from jaxtyping import Float
from torch import Tensor

from bayesattn_recipes.baselines.config import AttentionChoice
from bayesattn_recipes.baselines.module import RivalWeights
from bayesattn_recipes.baselines.rows import Rows


class UniformWeights(RivalWeights):
    """softmax(0) over the keys that masks leave open; the scores and the parameters behind them have no effect.

    Args:
        config: One of variant `uniform`.
    """

    def __init__(self, config: AttentionChoice) -> None:
        super().__init__(config, "uniform")

    @property
    def is_idle(self) -> bool:
        """False: the weights are never those of soft attention."""
        return False

    def draw(self, scores: Float[Tensor, "..."], rows: Rows) -> tuple[Float[Tensor, "..."], None]:
        """Return 1/n for each of the n open keys of a row."""
        closed = scores == -math.inf
        return rows.softmax(self.flat(scores.masked_fill(closed, 0.0)).masked_fill(closed, -math.inf)), None

    @staticmethod
    def flat(scores: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Return zeros: parameters behind the scores get a gradient of 0, which training in several processes requires."""
        return 0.0 * scores
