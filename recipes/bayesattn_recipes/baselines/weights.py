"""Replacements of the softmax for any config: Bayesian weights or those of a rival."""

from bayesattn.config import AttentionConfig
from bayesattn.nn import BayesianWeights
from bayesattn_recipes.baselines.config import AttentionChoice
from bayesattn_recipes.baselines.dropout import DropoutWeights
from bayesattn_recipes.baselines.gaussian import GaussianWeights
from bayesattn_recipes.baselines.hard import GumbelWeights, HardWeights
from bayesattn_recipes.baselines.module import RivalWeights
from bayesattn_recipes.baselines.sampled_kl import SampledKLWeights
from bayesattn_recipes.baselines.uniform import UniformWeights

# variant: its weights; the others are soft attention with something around it
WEIGHTS: dict[str, type[RivalWeights]] = {
    "hard-reinforce": HardWeights,
    "hard-gumbel": GumbelWeights,
    "gaussian-weights": GaussianWeights,
    "mc-dropout": DropoutWeights,
    "uniform": UniformWeights,
}


def build_weights(
    config: AttentionConfig, *, key_dim: int | None = None, num_heads: int = 1
) -> BayesianWeights | RivalWeights:
    """Build the replacement of the softmax: a module from scores (and a mask) to weights.

    Args:
        config: A Bayesian variant, or a rival that changes the weights.
        key_dim: Features of a key; needed for contextual priors.
        num_heads: Heads of the scores; matters only for `prior_per_head`.
    """
    if not isinstance(config, AttentionChoice):
        return BayesianWeights(config, key_dim=key_dim, num_heads=num_heads)
    if config.variant in WEIGHTS:
        return WEIGHTS[config.variant](config)  # type: ignore[call-arg]  (subclasses set their own variant)
    if not config.is_bayesian:
        raise ValueError(
            f"variant must be one of {', '.join(map(repr, (*AttentionConfig.allowed_variants, *WEIGHTS)))} here, got "
            f"{config.variant!r}, which changes more than the weights"
        )
    return (SampledKLWeights if config.sampled_kl else BayesianWeights)(config, key_dim=key_dim, num_heads=num_heads)
