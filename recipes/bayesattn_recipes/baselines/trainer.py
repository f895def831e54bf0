"""The transformers Trainer for hard attention, whose scores get their gradient from a score function."""

from collections.abc import Callable

from torch import Tensor, nn

from bayesattn.integrations.hf import BayesianTrainer
from bayesattn_recipes.baselines.score_function import with_score_function


class ScoreFunctionTrainer(BayesianTrainer):
    """`BayesianTrainer` that also trains `hard-reinforce` attention."""

    def likelihood(self, model: nn.Module, run: Callable[[], Tensor]) -> Tensor:
        """Return the NLL of a micro-batch, with the gradient of the choices; all are charged with its mean loss."""
        return with_score_function(model, run)
