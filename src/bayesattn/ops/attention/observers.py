"""The scope that collects statistics of deterministic attention from attention modules; `bayesattn.observe` opens it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from bayesattn.ops.attention.masking import split_bias
from bayesattn.ops.attention.statistics import Rows, row_statistics, score_statistics

_local = threading.local()


@dataclass(frozen=True, eq=False)
class Call:
    """One attention call.

    Attributes:
        module: Module that made the call.
        rows: Statistics per query.
        examples: Batch size of the model, if known; an example may fill several entries of the call's batch (windows).
    """

    module: nn.Module
    rows: Rows
    examples: int | None


@dataclass(eq=False)
class CallScope:
    """The calls of one scope.

    Attributes:
        positions: Keys whose share of the weight is computed.
        calls: The calls so far, in order.
    """

    positions: Bool[Tensor, "#b n"] | None = None
    calls: list[Call] = field(default_factory=list)


@contextmanager
def observed_calls(positions: Bool[Tensor, "#b n"] | None = None) -> Iterator[CallScope]:
    """Open a scope for the attention calls of this thread; scopes do not nest."""
    if getattr(_local, "scope", None) is not None:
        raise RuntimeError("observe() cannot be nested. Close the outer scope first")
    _local.scope = scope = CallScope(positions)
    try:
        yield scope
    finally:
        _local.scope = None


def is_open() -> bool:
    """Return whether this thread is inside a scope and is not recomputing a forward pass during backward."""
    if getattr(_local, "scope", None) is None:
        return False
    return torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1


def note_attention(
    module: nn.Module,
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    *,
    mask: Bool[Tensor, "..."] | None,
    bias: Float[Tensor, "..."] | None,
    is_causal: bool,
    scale: float,
    softcap: float | None = None,
) -> None:
    """Add a dot-product attention call to the open scope; arguments as in `row_statistics`."""
    if bias is not None:
        visible, bias = split_bias(bias)
        mask = visible if mask is None else mask & visible
    positions = _positions(module, query.shape[0], key.shape[2])
    options = {"mask": mask, "bias": bias, "is_causal": is_causal, "scale": scale, "softcap": softcap}
    _note(module, row_statistics(query, key, positions=positions, **options))


def note_scores(module: nn.Module, scores: Float[Tensor, "*bh m n"], mask: Bool[Tensor, "..."] | None) -> None:
    """Add a call with given scores to the open scope; axes as in `functional.attention_weights`."""
    shape = scores.shape
    full = scores.reshape((*shape[:-2], *([1] * (4 - len(shape))), *shape[-2:]))
    if mask is not None and mask.ndim == 3 and len(shape) == 3:
        mask = mask.unsqueeze(1)
    positions = _positions(module, full.shape[0], full.shape[-1])
    _note(module, score_statistics(full, mask, positions))


def _note(module: nn.Module, rows: Rows) -> None:
    examples = getattr(getattr(module, "batch", None), "examples", None)
    _local.scope.calls.append(Call(module, rows, examples))


def _positions(module: nn.Module, b: int, n: int) -> Bool[Tensor, "#b n"] | None:
    positions = _local.scope.positions
    if positions is not None and (positions.shape[1] != n or positions.shape[0] not in (1, b)):
        raise ValueError(
            f"positions must be a mask of shape ({n},) or ({b}, {n}) for {type(module).__name__}, got "
            f"{tuple(positions.shape)}"
        )
    return positions
