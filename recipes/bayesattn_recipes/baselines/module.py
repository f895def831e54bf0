"""Base of all replacements of the softmax: scores in, weights out, with the switches of a Bayesian module."""

from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor

from bayesattn.nn import BayesianModule
from bayesattn.precision import upcast
from bayesattn_recipes.baselines.config import AttentionChoice
from bayesattn_recipes.baselines.rows import DenseRows, Rows


class RivalModule(BayesianModule):
    """A module with Bayesian switches (`sampling(model)`, `record_kl()`), with a rival's config and no prior network."""

    config: AttentionChoice

    def __init__(self, config: AttentionChoice, *variants: str) -> None:
        super().__init__()
        if not isinstance(config, AttentionChoice) or config.variant not in variants:
            raise ValueError(
                f"config must be an AttentionChoice of variant {', '.join(map(repr, variants))}, got {config!r}"
            )
        self.config = config
        self.bayes_prior = None
        self.bayes_weights = None
        self.samples_in_eval = False
        self.drops_in_eval = False
        self.kl_name = type(self).__name__


class RivalWeights(RivalModule):
    """Called like `nn.BayesianWeights`: scores → weights. Subclasses implement `draw`, for dense scores and edges alike."""

    def log_prior(self, keys: Tensor, valid: Bool[Tensor, "..."] | None = None) -> None:
        """Return None: no rival has a prior over the keys to prepare."""
        return

    def forward(
        self,
        scores: Float[Tensor, "*bh m n"],
        keys: Any = None,
        *,
        mask: Bool[Tensor, "..."] | None = None,
        log_prior: None = None,
    ) -> Float[Tensor, "*bh m n"]:
        """Return the weights of one draw, or their mean in eval mode; keys and prior are not used."""
        weights, kl = self.draw(upcast(scores), DenseRows.of(scores, mask))
        return self.record(weights.to(scores.dtype), kl)

    def draw(self, scores: Float[Tensor, "..."], rows: Rows) -> tuple[Float[Tensor, "..."], Float[Tensor, " b"] | None]:
        """Return weights of float32 scores or better, and the KL of each example if there is one and it is recorded."""
        raise NotImplementedError
