"""Scores of edges that are a sum of something of the source and something of the target, as GAT's are.

    Φ_e = leaky_relu(a_source(e) + b_target(e))

The kernels add them up where they need them, and sum their gradients over the edges of a node, so that neither gathers nor
scatters have to be asked of the device one by one.
"""

from types import ModuleType
from typing import NamedTuple

import torch
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


def opened(
    source: Float[Tensor, "x h"], target: Float[Tensor, "r h"] | None, negative_slope: float | None, num_edges: int
) -> tuple[Float[Tensor, "e h"], PairScores | None]:
    """Return the scores of the edges, and of what they are made, from how an autograd node has to be given either.

    Either the first argument is the scores and there is no target; or the scores are empty, for a kernel to write them.
    """
    if target is None:
        return source.contiguous(), None
    assert negative_slope is not None
    pair = PairScores(source.contiguous(), target.contiguous(), negative_slope)
    return source.new_empty((num_edges, source.shape[1]), dtype=torch.float32), pair
