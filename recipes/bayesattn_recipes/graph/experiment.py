"""The graph recipe for the training loop: batches, their likelihood, and GAT's two criteria on validation nodes."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from bayesattn.integrations.pyg import neighbor_batch
from bayesattn_recipes.baselines import with_score_function
from bayesattn_recipes.common.experiment import Experiment, TrainingConfig
from bayesattn_recipes.graph.config import GraphConfig
from bayesattn_recipes.graph.data import Graph
from bayesattn_recipes.graph.inputs import Inputs, neighborhood, whole_graph
from bayesattn_recipes.graph.model import GraphAttentionNetwork


class GraphExperiment(Experiment):
    """A whole graph as one example, a fresh network, and Adam with an L2 penalty on every parameter.

    Training stops when neither accuracy nor NLL has tied or beaten its best for `patience` epochs; the parameters kept
    are of the last epoch in which both did, or the NLL alone (`kept_by`).
    """

    model: GraphAttentionNetwork

    def __init__(self, config: GraphConfig, graph: Graph) -> None:
        self.graph = graph
        self.num_examples = 1
        self.kept_by = config.kept_by
        self.model = GraphAttentionNetwork(config, graph)
        options = {"lr": config.learning_rate, "weight_decay": config.weight_decay, "fused": True}
        self.optimizer = torch.optim.Adam(self.model.parameters(), **options)
        train = graph.splits["train"]
        # the KL is of the whole graph; without one the loss depends on nothing farther than two steps from a training node
        is_whole = config.attention.has_kl
        self.inputs = whole_graph(graph) if is_whole else neighborhood(graph, train)
        self.rows = train if is_whole else torch.arange(len(train))
        self.validation_inputs = neighborhood(graph, graph.splits["validation"])
        self._best_nll, self._best_accuracy = float("inf"), 0.0

    def collate(self, indices: Int[Tensor, " b"]) -> dict[str, Any]:
        """Return the labels of the training nodes, their positions in the network's output, and its inputs."""
        labels = self.graph.labels[self.graph.splits["train"]]
        # the batch is always the same: it goes to the device once
        self.inputs, self.rows = self.inputs.to(self._device), self.rows.to(self._device)
        return {"labels": labels, "rows": self.rows, **self.inputs._asdict()}

    def nll(self, model: nn.Module, batch: dict[str, Any]) -> Float[Tensor, ""]:
        """Return the summed cross-entropy of the training nodes; a hard choice is charged with the nodes that it reaches."""
        inputs, labels, rows = Inputs(*(batch[name] for name in Inputs._fields)), batch["labels"], batch["rows"]

        def run() -> Float[Tensor, " k"]:
            return F.cross_entropy(model(*inputs)[rows], labels, reduction="none")

        def charge(module: nn.Module, losses: Float[Tensor, " k"]) -> Float[Tensor, " n"]:
            of_nodes = losses.new_zeros(inputs.x.shape[0]).index_add(0, rows, losses)
            if module in self.model.output.modules():
                return of_nodes
            # the choice of a node in the first layer affects all its neighbors
            source, target = inputs.output_edge_index
            return torch.zeros_like(of_nodes).index_add(0, source, of_nodes[target])

        return with_score_function(model, run, charge=charge).sum()

    def validate(self, model: nn.Module) -> dict[str, float]:
        """Return NLL and accuracy of the posterior mean on the validation nodes."""
        labels = self.graph.labels[self.graph.splits["validation"]]
        self.validation_inputs = self.validation_inputs.to(self._device)
        logits = model(*self.validation_inputs)[: len(labels)].float().cpu()
        accuracy = (logits.argmax(dim=-1) == labels).float().mean()
        return {"validation_nll": float(F.cross_entropy(logits, labels)), "validation_accuracy": float(accuracy)}

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def is_better(self, row: dict[str, Any], best: dict[str, Any] | None, config: TrainingConfig) -> bool:
        """Whether the criteria that keep an epoch tie or beat their best so far."""
        nll, accuracy = row["validation_nll"], row["validation_accuracy"]
        is_kept = nll <= self._best_nll and (accuracy >= self._best_accuracy or self.kept_by == "nll")
        self._best_nll, self._best_accuracy = min(nll, self._best_nll), max(accuracy, self._best_accuracy)
        return is_kept or config.keep == "last"

    def is_done(self, rows: list[dict[str, Any]], config: TrainingConfig) -> bool:
        """Whether neither criterion tied or beat its best for `patience` epochs."""
        return config.patience is not None and epochs_since_progress(rows) >= config.patience

    def extra_state(self) -> dict[str, Any]:
        """Return the best of both criteria so far."""
        return {"best_nll": self._best_nll, "best_accuracy": self._best_accuracy}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Restore what `extra_state` returned."""
        self._best_nll, self._best_accuracy = state["best_nll"], state["best_accuracy"]


class BatchExperiment(GraphExperiment):
    """The same with nodes as examples: every node is in one batch of an epoch, labeled ones spread evenly.

    Each node of a batch stands for the whole graph: its likelihood counts as often as there are nodes, and the KL of its
    rows is scaled to that of all rows (`neighbor_batch`). Over an epoch the mean loss is that of the whole graph; with a
    `fanout`, that of the graph of sampled edges.
    """

    def __init__(self, config: GraphConfig, graph: Graph) -> None:
        super().__init__(config, graph)
        labeled = len(graph.splits["train"])
        if -(-graph.num_nodes // config.training.batch_size) > labeled:
            least = -(-graph.num_nodes // labeled)
            raise ValueError(
                f"batch_size must be 1, or at least {least} so that every batch has a label, got "
                f"{config.training.batch_size}"
            )
        self.whole = {"num_nodes": graph.num_nodes, "num_edges": graph.edge_index.shape[1]}
        # raise early for what no batch supports
        with neighbor_batch(self.model, batch_size=1, **self.whole):
            pass
        self.num_examples = graph.num_nodes
        self.fanout = config.fanout
        self.is_labeled = torch.zeros(graph.num_nodes, dtype=torch.bool).index_fill(0, graph.splits["train"], True)

    def batches(self, config: TrainingConfig, generator: torch.Generator) -> Sequence[Int[Tensor, " b"]]:
        """Distribute the nodes, labeled ones first, so that every batch has its share of them."""
        order = torch.randperm(self.num_examples, generator=generator)
        order = torch.cat([order[self.is_labeled[order]], order[~self.is_labeled[order]]])
        count = -(-self.num_examples // config.batch_size)
        return [order[start::count] for start in range(count)]

    def collate(self, indices: Int[Tensor, " b"]) -> dict[str, Any]:
        """Return labels of the labeled nodes, their positions in the batch, its inputs, and its number of nodes."""
        rows = self.is_labeled[indices].nonzero().flatten()
        inputs = neighborhood(self.graph, indices, fanout=self.fanout)
        return {"labels": self.graph.labels[indices[rows]], "rows": rows, **inputs._asdict(), "batch_size": len(indices)}

    def num_labels(self, batch: dict[str, Any]) -> int:
        """Return the labels of the whole graph, once for each node that stands for it."""
        return batch["batch_size"] * len(self.graph.splits["train"])

    def nll(self, model: nn.Module, batch: dict[str, Any]) -> Float[Tensor, ""]:
        """Return the summed cross-entropy of the batch's labeled nodes, as often as there are nodes."""
        with neighbor_batch(self.model, batch_size=batch["batch_size"], **self.whole):
            return super().nll(model, batch) * self.graph.num_nodes


def epochs_since_progress(rows: list[dict[str, Any]]) -> int:
    """Return how long ago accuracy or NLL last tied or beat its best."""
    best_nll, best_accuracy, last = float("inf"), 0.0, 0
    for index, row in enumerate(rows):
        if row["validation_nll"] <= best_nll or row["validation_accuracy"] >= best_accuracy:
            last = index
        best_nll, best_accuracy = min(best_nll, row["validation_nll"]), max(best_accuracy, row["validation_accuracy"])
    return len(rows) - 1 - last
