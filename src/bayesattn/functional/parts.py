"""The individual steps of attention, of which the backends are made, for use in custom attention."""

from bayesattn.ops.attention.kl import kl_from_scores, log_alpha, lognormal_location
from bayesattn.ops.attention.masking import Allowed, masked_logsumexp, masked_softmax
from bayesattn.ops.attention.reference import expand_heads, noisy_softmax, weighted_values
from bayesattn.ops.attention.statistics import row_statistics

__all__ = [
    "Allowed",
    "expand_heads",
    "kl_from_scores",
    "log_alpha",
    "lognormal_location",
    "masked_logsumexp",
    "masked_softmax",
    "noisy_softmax",
    "row_statistics",
    "weighted_values",
]
