"""Scores of edges that are the sum of a source part and a target part, as in GAT.

    Φ_e = leaky_relu(a_source(e) + b_target(e))

The kernels add the parts where they are needed, and sum the gradients over the edges of each node, without separate gathers
and scatters.
"""

from types import ModuleType
from typing import NamedTuple

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from bayesattn.ops.segment.edges import Edges


class PairScores(NamedTuple):
    """The two parts of the scores of edges.

    Attributes:
        source: a of each node that may be a source.
        target: b of each node that may be a target.
        negative_slope: Slope of the LeakyReLU; at least 0, so that a score has the sign of its sum.

    Example:
        >>> import torch
        >>> from bayesattn.ops.segment import plain
        >>> edges = Edges.sort(torch.tensor([0, 1]), torch.tensor([0, 0]), 2, 2)
        >>> pair = PairScores(torch.tensor([[1.0], [-3.0]]), torch.tensor([[1.0], [0.0]]), 0.2)
        >>> pair.on_edges(edges, plain).flatten()
        tensor([ 2.0000, -0.4000])
    """

    source: Float[Tensor, "n h"]
    target: Float[Tensor, "r h"]
    negative_slope: float

    def on_edges(self, edges: Edges, ops: ModuleType) -> Float[Tensor, "e h"]:
        """Return Φ of each edge, by the gathers of the module `plain` or `csr`."""
        # both gathers are new tensors, so they can be overwritten
        scores = ops.lift_source(self.source, edges).add_(ops.lift_target(self.target, edges))
        return F.leaky_relu(scores, self.negative_slope, inplace=True)


class FeatureScores(NamedTuple):
    """Features for both parts if sources and targets are the same nodes: a = x · att_source, b = x · att_target.

    Attributes:
        features: x of each node, split into heads; if the same tensor is also the value of the attention, the kernels
            compute the products.
        att_source: GAT's vector for sources.
        att_target: GAT's vector for targets.
        negative_slope: Slope of the LeakyReLU, at least 0.

    Example:
        >>> import torch
        >>> features, att = torch.ones(3, 2, 4), torch.ones(1, 2, 4)  # three nodes, two heads
        >>> FeatureScores(features, att, -att, 0.2).pair().source
        tensor([[4., 4.],
                [4., 4.],
                [4., 4.]])
    """

    features: Float[Tensor, "n h d"]
    att_source: Float[Tensor, "1 h d"]
    att_target: Float[Tensor, "1 h d"]
    negative_slope: float

    def pair(self) -> PairScores:
        """Return both products, computed by torch operations."""
        source, target = ((self.features * att).sum(dim=-1) for att in (self.att_source, self.att_target))
        return PairScores(source, target, self.negative_slope)

    def on_edges(self, edges: Edges, ops: ModuleType) -> Float[Tensor, "e h"]:
        """Return Φ of each edge, by torch operations and the gathers of `plain` or `csr`."""
        return self.pair().on_edges(edges, ops)
