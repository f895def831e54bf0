"""The two-layer graph attention network of the paper (App. B.1), built from the library's layers.

Layer 1: 8 heads of 8 features, concatenated, ELU. Layer 2: one head (PubMed: 8, averaged) with a feature per class. Dropout,
as in GAT: on the input of each layer, on the normalized weights, and on the features that are averaged.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from bayesattn.integrations.pyg import BayesianGATConv
from bayesattn_recipes.baselines import attention_options
from bayesattn_recipes.graph.config import GraphConfig
from bayesattn_recipes.graph.data import Graph


class GraphAttentionNetwork(nn.Module):
    """Two layers of graph attention.

    Args:
        config: The run.
        graph: Has the features and classes that the layers are built for.
    """

    def __init__(self, config: GraphConfig, graph: Graph) -> None:
        super().__init__()
        options = {**attention_options(config.attention, on_edges=True), "prior_scope": config.prior_scope}
        # graphs of this recipe have their self-loops (`data.make_graph`)
        options |= {"dropout": config.dropout, "value_dropout": config.dropout, "add_self_loops": False}
        self.dropout = nn.Dropout(config.dropout)
        self.hidden = BayesianGATConv(graph.features.shape[1], config.head_dim, config.num_heads, **options)
        self.output = BayesianGATConv(
            config.num_heads * config.head_dim, graph.num_classes, config.output_heads, concat=False, **options
        )

    def forward(
        self, x: Float[Tensor, "n f"], edge_index: Int[Tensor, "2 e"], output_edge_index: Int[Tensor, "2 e2"]
    ) -> Float[Tensor, "n c"]:
        """Return the class logits of every node; for a part of a graph only those of the requested nodes are meaningful.

        Args:
            x: Features of the nodes; dense, or a CSR matrix.
            edge_index: Edges of the first layer.
            output_edge_index: Edges of the second layer.
        """
        return self.output(self.dropout(self.embed(x, edge_index)), output_edge_index)

    def embed(self, x: Float[Tensor, "n f"], edge_index: Int[Tensor, "2 e"]) -> Float[Tensor, "n f2"]:
        """Return the output of the first layer."""
        if x.layout is torch.sparse_csr:
            # zeros stay zeros
            values = self.dropout(x.values())
            x = torch.sparse_csr_tensor(x.crow_indices(), x.col_indices(), values, x.shape, check_invariants=False)
        else:
            x = self.dropout(x)
        return F.elu(self.hidden(x, edge_index))
