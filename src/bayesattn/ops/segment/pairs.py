"""Scores of edges that are a sum of something of the source and something of the target, as GAT's are.

    Φ_e = leaky_relu(a_source(e) + b_target(e))

The kernels add them up where they need them, and sum their gradients over the edges of a node, so that neither gathers nor
scatters have to be asked of the device one by one.
"""

from types import ModuleType
from typing import NamedTuple

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from bayesattn.ops.segment.edges import Edges


class PairScores(NamedTuple):
    """What the scores of edges are made of.

    Attributes:
        source: a of every node that may be a source.
        target: b of every node that may be a target.
        negative_slope: Of the LeakyReLU; not negative, so that the sign of a score is that of the sum.
    """

    source: Float[Tensor, "n h"]
    target: Float[Tensor, "r h"]
    negative_slope: float

    def on_edges(self, edges: Edges, ops: ModuleType) -> Float[Tensor, "e h"]:
        """Return Φ of every edge, by the gathers of `plain` or `csr`."""
        # both are gathers of this call alone, and can be written over
        scores = ops.lift_source(self.source, edges).add_(ops.lift_target(self.target, edges))
        return F.leaky_relu(scores, self.negative_slope, inplace=True)


class FeatureScores(NamedTuple):
    """What the two parts are made of where sources and targets are the same nodes: a = x · att_source, b = x · att_target.

    Attributes:
        features: x of every node, split into heads; where it is also the value of the attention, the very same tensor,
            the kernels compute the products.
        att_source: GAT's vector for sources.
        att_target: For targets.
        negative_slope: Of the LeakyReLU; not negative.
    """

    features: Float[Tensor, "n h d"]
    att_source: Float[Tensor, "1 h d"]
    att_target: Float[Tensor, "1 h d"]
    negative_slope: float

    def pair(self) -> PairScores:
        """Return the products, by torch operations."""
        source, target = ((self.features * att).sum(dim=-1) for att in (self.att_source, self.att_target))
        return PairScores(source, target, self.negative_slope)

    def on_edges(self, edges: Edges, ops: ModuleType) -> Float[Tensor, "e h"]:
        """Return Φ of every edge."""
        return self.pair().on_edges(edges, ops)
