"""Sparse node features: X Wᵀ for a CSR matrix X on a CPU, with a gradient as fast as the product itself.

A bag of words is zero almost everywhere (Cora: 98.7 %). torch multiplies such a matrix quickly, but its gradient sorts the
matrix anew in every backward pass to transpose it. Here a layer keeps the transposed pattern from one call to the next;
dropout on the features changes the values, not the pattern.
"""

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bayesattn.precision import without_autocast


class _Pattern(NamedTuple):
    """Where the entries of X are, as given and transposed."""

    pointers: Int[Tensor, " n1"]
    columns: Int[Tensor, " nnz"]
    # entries by column, and their rows
    order: Int[Tensor, " nnz"]
    column_pointers: Int[Tensor, " f1"]
    rows: Int[Tensor, " nnz"]


# of every layer's last backward pass; not on the layer, which is copied and pickled
_PATTERNS: WeakKeyDictionary[nn.Module, _Pattern] = WeakKeyDictionary()


def is_sparse_on_cpu(x: Any) -> bool:
    """Whether `project` takes these features: a CSR matrix on a CPU that needs no gradient."""
    return isinstance(x, Tensor) and x.layout is torch.sparse_csr and not x.is_cuda and not x.requires_grad


def project(layer: nn.Module, x: Float[Tensor, "n f"], weight: Float[Tensor, "d f"]) -> Float[Tensor, "n d"]:
    """Return X Wᵀ; no gradient flows into the features.

    Args:
        layer: The layer that uses them; its last transposed pattern is reused where the pattern is the same.
        x: Features for which `is_sparse_on_cpu` is True.
        weight: W.
    """
    with without_autocast("cpu"):
        return _Project.apply(weight, x, layer)


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: Tensor, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.x, ctx.layer = x, layer
        return x @ weight.T

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, pattern = ctx.x, _pattern(ctx.layer, ctx.x)
        values = x.values().index_select(0, pattern.order)
        # the indices come from a valid matrix
        transposed = torch.sparse_csr_tensor(
            pattern.column_pointers, pattern.rows, values, (x.shape[1], x.shape[0]), check_invariants=False
        )
        return (transposed @ grad).T, None, None


def _pattern(layer: nn.Module, x: Tensor) -> _Pattern:
    pointers, columns = x.crow_indices(), x.col_indices()
    known = _PATTERNS.get(layer)
    if known is not None and torch.equal(known.pointers, pointers) and torch.equal(known.columns, columns):
        return known
    order = torch.argsort(columns, stable=True)
    counts = torch.bincount(columns, minlength=x.shape[1])
    rows = torch.repeat_interleave(torch.arange(x.shape[0], dtype=columns.dtype), pointers.diff())[order]
    column_pointers = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(columns.dtype)
    # copies: the caller may change its own tensors in place
    _PATTERNS[layer] = _Pattern(pointers.clone(), columns.clone(), order, column_pointers, rows)
    return _PATTERNS[layer]
