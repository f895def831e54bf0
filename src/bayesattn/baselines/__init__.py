"""What Bayesian attention is compared with, behind the same interface: hard, Gaussian and variational attention, MC dropout.

docs/baselines.md is the page about them.
"""

from bayesattn.baselines.attention import RivalAttention
from bayesattn.baselines.config import RIVALS, AttentionChoice
from bayesattn.baselines.dropout import DropoutWeights
from bayesattn.baselines.gaussian import GaussianContext, GaussianWeights
from bayesattn.baselines.hard import GumbelWeights, HardWeights
from bayesattn.baselines.latent import InferenceNetwork, LatentAlignment
from bayesattn.baselines.sampled_kl import SampledKLWeights
from bayesattn.baselines.score_function import with_score_function
from bayesattn.baselines.step import StepAttention, build_step_attention, build_weights

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
    "StepAttention",
    "build_step_attention",
    "build_weights",
    "with_score_function",
]
