"""Inputs of a contextual prior that attention can compute in its own autograd node."""

from typing import NamedTuple

from jaxtyping import Bool, Float
from torch import Tensor


class NodePrior(NamedTuple):
    """Keys and network from which kernels compute ln Ψ of a graph's nodes.

    The weights are those of `priors.ContextualPrior`; `used` marks the nodes that are the source of some edge.
    """

    key: Float[Tensor, "n h d"]
    weight_in: Float[Tensor, "networks d hidden"]
    bias_in: Float[Tensor, "networks 1 hidden"]
    weight_out: Float[Tensor, "networks hidden 1"]
    bias_out: Float[Tensor, "networks 1 1"]
    used: Bool[Tensor, "1 1 n"]

    def log_prior(self) -> Float[Tensor, "n h"]:
        """Compute ln Ψ of every node in a separate autograd node."""
        from bayesattn.ops.prior import triton

        return triton.log_prior_of_nodes(*self)


class KeyPrior(NamedTuple):
    """Keys and network from which kernels compute ln Ψ of every key.

    Attributes:
        key: The keys of the attention call, split into heads.
        weights: W₁, b₁, W₂ and b₂ of `priors.ContextualPrior`.
        valid: Keys that exist; None means all.
        is_detached: Whether the prior passes no gradient to the keys.
    """

    key: Float[Tensor, "b h n d"]
    weights: tuple[Tensor, Tensor, Tensor, Tensor]
    valid: Bool[Tensor, "#b #h n"] | None
    is_detached: bool

    def log_prior(self) -> Float[Tensor, "b h 1 n"]:
        """Compute ln Ψ of every key in a separate autograd node."""
        from bayesattn.ops.prior import triton

        return triton.log_prior(self.key.detach() if self.is_detached else self.key, *self.weights, self.valid)
