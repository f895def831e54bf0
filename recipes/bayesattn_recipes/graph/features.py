"""Sparse node features: X W for many weight matrices W, each with its own dropout on X, in the time of the non-zeros.

A bag of words is zero almost everywhere (Cora 98.7 %), and dropout changes only what is not. So the dropped features of
all heads are one sparse matrix with a block per head, its indices built once; one product gives every head's projection,
and one product with the transposed matrix its gradient.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Int32
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, eq=False)
class SparseFeatures:
    """The non-zero features of the nodes, row by row (CSR), and where they are in the transposed matrix.

    Attributes:
        pointers: Where the entries of a node begin; one more than nodes.
        columns: Feature of every entry.
        values: Its value.
        by_column: Positions of the entries, sorted by feature.
        column_pointers: Where the entries of a feature begin in `by_column`.
    """

    pointers: Int32[Tensor, " n1"]
    columns: Int32[Tensor, " nnz"]
    values: Float[Tensor, " nnz"]
    by_column: Int[Tensor, " nnz"]
    column_pointers: Int32[Tensor, " f1"]
    _memo: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, features: Float[Tensor, "n f"]) -> "SparseFeatures":
        """Take the non-zeros of a dense matrix."""
        rows, columns = features.nonzero(as_tuple=True)
        return cls(
            pointers=_pointers(rows, features.shape[0]),
            columns=columns.to(torch.int32),
            values=features[rows, columns],
            by_column=torch.argsort(columns, stable=True),
            column_pointers=_pointers(columns.sort().values, features.shape[1]),
        )

    @property
    def num_nodes(self) -> int:
        """Number of rows."""
        return len(self.pointers) - 1

    @property
    def num_features(self) -> int:
        """Number of columns."""
        return len(self.column_pointers) - 1

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "SparseFeatures":
        """Return the features on another device, their values in another type."""
        return SparseFeatures(
            self.pointers.to(device),
            self.columns.to(device),
            self.values.to(device, dtype),
            self.by_column.to(device),
            self.column_pointers.to(device),
        )

    def take(self, nodes: Int[Tensor, " k"]) -> "SparseFeatures":
        """Return the features of some of the nodes, in their order."""
        positions, counts = row_positions(self.pointers, nodes)
        columns = self.columns[positions]
        return SparseFeatures(
            pointers=F.pad(counts.cumsum(0), (1, 0)).to(torch.int32),
            columns=columns,
            values=self.values[positions],
            by_column=torch.argsort(columns, stable=True),
            column_pointers=_pointers(columns.sort().values, self.num_features),
        )

    def project(
        self, values: Float[Tensor, "g nnz"] | Float[Tensor, " nnz"], weight: Float[Tensor, "g f d"]
    ) -> Float[Tensor, "n g d"]:
        """Return X_g W_g for every g; no gradient flows into the features.

        Args:
            values: Entries of X_g, or of one X for all g.
            weight: W_g.
        """
        return (_Project if values.ndim == 2 else _ProjectShared).apply(weight, values, self)

    def blocks(self, count: int) -> tuple[Tensor, Tensor]:
        """Return pointers and columns of the block-diagonal matrix of `count` blocks."""
        return self._stacked(("blocks", count), count, self.pointers, lambda: self.columns, self.num_features)

    def transposed_blocks(self, count: int) -> tuple[Tensor, Tensor]:
        """Return pointers and columns of its transpose, the entries of each block in the order of `by_column`."""

        def rows() -> Tensor:
            nodes = torch.arange(self.num_nodes, dtype=torch.int32, device=self.columns.device)
            return torch.repeat_interleave(nodes, self.pointers.diff())[self.by_column]

        return self._stacked(("transposed", count), count, self.column_pointers, rows, self.num_nodes)

    def _stacked(
        self, key: tuple[str, int], count: int, pointers: Tensor, columns: Callable[[], Tensor], width: int
    ) -> tuple[Tensor, Tensor]:
        if key not in self._memo:
            number = torch.arange(count, dtype=torch.int32, device=pointers.device)[:, None]
            stacked = torch.cat([(pointers[:-1] + number * pointers[-1]).flatten(), count * pointers[-1:]])
            self._memo[key] = (stacked, (columns() + number * width).flatten())
        return self._memo[key]


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: Tensor, values: Tensor, features: SparseFeatures) -> Tensor:
        ctx.features = features
        ctx.save_for_backward(values)
        (g, f, d), n = weight.shape, features.num_nodes
        pointers, columns = features.blocks(g)
        matrix = _matrix(pointers, columns, values.reshape(-1), (g * n, g * f))
        return (matrix @ weight.reshape(g * f, d)).view(g, n, d).transpose(0, 1).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        features: SparseFeatures = ctx.features
        (values,) = ctx.saved_tensors
        (n, g, d), f = grad.shape, features.num_features
        transposed = values.index_select(1, features.by_column).view(-1)
        pointers, columns = features.transposed_blocks(g)
        matrix = _matrix(pointers, columns, transposed, (g * f, g * n))
        return (matrix @ grad.transpose(0, 1).reshape(g * n, d)).view(g, f, d), None, None


class _ProjectShared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: Tensor, values: Tensor, features: SparseFeatures) -> Tensor:
        ctx.features = features
        ctx.save_for_backward(values)
        (g, f, d), n = weight.shape, features.num_nodes
        pointers, columns = features.blocks(1)
        matrix = _matrix(pointers, columns, values, (n, f))
        return (matrix @ weight.transpose(0, 1).reshape(f, g * d)).view(n, g, d)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        features: SparseFeatures = ctx.features
        (values,) = ctx.saved_tensors
        (n, g, d), f = grad.shape, features.num_features
        pointers, columns = features.transposed_blocks(1)
        matrix = _matrix(pointers, columns, values.index_select(0, features.by_column), (f, n))
        return (matrix @ grad.reshape(n, g * d)).view(f, g, d).transpose(0, 1), None, None


def _matrix(pointers: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    # the indices were made here
    return torch.sparse_csr_tensor(pointers, columns, values, shape, check_invariants=False)


def row_positions(pointers: Int[Tensor, " n1"], rows: Int[Tensor, " k"]) -> tuple[Int[Tensor, " p"], Int[Tensor, " k"]]:
    """Return where the entries of some rows of a CSR matrix are, row after row, and how many each row has."""
    first = pointers[rows].long()
    counts = pointers[rows + 1].long() - first
    ends = counts.cumsum(0)
    inside = torch.arange(int(ends[-1]) if len(ends) else 0, device=rows.device) - (ends - counts).repeat_interleave(counts)
    return first.repeat_interleave(counts) + inside, counts


def _pointers(sorted_rows: Tensor, count: int) -> Int32[Tensor, " c1"]:
    return torch._convert_indices_from_coo_to_csr(sorted_rows, count, out_int32=True)
