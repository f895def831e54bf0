"""The two-layer graph attention network of the paper (App. B.1), for one run or for many runs side by side.

Layer 1: 8 heads of 8 features, concatenated, ELU. Layer 2: one head (PubMed: 8, averaged) with a feature per class.

`num_copies` networks, each with parameters and noise of its own, run as one. Nothing mixes copies, so gradients and Adam's
steps are those of separate runs. Copies may differ in noise, prior, weight of the KL and dropout (`CopySettings`): a whole
grid of settings is one network.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from bayesattn.config import AttentionConfig
from bayesattn.functional import PriorScope
from bayesattn_recipes.graph.inputs import GraphInputs
from bayesattn_recipes.graph.layer import CopySettings, GraphAttentionLayer


class GraphAttentionNetwork(nn.Module):
    """Two layers of graph attention.

    Args:
        num_features: Features of a node.
        num_classes: Classes.
        attention: Soft or Bayesian attention, for both layers.
        num_heads: Heads of the first layer.
        head_dim: Features of each.
        output_heads: Heads of the second layer, averaged.
        dropout: In three places of each layer.
        prior_scope: Over which nodes a contextual prior sums to one.
        num_copies: Networks side by side.
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
        num_copies: int = 1,
    ) -> None:
        super().__init__()
        self.num_copies = num_copies
        heads = num_heads + output_heads
        # `mean` is over all entries of the model, as in the authors' code: a layer counts by its heads
        shares = [count / heads if attention.kl_reduction == "mean" else 1.0 for count in (num_heads, output_heads)]
        options = {"config": attention, "dropout": dropout, "num_copies": num_copies, "prior_scope": prior_scope}
        self.hidden = GraphAttentionLayer(num_features, head_dim, num_heads, **options, kl_share=shares[0])
        self.output = GraphAttentionLayer(num_heads * head_dim, num_classes, output_heads, **options, kl_share=shares[1])

    def forward(self, inputs: GraphInputs) -> Float[Tensor, "copies r c"]:
        """Return the class logits of the last layer's targets, for each copy."""
        heads = self.output(self.embed(inputs), inputs.edges[1], inputs.batch and (inputs.batch, inputs.batch.edges[1]))
        return heads.unflatten(1, (self.num_copies, -1)).mean(dim=2).transpose(0, 1)

    def embed(self, inputs: GraphInputs) -> Float[Tensor, "r copies f"]:
        """Return what the first layer tells the second."""
        batch = inputs.batch and (inputs.batch, inputs.batch.edges[0])
        heads = F.elu(self.hidden(inputs.features, inputs.edges[0], batch))
        return heads.unflatten(1, (self.num_copies, -1)).flatten(2)

    def set_generators(self, generators: Sequence[torch.Generator | None]) -> None:
        """Say where each copy draws its noise from, or all of them together from one; None is torch's own generator."""
        if len(generators) not in (1, self.num_copies):
            raise ValueError(
                f"generators has {len(generators)} entries; allowed: {self.num_copies}, one for each copy, or 1"
            )
        self.hidden.generators = self.output.generators = list(generators)

    def set_settings(self, settings: Sequence[CopySettings]) -> None:
        """Give every copy settings of its own."""
        if len(settings) != self.num_copies:
            raise ValueError(f"settings has {len(settings)} entries; allowed: {self.num_copies}, one for each copy")
        for layer in (self.hidden, self.output):
            layer.settings = list(settings)
            # `sampling` and `train` switch it, and ask whether there is anything to switch
            layer.dropout.p = max(one.dropout for one in settings)
            layer._of_heads.clear()


def stack_networks(networks: Sequence[GraphAttentionNetwork], stacked: GraphAttentionNetwork) -> None:
    """Copy the parameters of single networks into one with as many copies."""
    with torch.no_grad():
        for name, parameter in stacked.named_parameters():
            parameter.copy_(torch.cat([network.get_parameter(name) for network in networks]))


def take_copies(state: dict[str, Tensor], copies: Int[Tensor, " k"], num_copies: int) -> dict[str, Tensor]:
    """Return the parameters of some of the copies, as those of a network with only these."""
    return {name: value.unflatten(0, (num_copies, -1))[copies].flatten(0, 1) for name, value in state.items()}
