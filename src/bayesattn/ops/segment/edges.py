"""The edges of a graph, sorted by target once: a sparse attention matrix, in CSR form by target and by source.

An edge e = (j → i) is one entry of the attention matrix: target i attends to source j. Sorting by target makes the edges of
a row consecutive, so sums over them need no scatter. `order[p]` is the original number of the edge at position p, which
determines its noise.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from jaxtyping import Int, Int32, Shaped
from torch import Tensor

Built = TypeVar("Built")


@dataclass(frozen=True, eq=False)
class Edges:
    """Edges of a graph; scores, weights and other values per edge are in the order of `source` and `target`.

    Attributes:
        source: Source of each edge, the node that is attended to.
        target: Target of each edge, the node that attends.
        num_sources: Number of nodes that may be sources.
        num_targets: Number of nodes that may be targets; the same nodes unless the graph is bipartite.
        order: Original number of each edge; None if the edges are in their original order.

    Example:
        >>> edges = Edges.sort(torch.tensor([2, 0, 1]), torch.tensor([1, 0, 0]), 3, 3)  # 2 → 1, 0 → 0, 1 → 0
        >>> edges.target, edges.degree
        (tensor([0, 0, 1]), tensor([2, 1, 0]))
        >>> edges.to_given(edges.source)  # back in the original order
        tensor([2, 0, 1])
    """

    source: Int[Tensor, " e"]
    target: Int[Tensor, " e"]
    num_sources: int
    num_targets: int
    order: Int[Tensor, " e"] | None = None
    _memo: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def sort(
        cls,
        source: Int[Tensor, " e"],
        target: Int[Tensor, " e"],
        num_sources: int,
        num_targets: int,
        *,
        check: bool = True,
    ) -> "Edges":
        """Check the end points of edges and sort by target; the check waits for the device, and `check=False` skips it.

        Raises:
            ValueError: An end point is negative, or not below the number of nodes on its side.
        """
        for name, nodes, limit in (("source", source, num_sources), ("target", target, num_targets)):
            if check and nodes.numel():
                low, high = (int(x) for x in torch.aminmax(nodes))
                if low < 0 or high >= limit:
                    raise ValueError(f"{name} of the edges must be in [0, {limit - 1}], got entries in [{low}, {high}]")
        order = torch.argsort(target, stable=True)
        return cls(source[order], target[order], num_sources, num_targets, order)

    def __len__(self) -> int:
        return self.source.shape[0]

    @property
    def numbers(self) -> Int[Tensor, " e"]:
        """Original number of each edge, which determines its noise."""
        return torch.arange(len(self), device=self.source.device) if self.order is None else self.order

    def memo(self, key: Hashable, build: Callable[[], Built]) -> Built:
        """Return the result of `build`, cached under `key` for the lifetime of the edges."""
        if key not in self._memo:
            self._memo[key] = build()
        return self._memo[key]

    def from_given(self, x: Shaped[Tensor, "e *f"]) -> Shaped[Tensor, "e *f"]:
        """Reorder values per edge from the original order to that of `source` and `target`."""
        return x if self.order is None else x.index_select(0, self.order)

    def to_given(self, x: Shaped[Tensor, "e *f"]) -> Shaped[Tensor, "e *f"]:
        """Undo `from_given`."""
        return x if self.order is None else x.index_select(0, self._inverse)

    @property
    def _inverse(self) -> Int[Tensor, " e"]:
        def build() -> Tensor:
            return torch.empty_like(self.numbers).scatter_(
                0, self.numbers, torch.arange(len(self), device=self.source.device)
            )

        return self.memo("inverse", build)

    @property
    def target_pointers(self) -> Int32[Tensor, " r1"]:
        """Position of each target's first edge, then the number of edges; the edges must be sorted."""
        return self.memo("target pointers", lambda: _pointers(self.target, self.num_targets))

    @property
    def by_source(self) -> Int32[Tensor, " e"]:
        """Positions of the edges, sorted by source."""
        return self.memo("by source", lambda: torch.argsort(self.source, stable=True).to(torch.int32))

    @property
    def source_pointers(self) -> Int32[Tensor, " n1"]:
        """Position of each source's first edge in `by_source`, then the number of edges."""
        return self.memo("source pointers", lambda: _pointers(self.source[self.by_source], self.num_sources))

    @property
    def degree(self) -> Int[Tensor, " r"]:
        """Number of edges into each target."""
        return self.memo("degree", lambda: _count(self.target, self.num_targets))

    @property
    def out_degree(self) -> Int[Tensor, " n"]:
        """Number of edges out of each source."""
        return self.memo("out degree", lambda: _count(self.source, self.num_sources))

    @property
    def num_rows(self) -> Int[Tensor, ""]:
        """Number of targets with at least one edge."""
        return self.memo("rows", lambda: (self.degree > 0).sum())


def _pointers(nodes: Int[Tensor, " e"], count: int) -> Int32[Tensor, " n1"]:
    return torch._convert_indices_from_coo_to_csr(nodes, count, out_int32=True)


def _count(nodes: Int[Tensor, " e"], count: int) -> Int[Tensor, " n"]:
    return nodes.new_zeros(count).index_add(0, nodes, torch.ones_like(nodes))
