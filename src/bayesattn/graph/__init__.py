"""PyTorch Geometric: graph attention layers whose edge weights are sampled."""

from bayesattn.graph.batches import neighbor_batch
from bayesattn.graph.layers import BayesianGATConv, BayesianGATv2Conv
from bayesattn.graph.transformer import BayesianTransformerConv

__all__ = ["BayesianGATConv", "BayesianGATv2Conv", "BayesianTransformerConv", "neighbor_batch"]
