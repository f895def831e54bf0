"""PyG's `TransformerConv`, dot-product attention on edges, with sampled edge weights; `layers.py` has the additive ones."""

import math

from torch import Tensor
from torch_geometric.nn import MessagePassing, TransformerConv

from bayesattn.integrations.pyg.attention import EdgeAttentionModule


class BayesianTransformerConv(EdgeAttentionModule, TransformerConv):
    """`torch_geometric.nn.TransformerConv` with sampled edge weights.

    Arguments are PyG's, then those of `EdgeAttentionModule`.

    Example:
        >>> import torch
        >>> import bayesattn as ba
        >>> layer = BayesianTransformerConv(5, 4, heads=2, config=ba.AttentionConfig("BAM-WC"))
        >>> layer(torch.randn(3, 5), torch.tensor([[0, 1], [1, 2]])).shape
        torch.Size([3, 8])
    """

    def forward(self, x, edge_index, edge_attr=None, return_attention_weights=None):
        """As PyG's."""
        self._wants_weights = return_attention_weights is not None
        try:
            return super().forward(x, edge_index, edge_attr, return_attention_weights)
        finally:
            self._wants_weights = False

    def propagate(self, edge_index, size=None, **kwargs):
        """Score the edges, draw their weights and average; the keys of the prior are the nodes' keys."""
        if self._is_stock:
            self._call = None
            is_watched = self.explain or self.decomposed_layers > 1
            propagate = MessagePassing.propagate.__get__(self) if is_watched else super().propagate
            return propagate(edge_index, size=size, **kwargs)
        query, key, value, edge_attr = (kwargs[name] for name in ("query", "key", "value", "edge_attr"))
        self._call = call = self._open(edge_index, len(key), len(query))
        if call.passes_messages:
            kwargs["value"] = self._drop_value(value)
            output = MessagePassing.propagate(self, edge_index, size=size, **kwargs)
            output = self._record_messages(call, output, key)
        else:
            features = self._edge_features(None if edge_attr is None else call.edges.from_given(edge_attr))
            scores = call.ops.dot(query, key, call.edges)
            if features is not None and self.lin_edge is not None:
                scores = scores + (call.ops.lift_target(query, call.edges) * features).sum(dim=-1)
            returns_weights, self._wants_weights = self._wants_weights, self._wants_weights or features is not None
            scores = scores / math.sqrt(self.out_channels)
            output, weights, dropped, _ = self._attend(call, scores, value, key, self.dropout)
            if features is not None and dropped is not None:
                output = output + call.ops.sum_by_target(dropped.to(features.dtype).unsqueeze(-1) * features, call.edges)
            # PyG's forward returns this as the attention weights, before dropout
            self._alpha = call.edges.to_given(weights) if returns_weights and weights is not None else None
        self._call = None
        return output

    def message(self, query_i, key_j, value_j, edge_attr, index, ptr, size_i):
        """Score the edges as PyG does, draw their weights, and weight the values."""
        if self._call is None:
            return super().message(query_i, key_j, value_j, edge_attr, index, ptr, size_i)
        features = self._edge_features(edge_attr)
        # without `edge_dim` PyG adds the features it got only to the values
        key = key_j if features is None or self.lin_edge is None else key_j + features
        self._alpha = self._draw((query_i * key).sum(dim=-1) / math.sqrt(self.out_channels))
        value = value_j if features is None else value_j + features
        return value * self._drop_weights(self._alpha, self.dropout).unsqueeze(-1)

    def _edge_features(self, edge_attr: Tensor | None) -> Tensor | None:
        if self.lin_edge is None:
            return edge_attr
        assert edge_attr is not None
        return self.lin_edge(edge_attr).view(-1, self.heads, self.out_channels)
