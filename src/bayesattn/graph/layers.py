"""PyG's attention layers with sampled edge weights: subclasses to which `bayesianize` swaps the class of an instance.

    Φ_e per edge and head → W = softmax over the edges into a node of log S        (Sec. 4.1 of the paper, sparse)

Each overrides the method that holds the softmax, and only while it samples or records; otherwise PyG's own code runs.
The key of an edge is its source node's projected features. The prior is a softmax over all nodes that are the source of
some edge, one weight per node shared by all its edges: dense attention with the adjacency matrix as mask does the same.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv

from bayesattn.nn import BayesianModule
from bayesattn.ops.precision import upcast
from bayesattn.ops.segment import reference
from bayesattn.priors import ContextualPrior


class _Edges(NamedTuple):
    """Scores of the edges, kept from where PyG computes them to where the keys are at hand."""

    scores: Float[Tensor, "e h"]
    index: Int[Tensor, " e"]
    num_rows: int


class _EdgeAttention(BayesianModule):
    """What the three layers share: from the scores of the edges to weights and KL."""

    flow: str
    _edges: _Edges | None = None

    def _draw(self, scores: Float[Tensor, "e h"], index: Int[Tensor, " e"], num_rows: int | None) -> Float[Tensor, "e h"]:
        """Return the weights of one draw, or the softmax if only the KL is wanted, and keep the scores for the KL."""
        if num_rows is None:
            num_rows = int(index.max()) + 1 if index.numel() else 0
        with torch.autocast(scores.device.type, enabled=False):
            phi = upcast(scores)
            self._edges = _Edges(phi, index, num_rows) if self.needs_kl else None
            if self.is_sampling:
                weights = reference.sample_weights(phi, index, num_rows, None, self.config)
            else:
                weights = reference.segment_softmax(phi, index, num_rows)
        return weights.to(scores.dtype)

    def _record_edges(self, output: Tensor, edge_index: Any, keys: Float[Tensor, "n h d"]) -> Tensor:
        """Record the KL of the scores that `_draw` kept, and forget them."""
        edges, self._edges = self._edges, None
        if edges is None:
            return output
        with torch.autocast(keys.device.type, enabled=False):
            log_prior = None
            if self.bayes_prior is not None:
                log_prior = edge_log_prior(self.bayes_prior, keys, _sources(edge_index, self.flow))
            kl = reference.kl_total(edges.scores, log_prior, edges.index, edges.num_rows, self.config)
        return self._record(output, kl)


def edge_log_prior(prior: ContextualPrior, keys: Float[Tensor, "n h d"], sources: Int[Tensor, " e"]) -> Float[Tensor, "e h"]:
    """Return ln Ψ of every edge's source; Ψ is a softmax over the nodes that are the source of some edge."""
    has_edge = torch.zeros(keys.shape[0], dtype=torch.bool, device=keys.device).index_fill(0, sources, True)
    log_prior = prior(keys.transpose(0, 1).unsqueeze(0), has_edge[None, None])
    return log_prior[0, :, 0].transpose(0, 1)[sources]


def _sources(edge_index: Any, flow: str) -> Int[Tensor, " e"]:
    if not isinstance(edge_index, Tensor) or edge_index.layout != torch.strided:
        raise ValueError(
            f"edge_index is a {type(edge_index).__name__} of another layout; allowed while the KL of a contextual prior is "
            "recorded: a tensor of shape (2, edges)"
        )
    return edge_index[0 if flow == "source_to_target" else 1]


class BayesianGATConv(_EdgeAttention, GATConv):
    """`torch_geometric.nn.GATConv` with sampled edge weights."""

    def edge_update(self, alpha_j, alpha_i, edge_attr, index, ptr, dim_size):
        """Score the edges as PyG does and draw their weights."""
        if not (self.is_sampling or self.needs_kl):
            return super().edge_update(alpha_j, alpha_i, edge_attr, index, ptr, dim_size)
        scores = alpha_j if alpha_i is None else alpha_j + alpha_i
        if edge_attr is not None and self.lin_edge is not None:
            features = self.lin_edge(edge_attr.view(-1, 1) if edge_attr.dim() == 1 else edge_attr)
            scores = scores + (features.view(-1, self.heads, self.out_channels) * self.att_edge).sum(dim=-1)
        weights = self._draw(F.leaky_relu(scores, self.negative_slope), index, dim_size)
        return F.dropout(weights, self._dropout(self.dropout))

    def propagate(self, edge_index, size=None, **kwargs):
        """Pass the messages; the keys of the prior are the source nodes' features."""
        output = super().propagate(edge_index, size=size, **kwargs)
        return self._record_edges(output, edge_index, kwargs["x"][0])


class BayesianGATv2Conv(_EdgeAttention, GATv2Conv):
    """`torch_geometric.nn.GATv2Conv` with sampled edge weights."""

    def edge_update(self, x_j, x_i, edge_attr, index, ptr, dim_size):
        """Score the edges as PyG does and draw their weights."""
        if not (self.is_sampling or self.needs_kl):
            return super().edge_update(x_j, x_i, edge_attr, index, ptr, dim_size)
        x = x_i + x_j
        if edge_attr is not None:
            assert self.lin_edge is not None
            features = self.lin_edge(edge_attr.view(-1, 1) if edge_attr.dim() == 1 else edge_attr)
            x = x + features.view(-1, self.heads, self.out_channels)
        scores = (F.leaky_relu(x, self.negative_slope) * self.att).sum(dim=-1)
        weights = self._draw(scores, index, dim_size)
        return F.dropout(weights, self._dropout(self.dropout))

    def propagate(self, edge_index, size=None, **kwargs):
        """Pass the messages; the keys of the prior are the source nodes' features."""
        output = super().propagate(edge_index, size=size, **kwargs)
        return self._record_edges(output, edge_index, kwargs["x"][0])


class BayesianTransformerConv(_EdgeAttention, TransformerConv):
    """`torch_geometric.nn.TransformerConv` with sampled edge weights."""

    def message(self, query_i, key_j, value_j, edge_attr, index, ptr, size_i):
        """Score the edges as PyG does, draw their weights, and weigh the values."""
        if not (self.is_sampling or self.needs_kl):
            return super().message(query_i, key_j, value_j, edge_attr, index, ptr, size_i)
        value = value_j
        if self.lin_edge is not None:
            features = self.lin_edge(edge_attr).view(-1, self.heads, self.out_channels)
            key_j, value = key_j + features, value + features
        elif edge_attr is not None:
            # without edge_dim PyG leaves the scores alone but still adds what it was given to the values
            value = value + edge_attr
        scores = (query_i * key_j).sum(dim=-1) / math.sqrt(self.out_channels)
        # PyG's forward returns this as the attention weights, before dropout
        self._alpha = self._draw(scores, index, size_i)
        return value * F.dropout(self._alpha, self._dropout(self.dropout)).unsqueeze(-1)

    def propagate(self, edge_index, size=None, **kwargs):
        """Pass the messages; the keys of the prior are the nodes' keys."""
        output = super().propagate(edge_index, size=size, **kwargs)
        return self._record_edges(output, edge_index, kwargs["key"])
