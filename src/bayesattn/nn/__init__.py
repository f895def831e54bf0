"""Attention modules whose weights are sampled: thin shells over `bayesattn.functional`."""

from bayesattn.nn.additive import AdditiveAttention
from bayesattn.nn.custom_weights import AttentionWeights, WeightsFactory
from bayesattn.nn.module import BayesianModule
from bayesattn.nn.multihead import MultiheadAttention
from bayesattn.nn.step import StepAttention, StepWeights
from bayesattn.nn.transformer import TransformerDecoderLayer, TransformerEncoderLayer
from bayesattn.nn.weights import BayesianWeights

__all__ = [
    "AdditiveAttention",
    "AttentionWeights",
    "BayesianModule",
    "BayesianWeights",
    "MultiheadAttention",
    "StepAttention",
    "StepWeights",
    "TransformerDecoderLayer",
    "TransformerEncoderLayer",
    "WeightsFactory",
]
