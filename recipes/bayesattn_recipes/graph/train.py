"""Train one graph attention network through the loop all recipes share."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from bayesattn.evaluation.threads import one_thread
from bayesattn.ops.segment import plain
from bayesattn_recipes.baselines import AttentionChoice, with_score_function
from bayesattn_recipes.common import runs
from bayesattn_recipes.common.config import MetricLog, build_config, find_config, load_yaml, override, seed_everything
from bayesattn_recipes.common.loop import Experiment, TrainingConfig, train
from bayesattn_recipes.graph.data import Graph, leave_out_classes, load_graph, split_of_seed
from bayesattn_recipes.graph.inputs import GraphInputs
from bayesattn_recipes.graph.model import GraphAttentionNetwork
from bayesattn_recipes.graph.sampling import neighbourhood_inputs

RECIPE = "graph"
CONFIGS = Path(__file__).parent / "configs"


@dataclass(frozen=True)
class GraphConfig:
    """Everything that decides a run.

    Args:
        attention: Soft or Bayesian attention, or a rival of it (docs/baselines.md).
        training: Epochs and schedules. With `batch_size` 1 the one example is the whole graph, and an epoch one step; with
            more, examples are nodes, and a step takes so many of them with their neighbourhoods.
        seed: Initialisation, dropout and attention noise.
        dataset: Name of the data set.
        split: Which of its official splits (for `generated`: its seed); None for the one that belongs to the run's seed,
            seed mod 10 for the heterophilous graphs, so that ten seeds see all of them.
        left_out_classes: Classes kept out of training, whose test nodes become out-of-distribution nodes.
        num_heads: Heads of the first layer.
        head_dim: Features of each.
        output_heads: Heads of the second layer, averaged.
        dropout: In the three places of each layer.
        prior_scope: Over which nodes a contextual prior sums to one: the `graph`, or the `neighbourhood` of each node.
        kept_by: Which epochs may give the run its parameters, the last of them does: `both`, those in which validation NLL
            and accuracy tie or beat their best (GAT's rule), or `nll`, those in which the NLL does.
        fanout: Neighbours that a node of a mini-batch hears at most; None for all.
        learning_rate: Of Adam.
        weight_decay: L2 penalty, added to the gradient before Adam sees it (not AdamW's).
    """

    attention: AttentionChoice = field(default_factory=lambda: AttentionChoice("soft"))
    training: TrainingConfig = field(
        default_factory=lambda: TrainingConfig(epochs=400, batch_size=1, keep="validation_nll", patience=100)
    )
    seed: int = 0
    dataset: str = "generated"
    split: int | None = 0
    left_out_classes: int = 0
    num_heads: int = 8
    head_dim: int = 8
    output_heads: int = 1
    dropout: float = 0.6
    prior_scope: Literal["graph", "neighbourhood"] = "graph"
    kept_by: Literal["both", "nll"] = "both"
    fanout: int | None = None
    learning_rate: float = 5e-3
    weight_decay: float = 5e-4

    def __post_init__(self) -> None:
        self.attention.check_layers(on_edges=True)
        for name in ("num_heads", "head_dim", "output_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: an integer of at least 1")
        if not (0.0 <= self.dropout < 1.0):
            raise ValueError(f"dropout is {self.dropout!r}; allowed: at least 0 and below 1")
        if not (0.0 < self.learning_rate < float("inf")):
            raise ValueError(f"learning_rate is {self.learning_rate!r}; allowed: a finite number above 0")
        if not (0.0 <= self.weight_decay < float("inf")):
            raise ValueError(f"weight_decay is {self.weight_decay!r}; allowed: a finite number of at least 0")


def load_config(name: str, settings: Sequence[str] = ()) -> GraphConfig:
    """Read a config by its name (`cora-wc`) or path, with `name=value` settings on top."""
    return build_config(GraphConfig, override(load_yaml(find_config(name, CONFIGS)), settings))


def load_config_graph(config: GraphConfig, data: Path | None) -> Graph:
    """Load the graph a config names, from `data` or the folder that BAYESATTN_DATA names."""
    if data is None and os.environ.get("BAYESATTN_DATA"):
        data = Path(os.environ["BAYESATTN_DATA"])
    split = split_of_seed(config.dataset, config.seed) if config.split is None else config.split
    return leave_out_classes(load_graph(config.dataset, data, split=split), config.left_out_classes)


def load_seed_graphs(config: GraphConfig, data: Path | None, seeds: Sequence[int]) -> list[Graph]:
    """Load the graph of every seed; they differ in their splits alone, and share features, edges and labels."""
    splits = [split_of_seed(config.dataset, seed) if config.split is None else config.split for seed in seeds]
    found: dict[int, Graph] = {}
    for split in splits:
        if split not in found:
            graph = load_config_graph(replace(config, split=split), data)
            first = next(iter(found.values()), graph)
            found[split] = replace(graph, features=first.features, edge_index=first.edge_index, labels=first.labels)
    return [found[split] for split in splits]


def build_model(config: GraphConfig, graph: Graph, num_copies: int = 1) -> GraphAttentionNetwork:
    """Build the network a config describes, with fresh parameters."""
    return GraphAttentionNetwork(
        graph.features.shape[1],
        graph.num_classes,
        config.attention,
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        output_heads=config.output_heads,
        dropout=config.dropout,
        prior_scope=config.prior_scope,
        num_copies=num_copies,
    )


def build_optimizer(config: GraphConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Return Adam with a coupled L2 penalty on every parameter, biases and prior included."""
    return torch.optim.Adam(model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay, fused=True)


def training_inputs(
    config: GraphConfig, whole: GraphInputs, nodes: Int[Tensor, " k"]
) -> tuple[GraphInputs, Int[Tensor, " k"]]:
    """Return what a training step reads, and where in its output the training nodes are.

    The KL is of the whole graph. Without one, the loss depends on nothing farther than two steps from a training node.
    """
    if config.attention.has_kl:
        return whole, nodes
    return neighbourhood_inputs(whole, nodes), torch.arange(len(nodes))


class GraphExperiment(Experiment):
    """A whole graph as one example, a fresh network and Adam, with GAT's two criteria on the validation nodes.

    Training stops when neither accuracy nor NLL has tied or beaten its best for `patience` epochs; the parameters kept
    are of the last epoch in which both did, or the NLL alone (`kept_by`).
    """

    model: GraphAttentionNetwork

    def __init__(self, config: GraphConfig, graph: Graph) -> None:
        self.graph = graph
        self.num_examples = 1
        self.kept_by = config.kept_by
        self.model = build_model(config, graph)
        self.optimizer = build_optimizer(config, self.model)
        whole = GraphInputs.of(graph)
        self.inputs, self.rows = training_inputs(config, whole, graph.splits["train"])
        self.validation_inputs = neighbourhood_inputs(whole, graph.splits["validation"])
        self._best_nll, self._best_accuracy = float("inf"), 0.0

    def collate(self, indices: Int[Tensor, " b"]) -> dict[str, Tensor]:
        """Return where the training nodes are in the network's output, and their labels."""
        return {"rows": self.rows, "labels": self.graph.labels[self.graph.splits["train"]]}

    def nll(self, model: nn.Module, batch: dict[str, Tensor]) -> Float[Tensor, ""]:
        """Return the summed cross-entropy of the training nodes."""
        self._move_inputs(model)
        return self._nll(model, self.inputs, batch)

    def _nll(self, model: nn.Module, inputs: GraphInputs, batch: dict[str, Tensor]) -> Float[Tensor, ""]:
        """Return the summed cross-entropy; a node's hard choice is charged with the nodes that it reaches."""

        def run() -> Float[Tensor, " k"]:
            return F.cross_entropy(model(inputs)[0][batch["rows"]], batch["labels"], reduction="none")

        def charge(module: nn.Module, losses: Float[Tensor, " k"]) -> Float[Tensor, " r"]:
            edges = inputs.edges[1]
            of_nodes = losses.new_zeros(edges.num_targets).index_add(0, batch["rows"], losses)
            if module in self.model.output.modules():
                return of_nodes
            # what a node of the first layer chose is seen by all its neighbours
            return plain.sum_by_source(plain.lift_target(of_nodes, edges), edges)

        return with_score_function(model, run, charge=charge).sum()

    def validate(self, model: nn.Module) -> dict[str, float]:
        """Return NLL and accuracy of the posterior mean on the validation nodes."""
        nodes = self.graph.splits["validation"]
        self._move_inputs(model)
        logits = model(self.validation_inputs)[0].float().cpu()
        labels = self.graph.labels[nodes]
        accuracy = (logits.argmax(dim=-1) == labels).float().mean()
        return {"validation_nll": float(F.cross_entropy(logits, labels)), "validation_accuracy": float(accuracy)}

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
        """Take back what `extra_state` returned."""
        self._best_nll, self._best_accuracy = state["best_nll"], state["best_accuracy"]

    def _move_inputs(self, model: nn.Module) -> None:
        device = next(model.parameters()).device
        if self.inputs.features.values.device != device:
            self.inputs, self.validation_inputs = self.inputs.to(device), self.validation_inputs.to(device)


class BatchExperiment(GraphExperiment):
    """The same with nodes as examples: every node is in one batch of an epoch, labelled ones spread evenly.

    The rows of a batch's nodes, in both layers, stand for the KL of the whole graph. With full neighbourhoods the mean over
    the batches of an epoch is exactly the KL of the whole graph; with a `fanout` it is that of the graph of sampled edges.
    """

    def __init__(self, config: GraphConfig, graph: Graph) -> None:
        super().__init__(config, graph)
        if config.attention.is_rival and config.attention.has_kl:
            raise ValueError(
                f"batch_size is {config.training.batch_size}; allowed for {config.attention.variant}, whose KL is of the "
                "whole graph: 1"
            )
        if not config.attention.is_rival and config.attention.prior_kind == "contextual" and config.prior_scope == "graph":
            raise ValueError("prior_scope is 'graph', which a batch does not see; allowed with batches: 'neighbourhood'")
        labelled = len(graph.splits["train"])
        if -(-graph.num_nodes // config.training.batch_size) > labelled:
            least = -(-graph.num_nodes // labelled)
            raise ValueError(
                f"batch_size is {config.training.batch_size}; allowed: 1, or {least} and more, a label for each batch"
            )
        self.num_examples = graph.num_nodes
        self.fanout = config.fanout
        self.whole = GraphInputs.of(graph)
        self.is_labelled = torch.zeros(graph.num_nodes, dtype=torch.bool).index_fill(0, graph.splits["train"], True)

    def batches(self, config: TrainingConfig, generator: torch.Generator) -> Sequence[Int[Tensor, " b"]]:
        """Deal the nodes out, labelled ones first, so that every batch has its share of them."""
        order = torch.randperm(self.num_examples, generator=generator)
        order = torch.cat([order[self.is_labelled[order]], order[~self.is_labelled[order]]])
        count = -(-self.num_examples // config.batch_size)
        return [order[start::count] for start in range(count)]

    def collate(self, indices: Int[Tensor, " b"]) -> dict[str, Any]:
        """Return labels of the labelled nodes, where they are in the batch, and its inputs."""
        rows = self.is_labelled[indices].nonzero().flatten()
        inputs = neighbourhood_inputs(self.whole, indices, fanout=self.fanout)
        return {"labels": self.graph.labels[indices[rows]], "rows": rows, "inputs": inputs}

    def nll(self, model: nn.Module, batch: dict[str, Any]) -> Float[Tensor, ""]:
        """Return the summed cross-entropy of the batch's labelled nodes."""
        return self._nll(model, batch["inputs"].to(batch["labels"].device), batch)


def epochs_since_progress(rows: list[dict[str, Any]]) -> int:
    """Return how long ago accuracy or NLL last tied or beat its best."""
    best_nll, best_accuracy, last = float("inf"), 0.0, 0
    for index, row in enumerate(rows):
        if row["validation_nll"] <= best_nll or row["validation_accuracy"] >= best_accuracy:
            last = index
        best_nll, best_accuracy = min(best_nll, row["validation_nll"]), max(best_accuracy, row["validation_accuracy"])
    return len(rows) - 1 - last


@one_thread()
def fit(
    config: GraphConfig, graph: Graph, on_progress: Callable[[int, int], Any] = lambda done, total: None
) -> tuple[GraphAttentionNetwork, MetricLog]:
    """Train a network and return it with its log, without a run folder."""
    seed_everything(config.seed)
    experiment = GraphExperiment(config, graph)
    log = train(experiment, config.training, seed=config.seed, on_progress=on_progress)
    return experiment.model, log


def build_experiment(config: GraphConfig, data: Path | None = None) -> GraphExperiment:
    """Return the experiment of a config, with the graph that it names."""
    graph = load_config_graph(config, data)
    return GraphExperiment(config, graph) if config.training.batch_size == 1 else BatchExperiment(config, graph)


train_run = one_thread()(runs.make_train_run(RECIPE, build_experiment))


def load_run(folder: Path, data: Path | None = None) -> tuple[GraphConfig, GraphAttentionNetwork, Graph]:
    """Read a run folder back: its config, the trained network in eval mode, and its graph."""
    config = runs.load_run_config(folder, GraphConfig, RECIPE)
    graph = load_config_graph(config, data)
    model = build_model(config, graph)
    runs.load_parameters(folder, model)
    return config, model, graph
