"""Doubt in closed form: how much small attention noise moves a model's answer, from one backward pass."""

from bayesattn.doubt.result import SequenceScore, Uncertainty
from bayesattn.doubt.sequences import score
from bayesattn.doubt.tuning import NoiseTuning, tune_noise
from bayesattn.doubt.uncertainty import uncertainty

__all__ = ["NoiseTuning", "SequenceScore", "Uncertainty", "score", "tune_noise", "uncertainty"]
