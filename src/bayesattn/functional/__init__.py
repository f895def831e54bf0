"""The whole method as pure functions: scores → weights; query, key, value → output; and the same on the edges of a graph.

All modules, layers and adapters of the library call these three functions, which check their arguments, switch autocast off
(noise, softmax and KL are float32 or better) and choose a backend. The mathematics is in `ops/attention` and `ops/segment`.
"""

from bayesattn.functional.dense import BACKENDS, Backend, attention, attention_weights
from bayesattn.functional.edges import (
    EDGE_BACKENDS,
    PRIOR_SCOPES,
    EdgeAttention,
    EdgeBackend,
    Edges,
    FeatureScores,
    PairScores,
    PriorScope,
    edge_attention,
)

__all__ = [
    "BACKENDS",
    "EDGE_BACKENDS",
    "PRIOR_SCOPES",
    "Backend",
    "EdgeAttention",
    "EdgeBackend",
    "Edges",
    "FeatureScores",
    "PairScores",
    "PriorScope",
    "attention",
    "attention_weights",
    "edge_attention",
]
