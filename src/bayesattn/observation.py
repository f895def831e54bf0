"""Measure how concentrated a model's attention is, per layer, head and example, without an m × n array.

    with ba.observe(model) as attention:
        model(**batch)
    attention.by_layer["bert.encoder.layer.0.attention.self"].entropy      # [b, h], in nats

The numbers describe the deterministic attention softmax(Φ), even if the model samples. On a GPU they take one more pass
over queries and keys, about as long as a forward pass of flash attention.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn

from bayesattn.config import AttentionConfig
from bayesattn.convert import bayesianize, restore
from bayesattn.convert.adapters import bayesian_names
from bayesattn.nn import BayesianModule
from bayesattn.ops.attention.observers import Call, CallScope, observed_calls


@dataclass(frozen=True, eq=False)
class LayerAttention:
    """Statistics of one layer, each averaged over the queries that count; NaN for an example without any.

    Attributes:
        entropy: Entropy of the weights, in nats: 0 is one key, ln n is uniform over n keys.
        largest: The largest weight.
        share: Weight on the given positions; None if none were given.
    """

    entropy: Float[Tensor, "b h"]
    largest: Float[Tensor, "b h"]
    share: Float[Tensor, "b h"] | None


@dataclass(eq=False)
class ObservedAttention:
    """The statistics collected by `observe`; they can be read inside the scope and after it."""

    _names: Mapping[Any, str]
    _queries: Bool[Tensor, "#b m"] | None
    _scope: CallScope = field(default_factory=CallScope)

    @property
    def calls(self) -> list[tuple[str, LayerAttention]]:
        """(Module name, statistics) of each call in order; a module that runs twelve times has twelve entries."""
        return [
            (self._names.get(call.module, type(call.module).__name__), _layer(call, self._queries))
            for call in self._scope.calls
        ]

    @property
    def by_layer(self) -> dict[str, LayerAttention]:
        """Statistics by module name, averaged over the calls of each module.

        Raises:
            RuntimeError: No attention ran, or a module ran with batches of different sizes.
        """
        found: dict[str, list[LayerAttention]] = {}
        for name, layer in self.calls:
            found.setdefault(name, []).append(layer)
        if not found:
            raise RuntimeError(
                "no attention was observed. Run the model inside `with ba.observe(model)`, in the same thread"
            )
        return {name: _mean(name, layers) for name, layers in found.items()}


@contextmanager
def observe(
    model: nn.Module,
    positions: Tensor | None = None,
    *,
    queries: Tensor | None = None,
) -> Iterator[ObservedAttention]:
    """Observe the attention of every forward pass inside the scope. The model's outputs do not change.

    A model without Bayesian attention is converted to soft attention while the scope is open.

    Args:
        model: Any model that `bayesianize` can convert, or one that is already Bayesian.
        positions: Boolean mask, `n` or `b n`, of keys whose share of the weight to measure.
        queries: Boolean mask, `m` or `b m`, of the queries that count, usually the attention mask; by default, all that have
            a key.

    Raises:
        ValueError: The model cannot be converted, attends along the edges of a graph, or a mask is not boolean.

    Example:
        >>> import torch
        >>> model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        >>> with observe(model) as attention:
        ...     output = model(torch.randn(3, 5, 8))
        >>> attention.by_layer["self_attn"].entropy.shape
        torch.Size([3, 2])
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    chosen, counted = _as_mask("positions", positions), _as_mask("queries", queries)
    is_plain = not any(isinstance(module, BayesianModule) for module in model.modules())
    if is_plain:
        bayesianize(model, AttentionConfig("soft"))
    try:
        names = bayesian_names(model)
        edges = [name for part, name in names.items() if part.on_edges]
        if edges:
            raise ValueError(f"{edges[0]!r} attends along the edges of a graph, which observe() does not support")
        with observed_calls(chosen) as scope:
            yield ObservedAttention({**names}, counted, scope)
    finally:
        if is_plain:
            restore(model)


def _as_mask(name: str, mask: Tensor | None) -> Bool[Tensor, "#b n"] | None:
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.ndim not in (1, 2):
        shown = f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"{name} must be a boolean tensor with one or two axes, such as attention_mask.bool(), got {shown}")
    return mask.unsqueeze(0) if mask.ndim == 1 else mask


def _layer(call: Call, queries: Bool[Tensor, "#b m"] | None) -> LayerAttention:
    rows, counted = call.rows, call.rows.keys > 0.0
    if queries is not None:
        b, _, m = counted.shape
        if queries.shape[1] != m or queries.shape[0] not in (1, b):
            raise ValueError(
                f"queries must be a mask of shape ({m},) or ({b}, {m}) for {type(call.module).__name__}, got "
                f"{tuple(queries.shape)}"
            )
        counted = counted & queries.to(counted.device)[:, None]
    number = _per_example(call.examples, counted).sum(dim=-1)

    def mean(values: Tensor) -> Tensor:
        return _per_example(call.examples, values * counted).sum(dim=-1) / number

    return LayerAttention(mean(rows.entropy), mean(rows.largest), None if rows.share is None else mean(rows.share))


def _per_example(examples: int | None, values: Shaped[Tensor, "w h m"]) -> Shaped[Tensor, "b h rows"]:
    """Collect the rows of each example: a model may have cut examples into consecutive windows."""
    if examples is None or values.shape[0] <= examples or values.shape[0] % examples:
        return values
    return values.unflatten(0, (examples, -1)).transpose(1, 2).flatten(2)


def _mean(name: str, layers: list[LayerAttention]) -> LayerAttention:
    sizes = {layer.entropy.shape[0] for layer in layers}
    if len(sizes) > 1:
        raise RuntimeError(
            f"{name!r} ran with batches of {', '.join(map(str, sorted(sizes)))} examples. Use one scope per batch, or read "
            "`calls`"
        )
    shares = [layer.share for layer in layers if layer.share is not None]
    return LayerAttention(
        torch.stack([layer.entropy for layer in layers]).mean(dim=0),
        torch.stack([layer.largest for layer in layers]).mean(dim=0),
        torch.stack(shares).mean(dim=0) if shares else None,
    )
