"""Which nodes count for which copy, where many networks train side by side on splits or labels of their own."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bayesattn_recipes.graph.data import Graph


@dataclass(frozen=True, eq=False)
class Targets:
    """The labelled nodes of one split name of every copy.

    Attributes:
        nodes: Of any copy.
        labels: That each copy has for them.
        is_own: Which of them belong to the copy.
        sizes: How many these are.
    """

    nodes: Int[Tensor, " k"]
    labels: Int[Tensor, "copies k"]
    is_own: Bool[Tensor, "copies k"]
    sizes: Int[Tensor, " copies"]

    @classmethod
    def of(cls, graphs: Sequence[Graph], split: str, device: torch.device) -> "Targets":
        """Collect the nodes of all graphs."""
        nodes = torch.cat([graph.splits[split] for graph in dict.fromkeys(graphs)]).unique()
        is_own = torch.stack([torch.isin(nodes, graph.splits[split]) for graph in graphs])
        # nodes of other copies may have no class here
        labels = torch.stack([graph.labels[nodes] for graph in graphs]).masked_fill(~is_own, 0)
        return cls(nodes, labels.to(device), is_own.to(device), is_own.sum(dim=1).to(device))

    def cross_entropies(self, logits: Float[Tensor, "copies k c"]) -> Float[Tensor, " copies"]:
        """Return the mean cross-entropy of each copy."""
        losses = F.cross_entropy(logits.flatten(0, 1), self.labels.flatten(), reduction="none")
        return (losses.view(self.labels.shape) * self.is_own).sum(dim=1) / self.sizes

    def accuracies(self, logits: Float[Tensor, "copies k c"]) -> Float[Tensor, " copies"]:
        """Return the accuracy of each copy."""
        is_right = (logits.argmax(dim=-1) == self.labels) & self.is_own
        return is_right.sum(dim=1).to(logits.dtype) / self.sizes
