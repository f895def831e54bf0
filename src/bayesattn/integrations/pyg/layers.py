"""GAT, GATv2 and `TransformerConv` with sampled edge weights: constructed, or made from PyG's instances by `bayesianize`.

    Φ_e per edge and head → W = softmax over the edges into a node of log S        (Sec. 4.1 of the paper, sparse)

Scores are additive (GAT, GATv2) or dot products (`TransformerConv`). The key of an edge is its source node's projected
features. Constructors take PyG's arguments and, by keyword, those of `EdgeAttentionModule`.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import GATConv, GATv2Conv, MessagePassing, TransformerConv

from bayesattn.integrations.pyg.attention import Call, EdgeAttentionModule, sorted_edges
from bayesattn.integrations.pyg.features import is_sparse_on_cpu, project
from bayesattn.ops.segment import plain
from bayesattn.ops.segment.pairs import FeatureScores, PairScores


class _PairLayer(EdgeAttentionModule):
    """GAT and GATv2: PyG's forward calls `edge_updater` for the weights, then `propagate` for the sums."""

    dropout: float

    def edge_updater(self, edge_index, size=None, **kwargs):
        """Return the scores of the edges; weights are drawn in `propagate`, unless PyG passes the messages."""
        if self._is_stock:
            # a call that failed between the two has left its state
            self._call = None
            return super().edge_updater(edge_index, size=size, **kwargs)  # type: ignore[misc]
        source, target = self._by_flow(kwargs["alpha"] if "alpha" in kwargs else kwargs["x"])
        num_targets = len(source) if size is None else self._by_flow(size)[1]
        self._call = call = self._open(edge_index, len(source), num_targets if target is None else len(target))
        if call.passes_messages:
            return MessagePassing.edge_updater(self, edge_index, size=size, **kwargs)  # type: ignore[arg-type]
        edge_attr = kwargs["edge_attr"]
        pair = self._pair(call, source, target, edge_attr)
        if pair is not None:
            return pair
        return self._scores(
            call.ops.lift_source(source, call.edges),
            None if target is None else call.ops.lift_target(target, call.edges),
            None if edge_attr is None else call.edges.from_given(edge_attr),
        )

    def propagate(self, edge_index, size=None, **kwargs):
        """Draw the weights and average; the keys of the prior are the source nodes' features."""
        call = self._call
        if call is None:
            is_watched = self.explain or self.decomposed_layers > 1
            propagate = MessagePassing.propagate.__get__(self) if is_watched else super().propagate  # type: ignore[misc]
            return propagate(edge_index, size=size, **kwargs)
        keys, other = self._by_flow(kwargs["x"])
        if call.passes_messages:
            kwargs["x"] = self._by_flow((self._drop_value(keys), other))
            output = MessagePassing.propagate(self, edge_index, size=size, **kwargs)  # type: ignore[arg-type]
            output = self._record_messages(call, output, keys)
        else:
            output, _, dropped, _ = self._attend(call, kwargs["alpha"], keys, keys, self.dropout)
            self._weights = call.edges.to_given(dropped) if self._wants_weights and dropped is not None else None
        self._call = None
        return output

    def _draw_lifted(self, source: Tensor, target: Tensor | None, edge_attr: Tensor | None) -> Tensor:
        """Return the weights of edges where PyG has lifted the nodes and passes the messages."""
        return self._drop_weights(self._draw(self._scores(source, target, edge_attr)), self.dropout)

    def _scores(self, source: Tensor, target: Tensor | None, edge_attr: Tensor | None) -> Tensor:
        """Return Φ of the edges from the features of source, target and edge."""
        raise NotImplementedError

    def _pair(self, call: Call, source: Tensor, target: Tensor | None, edge_attr: Tensor | None) -> PairScores | None:
        """Return the parts of the scores, where the kernels take them instead of the scores."""
        return None

    def _by_flow(self, pair: Any) -> Any:
        """Turn PyG's pair for sides 0 and 1 into (source, target), and back."""
        return pair if self.flow == "source_to_target" else (pair[1], pair[0])

    def _with_weights(self, forward: Callable[..., Any], *args: Any) -> Any:
        """Run PyG's forward with its weights, and put the drawn ones in place of the scores."""
        self._wants_weights = True
        try:
            result = forward(*args, return_attention_weights=True)
            return result if self._weights is None else (result[0], (result[1][0], self._weights))
        finally:
            self._wants_weights, self._weights = False, None


