"""The contextual prior of a graph's nodes, not yet computed: attention on edges may do so in its own autograd node."""

from typing import NamedTuple

from jaxtyping import Bool, Float
from torch import Tensor


class NodePrior(NamedTuple):
    """Keys and network whose kernels give ln Ψ of every node.

    Attributes:
        key: Features of every node, split into heads.
        weight_in: As in `priors.ContextualPrior`, like the next three.
        bias_in: Of the hidden layer.
        weight_out: From the hidden layer to the logit.
        bias_out: Of the logit.
        used: Nodes that are the source of some edge.
    """

    key: Float[Tensor, "n h d"]
    weight_in: Float[Tensor, "networks d hidden"]
    bias_in: Float[Tensor, "networks 1 hidden"]
    weight_out: Float[Tensor, "networks hidden 1"]
    bias_out: Float[Tensor, "networks 1 1"]
    used: Bool[Tensor, "1 1 n"]

    def log_prior(self) -> Float[Tensor, "n h"]:
        """Return ln Ψ of every node, by an autograd node of its own."""
        from bayesattn.ops.prior import triton

        return triton.log_prior_of_nodes(*self)
