"""The whole method as pure functions: scores → weights; query, key, value → output; and the same on the edges of a graph.

Every module, layer and adapter of the library calls these three. They check their arguments, leave autocast (noise,
softmax and KL are float32 or better) and choose a backend; the mathematics is in `ops/attention` and `ops/segment`.
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
