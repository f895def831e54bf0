"""Training on sampled neighbourhoods: the KL of a batch's seed nodes stands for the KL of the whole graph.

PyG's `NeighborLoader` gives a batch its seed nodes first, `batch_size` of them, then the nodes their logits depend on, and
the sampled edges in local numbers. Only the seeds' rows count: each node is a seed once an epoch, but in the neighbourhoods
of others any number of times. With B seeds drawn uniformly from all N nodes

    E[ N/B Σ_{i seed} KL_i ] = Σ_i KL_i

in every layer, so the KL a layer records in `neighbor_batch` is an unbiased estimate of the one it records on the whole
graph, whatever the reduction. With all neighbours of each node it is exactly that; with a fan-out, that of the graph of
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
    """Whose rows count in a layer's KL, and what they stand for.

    Attributes:
        count: Seeds, the first targets.
        num_nodes: Of the whole graph.
        num_edges: Of the whole graph, as the layers see them; None where unknown.
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
        """Return by what the seeds' summed KL per head is divided to estimate the whole graph's, reduced."""
        share = self.count / self.num_nodes
        if config.kl_reduction == "sum":
            return share
        if config.kl_reduction == "row_mean":
            return share * self.num_nodes
        if self.num_edges is None:
            raise ValueError("num_edges is None; allowed where kl_reduction is 'mean': the edges of the whole graph")
        return share * self.num_edges


@contextmanager
def neighbor_batch(model: nn.Module, *, batch_size: int, num_nodes: int, num_edges: int | None = None) -> Iterator[None]:
    """Let the layers of `model` record the KL of a sampled batch as an estimate of the whole graph's.

    Seeds must be drawn from all nodes, labelled or not (`NeighborLoader(data, input_nodes=None, shuffle=True)`): the KL is
    of all nodes, the likelihood of the labelled ones among the seeds.

    Args:
        model: With layers of `bayesattn.integrations.pyg`.
        batch_size: Seeds of the batch, the first of its nodes: `batch.batch_size`.
        num_nodes: Nodes of the whole graph, into each of which some edge leads (a self-loop will do).
        num_edges: Edges of the whole graph, with the self-loops that a layer adds; needed for `kl_reduction="mean"` alone.

    Raises:
        ValueError: A number is impossible, the model has no such layer, or a contextual prior is over all nodes of the
            graph, which a batch does not know.
    """
    from bayesattn.integrations.pyg.attention import EdgeAttentionModule

    if not 1 <= batch_size <= num_nodes:
        raise ValueError(f"batch_size is {batch_size!r}; allowed: 1 to {num_nodes}, the nodes of the graph")
    if num_edges is not None and num_edges < 1:
        raise ValueError(f"num_edges is {num_edges!r}; allowed: an integer of at least 1, or None")
    layers = [module for module in model.modules() if isinstance(module, EdgeAttentionModule)]
    if not layers:
        raise ValueError(
            f"model is a {type(model).__name__} without a layer of bayesattn.integrations.pyg; allowed: at least one"
        )
    for layer in layers:
        if layer.bayes_prior is not None and layer.prior_scope == "graph":
            raise ValueError("prior_scope is 'graph', which a batch does not see; allowed in batches: 'neighbourhood'")
        custom = layer.bayes_weights
        if custom is not None and custom.has_kl:
            raise ValueError(
                f"weights are {custom.name!r}, whose KL is of the whole graph; allowed in batches: without a KL"
            )
    try:
        for layer in layers:
            layer.seed_rows = SeedRows(batch_size, num_nodes, num_edges)
        yield
    finally:
        for layer in layers:
            layer.seed_rows = None
