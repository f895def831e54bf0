"""PyTorch Geometric: graph attention layers whose edge weights are sampled."""

from bayesattn.optional import needs_extra

with needs_extra("bayesattn.integrations.pyg", "graph"):
    from bayesattn.functional import Edges
    from bayesattn.integrations.pyg.batches import neighbor_batch
    from bayesattn.integrations.pyg.layers import BayesianGATConv, BayesianGATv2Conv, BayesianTransformerConv

__all__ = ["BayesianGATConv", "BayesianGATv2Conv", "BayesianTransformerConv", "Edges", "neighbor_batch"]
