"""The config that decides a run of the graph recipe, and the graph it names."""

import os
from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from bayesattn_recipes.baselines import AttentionChoice
from bayesattn_recipes.common.config import Count, NotNegative, Positive, Seed, Share, config_class
from bayesattn_recipes.common.experiment import TrainingConfig
from bayesattn_recipes.graph.data import Graph, leave_out_classes, load_graph, split_of_seed

CONFIGS = Path(__file__).parent / "configs"


@config_class
class GraphConfig:
    """Everything that decides a run.

    Args:
        attention: Soft or Bayesian attention, or a rival of it (docs/recipes/rivals.md).
        training: Epochs and schedules. With `batch_size` 1 the one example is the whole graph, and an epoch one step; with
            more, examples are nodes, and a step takes `batch_size` of them with their neighborhoods.
        seed: Initialization, dropout and attention noise.
        dataset: Name of the data set.
        split: Which of its official splits (for `generated`: its seed; for Cora, Citeseer and PubMed 0, or above 0 the
            number of a random split of the same sizes); None for the one that belongs to the run's seed,
            seed mod 10 for the heterophilous graphs, so that ten seeds use all of them.
        left_out_classes: Classes kept out of training, whose test nodes become out-of-distribution nodes.
        num_heads: Heads of the first layer.
        head_dim: Features of each head.
        output_heads: Heads of the second layer, averaged.
        dropout: Dropout rate in the three places of each layer.
        prior_scope: Over which nodes a contextual prior sums to one: the `graph`, or the `neighborhood` of each node.
        kept_by: The run keeps the parameters of the last epoch in which both validation NLL and accuracy tie or beat their
            best (`both`, GAT's rule), or in which the NLL does (`nll`).
        fanout: Most neighbors per node of a mini-batch; None for all.
        learning_rate: Learning rate of Adam.
        weight_decay: L2 penalty, added to the gradient before Adam's update (not AdamW's).
    """

    attention: AttentionChoice = field(default_factory=lambda: AttentionChoice("soft"))
    training: TrainingConfig = field(
        default_factory=lambda: TrainingConfig(epochs=400, batch_size=1, keep="validation_nll", patience=100)
    )
    seed: Seed = 0
    dataset: str = "generated"
    split: int | None = 0
    left_out_classes: Annotated[int, Field(ge=0)] = 0
    num_heads: Count = 8
    head_dim: Count = 8
    output_heads: Count = 1
    dropout: Share = 0.6
    prior_scope: Literal["graph", "neighborhood"] = "graph"
    kept_by: Literal["both", "nll"] = "both"
    fanout: Count | None = None
    learning_rate: Positive = 5e-3
    weight_decay: NotNegative = 5e-4

    def __post_init__(self) -> None:
        self.attention.check_layers(on_edges=True)


def load_config_graph(config: GraphConfig, data: Path | None) -> Graph:
    """Load the graph a config names, from `data` or the folder that BAYESATTN_DATA names."""
    if data is None and os.environ.get("BAYESATTN_DATA"):
        data = Path(os.environ["BAYESATTN_DATA"])
    split = split_of_seed(config.dataset, config.seed) if config.split is None else config.split
    return leave_out_classes(load_graph(config.dataset, data, split=split), config.left_out_classes)
