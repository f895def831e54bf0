"""What a graph attention network reads: sparse features and, for each of two layers, edges; of a whole graph or a part."""

from dataclasses import dataclass, replace

import torch

from bayesattn.ops.segment.edges import Edges
from bayesattn_recipes.graph.data import Graph
from bayesattn_recipes.graph.features import SparseFeatures


@dataclass(frozen=True, eq=False)
class Batch:
    """Some nodes of a graph, the first targets of both layers, with all their edges.

    In every batch their rows stand for the KL of the whole graph: each node is in one batch of an epoch.

    Attributes:
        num_nodes: Of the batch.
        edges: Into them, of each layer.
        whole_nodes: Nodes of the whole graph.
        whole_edges: Edges of the whole graph.
    """

    num_nodes: int
    edges: tuple[Edges, Edges]
    whole_nodes: int
    whole_edges: int


@dataclass(frozen=True, eq=False)
class GraphInputs:
    """What the network reads: features and, for each layer, edges.

    Attributes:
        features: Of the sources of the first layer.
        edges: Of each layer. In a whole graph the same; in a sampled one targets are the first sources, and the targets of
            one layer are the sources of the next.
        batch: Whose KL counts, where this is a part of a graph; None where it is the whole.
    """

    features: SparseFeatures
    edges: tuple[Edges, Edges]
    batch: "Batch | None" = None

    @classmethod
    def of(cls, graph: Graph) -> "GraphInputs":
        """Take the whole graph."""
        source, target = graph.edge_index
        edges = Edges.sort(source, target, graph.num_nodes, graph.num_nodes)
        return cls(SparseFeatures.of(graph.features), (edges, edges))

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "GraphInputs":
        """Return the inputs on another device, the features in another type."""
        edges, batch = self.edges, self.batch
        moved = {part: _move(part, device) for part in (*edges, *(batch.edges if batch else ()))}
        if batch is not None:
            batch = replace(batch, edges=(moved[batch.edges[0]], moved[batch.edges[1]]))
        return GraphInputs(self.features.to(device, dtype), (moved[edges[0]], moved[edges[1]]), batch)


def _move(edges: Edges, device: torch.device | str) -> Edges:
    order = None if edges.order is None else edges.order.to(device)
    return Edges(edges.source.to(device), edges.target.to(device), edges.num_sources, edges.num_targets, order)
