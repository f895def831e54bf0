"""Rivals of Bayesian attention behind the same interface: hard, Gaussian and variational attention, MC dropout.

docs/recipes/rivals.md describes them.
"""

from bayesattn_recipes.baselines.attention import RivalAttention, attention_options
from bayesattn_recipes.baselines.config import RIVALS, AttentionChoice
from bayesattn_recipes.baselines.dropout import DropoutWeights
from bayesattn_recipes.baselines.gaussian import GaussianContext, GaussianWeights
from bayesattn_recipes.baselines.hard import GumbelWeights, HardWeights
from bayesattn_recipes.baselines.latent import InferenceNetwork, LatentAlignment
from bayesattn_recipes.baselines.sampled_kl import SampledKLWeights
from bayesattn_recipes.baselines.score_function import with_score_function
from bayesattn_recipes.baselines.step import build_step_attention
from bayesattn_recipes.baselines.uniform import UniformWeights
from bayesattn_recipes.baselines.weights import build_weights

__all__ = [
    "RIVALS",
    "AttentionChoice",
    "DropoutWeights",
    "GaussianContext",
    "GaussianWeights",
    "GumbelWeights",
    "HardWeights",
    "InferenceNetwork",
    "LatentAlignment",
    "RivalAttention",
    "SampledKLWeights",
    "UniformWeights",
    "attention_options",
    "build_step_attention",
    "build_weights",
    "with_score_function",
]
