"""The contextual prior, not yet computed: attention may do so in its own autograd node."""

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


class KeyPrior(NamedTuple):
    """Keys and network whose kernels give ln Ψ of every key.

    Attributes:
        key: Features of every key, split into heads; those of the attention call itself.
        weights: W₁, b₁, W₂ and b₂, as in `priors.ContextualPrior`.
        valid: Keys that exist; None is all.
        is_detached: Whether the keys get no gradient from it.
    """

    key: Float[Tensor, "b h n d"]
    weights: tuple[Tensor, Tensor, Tensor, Tensor]
    valid: Bool[Tensor, "#b #h n"] | None
    is_detached: bool

    def log_prior(self) -> Float[Tensor, "b h 1 n"]:
        """Return ln Ψ of every key, by an autograd node of its own."""
        from bayesattn.ops.prior import triton

        return triton.log_prior(self.key.detach() if self.is_detached else self.key, *self.weights, self.valid)
