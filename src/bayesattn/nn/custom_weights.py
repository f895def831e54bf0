"""Custom attention weights: the interface of an object that replaces softmax and average in the modules of this library.

    ba.nn.MultiheadAttention(64, 4, weights=MyWeights)            # a class or function that builds the object, or the object
    ba.bayesianize(model, weights=MyWeights)                      # built once per attention module

Attention modules compute the scores Φ and hold the object as their child `bayes_weights`. While it `is_idle` they run
deterministic attention, fused kernels included; otherwise scores and values go to the object. The KL that it returns is
recorded by the module, under the module's name.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from bayesattn.functional import EdgeAttention, Edges


@runtime_checkable
class AttentionWeights(Protocol):
    """An `nn.Module` that turns scores into weights and output.

    For `sampling(model)` to switch it, it or a child of it must be a `nn.BayesianModule`. Its parameters are trained, saved
    and moved with the module that holds it.

    Attributes:
        name: Its name in errors, reports and saved files.
        has_kl: Whether calls return a KL inside `record_kl()`.
        kl_reduction: How that KL sums over queries and keys, as in `AttentionConfig`.
        has_own_dropout: Whether it drops weights itself and ignores `dropout_p`.
        runs_on_edges: Whether it has `on_edges` and `edge_weights`; without them graph layers refuse it.
        is_idle: Whether the next call would be soft attention: nothing drawn, no KL.

    Example:
        >>> import bayesattn as ba
        >>> class Sharp(nn.Module):
        ...     name, kl_reduction = "sharp", None
        ...     has_kl = has_own_dropout = runs_on_edges = is_idle = False
        ...     def settings(self):
        ...         return {}
        ...     def forward(self, scores, key, value, *, mask, dropout_p):
        ...         scores = scores if mask is None else scores.masked_fill(~mask, float("-inf"))
        ...         weights = torch.softmax(2.0 * scores, dim=-1)
        ...         return weights @ value, weights, None
        >>> attention, x = ba.nn.MultiheadAttention(8, 2, batch_first=True, weights=Sharp()), torch.randn(3, 5, 8)
        >>> attention(x, x, x)[0].shape
        torch.Size([3, 5, 8])
    """

    name: str
    has_kl: bool
    kl_reduction: str | None
    has_own_dropout: bool
    runs_on_edges: bool

    @property
    def is_idle(self) -> bool:
        """Whether the next call would be soft attention."""
        ...

    def settings(self) -> dict[str, Any]:
        """Return plain values that identify it; `load_bayesian` compares them with the saved ones."""
        ...

    def __call__(
        self,
        scores: Float[Tensor, "b h m n"],
        key: Float[Tensor, "b hk n d"],
        value: Float[Tensor, "b hk n dv"],
        *,
        mask: Bool[Tensor, "..."] | None,
        dropout_p: float,
    ) -> tuple[Float[Tensor, "b h m dv"], Float[Tensor, "b h m n"], Float[Tensor, " b"] | None]:
        """Return output, weights and the KL of each example (None without one) from scores Φ; True in the mask: attend."""
        ...

    def on_edges(
        self,
        scores: Float[Tensor, "e h"],
        value: Float[Tensor, "n h d"],
        edges: Edges,
        ops: ModuleType,
        *,
        dropout_p: float,
    ) -> EdgeAttention:
        """Return the same for the edges of a graph; `ops` has the sums over a node's edges that the layer uses itself."""
        ...

    def edge_weights(self, scores: Float[Tensor, "e h"], edges: Edges, ops: ModuleType) -> Float[Tensor, "e h"]:
        """Return only the weights of the edges, before dropout, for layers whose messages PyG sums."""
        ...


# called with head_dim (None where a foreign module does not have it), num_heads, device and dtype
WeightsFactory = Callable[..., AttentionWeights]


def build_weights(
    weights: AttentionWeights | WeightsFactory | None,
    *,
    head_dim: int | None,
    num_heads: int,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> AttentionWeights | None:
    """Return the object itself, or what its factory builds for an attention module of these sizes; None for None.

    Args:
        weights: The object, or the factory.
        head_dim: Features per key and head.
        num_heads: Number of key heads.
        device: Device of the module's parameters.
        dtype: Type of the module's parameters.
    """
    if weights is None:
        return None
    if not isinstance(weights, nn.Module):
        if not callable(weights):
            raise ValueError(f"weights must be an nn.Module, or a function that builds one, got {type(weights).__name__}")
        factory = cast(WeightsFactory, weights)
        weights = factory(head_dim=head_dim, num_heads=num_heads, device=device, dtype=dtype)
    missing = [name for name in _MEMBERS if not hasattr(weights, name)]
    if not isinstance(weights, nn.Module) or missing:
        raise ValueError(
            "weights must be an nn.Module with all members of bayesattn.nn.AttentionWeights, got "
            f"{type(weights).__name__} without {', '.join(missing) or 'nn.Module as its base'}"
        )
    return cast(AttentionWeights, weights)


_MEMBERS = ("name", "has_kl", "kl_reduction", "has_own_dropout", "runs_on_edges", "is_idle", "settings")