class BayesianGATConv(_PairLayer, GATConv):
    """`torch_geometric.nn.GATConv` with sampled edge weights.

    Arguments are PyG's, then those of `EdgeAttentionModule`.

    Example:
        >>> import torch
        >>> import bayesattn as ba
        >>> layer = BayesianGATConv(5, 4, heads=2, config=ba.AttentionConfig("BAM-WC"))
        >>> layer(torch.randn(3, 5), torch.tensor([[0, 1], [1, 2]])).shape
        torch.Size([3, 8])
    """

    def forward(self, x, edge_index, edge_attr=None, size=None, return_attention_weights=None):
        """As PyG's."""
        if return_attention_weights:
            return self._with_weights(super().forward, x, edge_index, edge_attr, size)
        if edge_attr is None and size is None and self._takes_features(x, edge_index):
            return self._forward_from_features(x, edge_index)
        return super().forward(x, edge_index, edge_attr, size)

    def _takes_features(self, x: Any, edge_index: Any) -> bool:
        """Whether `_forward_from_features` may run, for kernels or sparse features: one set of nodes, and no hooks."""
        if self._is_stock or not isinstance(x, Tensor) or type(edge_index) is not Tensor or self.lin is None:
            return False
        is_usual = x.dim() == 2 and self.negative_slope >= 0.0
        is_traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
        if not is_usual or is_traced or self._passes_messages(edge_index):
            return False
        if is_sparse_on_cpu(x):
            return self.backend != "triton" and self.res is None
        return self._takes_parts(x.is_cuda) and not self.value_dropout

    def _forward_from_features(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Run PyG's forward: self loops are added once per graph; for kernels, one autograd node follows the projection."""
        assert self.lin is not None
        is_sparse = is_sparse_on_cpu(x)
        projected = project(self, x, self.lin.weight) if is_sparse else self.lin(x)
        features = projected.view(-1, self.heads, self.out_channels)
        edges = sorted_edges(self, edge_index, x.shape[0], x.shape[0], loops=self.add_self_loops)
        att_source, att_target = self._by_flow((self.att_src, self.att_dst))
        scores = FeatureScores(features, att_source, att_target, self.negative_slope)
        call = Call(edges, plain, passes_messages=False, takes_parts=not is_sparse)
        if is_sparse:
            call.ops = self._gathers(edges)
            scores = scores.on_edges(edges, call.ops)
        output = self._attend(call, scores, features, features, self.dropout).output
        output = output.flatten(1) if self.concat else output.mean(dim=1)
        if self.res is not None:
            output = output + self.res(x)
        return output if self.bias is None else output + self.bias

    def edge_update(self, alpha_j, alpha_i, edge_attr, index, ptr, dim_size):
        """Score the edges as PyG does and draw their weights."""
        if self._call is None:
            return super().edge_update(alpha_j, alpha_i, edge_attr, index, ptr, dim_size)
        return self._draw_lifted(alpha_j, alpha_i, edge_attr)

    def _pair(self, call: Call, source: Tensor, target: Tensor | None, edge_attr: Tensor | None) -> PairScores | None:
        if not call.takes_parts or target is None or self.negative_slope < 0.0:
            return None
        has_features = edge_attr is not None and self.lin_edge is not None
        return None if has_features else PairScores(source, target, self.negative_slope)

    def _scores(self, source: Tensor, target: Tensor | None, edge_attr: Tensor | None) -> Tensor:
        # both are gathers made for this call: overwriting them saves a third of the arrays per edge
        scores = source if target is None else source.add_(target)
        if edge_attr is not None and self.lin_edge is not None:
            features = self.lin_edge(edge_attr.view(-1, 1) if edge_attr.dim() == 1 else edge_attr)
            scores = scores + (features.view(-1, self.heads, self.out_channels) * self.att_edge).sum(dim=-1)
        return F.leaky_relu(scores, self.negative_slope, inplace=self.negative_slope >= 0.0)


class BayesianGATv2Conv(_PairLayer, GATv2Conv):
    """`torch_geometric.nn.GATv2Conv` with sampled edge weights.

    Arguments are PyG's, then those of `EdgeAttentionModule`.

    Example:
        >>> import torch
        >>> import bayesattn as ba
        >>> layer = BayesianGATv2Conv(5, 4, heads=2, config=ba.AttentionConfig("BAM-WC"))
        >>> layer(torch.randn(3, 5), torch.tensor([[0, 1], [1, 2]])).shape
        torch.Size([3, 8])
    """

    def forward(self, x, edge_index, edge_attr=None, return_attention_weights=None):
        """As PyG's."""
        if return_attention_weights:
            return self._with_weights(super().forward, x, edge_index, edge_attr)
        return super().forward(x, edge_index, edge_attr)

    def edge_update(self, x_j, x_i, edge_attr, index, ptr, dim_size):
        """Score the edges as PyG does and draw their weights."""
        if self._call is None:
            return super().edge_update(x_j, x_i, edge_attr, index, ptr, dim_size)
        return self._draw_lifted(x_j, x_i, edge_attr)

    def _scores(self, source: Tensor, target: Tensor | None, edge_attr: Tensor | None) -> Tensor:
        assert target is not None
        x = target + source
        if edge_attr is not None:
            assert self.lin_edge is not None
            features = self.lin_edge(edge_attr.view(-1, 1) if edge_attr.dim() == 1 else edge_attr)
            x = x + features.view(-1, self.heads, self.out_channels)
        return (F.leaky_relu(x, self.negative_slope) * self.att).sum(dim=-1)


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
