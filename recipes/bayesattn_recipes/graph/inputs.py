"""The network's inputs: node features and, for each of its two layers, edges; of a whole graph or of a part.

Two layers read two steps far. The second layer needs the edges into the wanted nodes, the first those into the wanted nodes
and their neighbors. Nodes of a part are renumbered: the wanted ones first, in their order.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bayesattn_recipes.graph.data import Graph

# denser features are multiplied faster as a dense matrix
LARGEST_SPARSE_SHARE = 0.25


class Inputs(NamedTuple):
    """The arguments of the network.

    Attributes:
        x: Features of every node; a CSR matrix if most of them are 0.
        edge_index: Edges of the first layer, source and target.
        output_edge_index: Edges of the second layer.
    """

    x: Float[Tensor, "n f"]
    edge_index: Int[Tensor, "2 e"]
    output_edge_index: Int[Tensor, "2 e2"]

    def to(self, device: torch.device | str) -> "Inputs":
        """Return the inputs on another device; a GPU multiplies dense features faster."""
        x = self.x if torch.device(device).type == "cpu" else self.x.to_dense()
        return Inputs(*(part.to(device) for part in (x, self.edge_index, self.output_edge_index)))


def whole_graph(graph: Graph) -> Inputs:
    """Return the inputs whose output is that of every node."""
    return Inputs(_compressed(graph.features), graph.edge_index, graph.edge_index)


def neighborhood(
    graph: Graph,
    nodes: Int[Tensor, " k"],
    *,
    fanout: int | None = None,
    generator: torch.Generator | None = None,
) -> Inputs:
    """Return inputs whose first outputs are those of `nodes`.

    Args:
        graph: The whole graph.
        nodes: Nodes whose logits are wanted; each once.
        fanout: Neighbors of a node that are kept, drawn without replacement, its self-loop not counted; None keeps all, and
            then the logits are those of the whole graph.
        generator: Generator of the draws.
    """
    if fanout is not None and fanout < 1:
        raise ValueError(f"fanout must be an integer of at least 1, or None, got {fanout!r}")
    second = _edges_into(graph, nodes, fanout, generator)
    inner = _with_sources(nodes, second)
    first = _edges_into(graph, inner, fanout, generator)
    used = _with_sources(inner, first)
    number = torch.empty(graph.num_nodes, dtype=torch.int64).index_put_((used,), torch.arange(len(used)))
    return Inputs(_compressed(graph.features[used]), number[first], number[second])


def _edges_into(
    graph: Graph, targets: Int[Tensor, " k"], fanout: int | None, generator: torch.Generator | None
) -> Int[Tensor, "2 e"]:
    """Return the edges into `targets`, grouped by target; with a fan-out its self-loop and `fanout` others."""
    source, target = graph.edge_index
    # the edges of a graph are sorted by target
    targets = targets.contiguous()
    first, stop = (torch.searchsorted(target, targets, right=is_stop) for is_stop in (False, True))
    counts = stop - first
    rows = torch.arange(len(targets)).repeat_interleave(counts)
    begins = counts.cumsum(0) - counts
    sources = source[torch.arange(len(rows)) - begins[rows] + first[rows]]
    if fanout is not None:
        keys = torch.rand(len(rows), generator=generator).masked_fill_(sources == targets[rows], -1.0)
        order = torch.argsort(keys)
        order = order[torch.argsort(rows[order], stable=True)]
        # the self-loop, whose key is the smallest, has rank 0
        kept = order[torch.arange(len(rows)) - begins[rows] <= fanout]
        rows, sources = rows[kept], sources[kept]
    return torch.stack([sources, targets[rows]])


def _with_sources(nodes: Int[Tensor, " k"], edges: Int[Tensor, "2 e"]) -> Int[Tensor, " k2"]:
    """Return the nodes, then all other sources of the edges."""
    sources = edges[0].unique()
    return torch.cat([nodes, sources[~torch.isin(sources, nodes)]])


def _compressed(x: Float[Tensor, "n f"]) -> Float[Tensor, "n f"]:
    """Return features as a CSR matrix, with 32-bit indices, if that is faster."""
    if int(x.count_nonzero()) > LARGEST_SPARSE_SHARE * x.numel():
        return x
    found = x.to_sparse_csr()
    indices = (found.crow_indices().to(torch.int32), found.col_indices().to(torch.int32))
    return torch.sparse_csr_tensor(*indices, found.values(), x.shape, check_invariants=False)
