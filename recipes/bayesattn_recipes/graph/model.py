"""The two-layer graph attention network of the paper (App. B.1), built from the library's layers.

Layer 1: 8 heads of 8 features, concatenated, ELU. Layer 2: one head (PubMed: 8, averaged) with a feature per class. Dropout,
as in GAT: on the input of each layer, on the normalized weights, and on the features that are averaged.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from bayesattn.config import AttentionConfig
from bayesattn.functional import PriorScope
from bayesattn.integrations.pyg import BayesianGATConv
from bayesattn_recipes.baselines import attention_options


class GraphAttentionNetwork(nn.Module):
    """Two layers of graph attention.

    Args:
        num_features: Features of a node.
        num_classes: Classes.
        attention: Soft or Bayesian attention, for both layers.
        num_heads: Heads of the first layer.
        head_dim: Features of each head.
        output_heads: Heads of the second layer, averaged.
        dropout: Dropout rate in three places of each layer.
        prior_scope: Over which nodes a contextual prior sums to one.
    """

    def __init__(
        self,
        num_features: int,
        num_classes: int,
        attention: AttentionConfig,
        *,
        num_heads: int = 8,
        head_dim: int = 8,
        output_heads: int = 1,
        dropout: float = 0.6,
        prior_scope: PriorScope = "graph",
    ) -> None:
        super().__init__()
        # graphs of this recipe have their self-loops (`data.make_graph`)
        options = {**attention_options(attention, on_edges=True), "dropout": dropout, "value_dropout": dropout}
        options |= {"prior_scope": prior_scope, "add_self_loops": False}
        self.dropout = nn.Dropout(dropout)
        self.hidden = BayesianGATConv(num_features, head_dim, num_heads, **options)
        self.output = BayesianGATConv(num_heads * head_dim, num_classes, output_heads, concat=False, **options)

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
