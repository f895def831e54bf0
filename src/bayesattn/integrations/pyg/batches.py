"""Training on sampled neighborhoods: the KL of a batch's seed nodes stands for the KL of the whole graph.

PyG's `NeighborLoader` gives a batch its seed nodes first, `batch_size` of them, then the nodes their logits depend on, and
the sampled edges in local numbers. Only the seeds' rows count: each node is a seed once per epoch, but any number of times
in the neighborhoods of others. With B seeds drawn uniformly from all N nodes

    E[ N/B Σ_{i seed} KL_i ] = Σ_i KL_i

in every layer, so the KL a layer records in `neighbor_batch` is an unbiased estimate of the one it records on the whole
graph, whatever the reduction. With all neighbors of each node it is exact; with a fan-out, it is the KL on the graph of
sampled edges.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from bayesattn.config import AttentionConfig
from bayesattn.functional import Edges


@dataclass(frozen=True)
class SeedRows:
    """The rows that count in a layer's KL, and the graph they stand for.

    Attributes:
        count: Seeds, the first targets.
        num_nodes: Number of nodes of the whole graph.
        num_edges: Number of edges of the whole graph, as the layers see them; None where unknown.
    """

    count: int
    num_nodes: int
    num_edges: int | None

    def edges(self, edges: Edges) -> tuple[Edges, torch.Tensor]:
        """Return the edges into the seeds and their positions."""

        def build() -> tuple[Edges, torch.Tensor]:
            places = (edges.target < self.count).nonzero().flatten()
            own = (edges.source[places], edges.target[places])
            return Edges(*own, edges.num_sources, self.count, edges.numbers[places]), places

        return edges.memo(("seed rows", self.count), build)

    def entries(self, config: AttentionConfig) -> float:
        """Return the divisor of the seeds' summed KL per head that gives the reduced estimate for the whole graph."""
        share = self.count / self.num_nodes
        if config.kl_reduction == "sum":
            return share
        if config.kl_reduction == "row_mean":
            return share * self.num_nodes
        if self.num_edges is None:
            raise ValueError(
                "num_edges must be the number of edges of the whole graph where kl_reduction is 'mean', got None"
            )
        return share * self.num_edges


@contextmanager
def neighbor_batch(model: nn.Module, *, batch_size: int, num_nodes: int, num_edges: int | None = None) -> Iterator[None]:
    """Let the layers of `model` record the KL of a sampled batch as an estimate of the whole graph's.

    Seeds must be drawn from all nodes, labeled or not (`NeighborLoader(data, input_nodes=None, shuffle=True)`): the KL is
    that of all nodes, the likelihood that of the labeled ones among the seeds.

    Args:
        model: With layers of `bayesattn.integrations.pyg`.
        batch_size: Seeds of the batch, the first of its nodes: `batch.batch_size`.
        num_nodes: Nodes of the whole graph, each with at least one incoming edge (a self-loop is enough).
        num_edges: Edges of the whole graph, with the self-loops that a layer adds; needed only for `kl_reduction="mean"`.

    Raises:
        ValueError: A number is impossible, the model has no such layer, or a contextual prior is over all nodes of the
            graph, which a batch does not have.

    Example:
        >>> import bayesattn as ba
        >>> from bayesattn.integrations.pyg import BayesianGATConv
        >>> layer = BayesianGATConv(5, 4, config=AttentionConfig("BAM-WC"), prior_scope="neighborhood")
        >>> x, edge_index = torch.randn(3, 5), torch.tensor([[1, 2, 0], [0, 0, 1]])
        >>> with ba.record_kl() as scope, neighbor_batch(layer, batch_size=2, num_nodes=100):  # nodes 0 and 1 are the seeds
        ...     layer(x, edge_index).shape
        torch.Size([3, 4])
        >>> bool(scope.total() > 0.0)
        True
    """
    from bayesattn.integrations.pyg.attention import EdgeAttentionModule

    if not 1 <= batch_size <= num_nodes:
        raise ValueError(f"batch_size must be from 1 to {num_nodes}, the number of nodes, got {batch_size!r}")
    if num_edges is not None and num_edges < 1:
        raise ValueError(f"num_edges must be an integer of at least 1, or None, got {num_edges!r}")
    layers = [module for module in model.modules() if isinstance(module, EdgeAttentionModule)]
    if not layers:
        raise ValueError(
            f"model must have at least one layer of bayesattn.integrations.pyg, got {type(model).__name__} without any"
        )
    for layer in layers:
        if layer.bayes_prior is not None and layer.prior_scope == "graph":
            raise ValueError(
                "prior_scope must be 'neighborhood' in batches, got 'graph': a batch does not hold the whole graph"
            )
        custom = layer.bayes_weights
        if custom is not None and custom.has_kl:
            raise ValueError(f"weights must have no KL in batches, got {custom.name!r}, whose KL is over the whole graph")
    try:
        for layer in layers:
            layer.seed_rows = SeedRows(batch_size, num_nodes, num_edges)
        yield
    finally:
        for layer in layers:
            layer.seed_rows = None
