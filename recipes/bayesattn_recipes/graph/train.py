"""Train one graph attention network with the loop that all recipes share."""

from pathlib import Path

from bayesattn_recipes.common.runs import Training, load_parameters
from bayesattn_recipes.graph.config import CONFIGS, GraphConfig, load_config_graph
from bayesattn_recipes.graph.data import Graph
from bayesattn_recipes.graph.experiment import BatchExperiment, GraphExperiment
from bayesattn_recipes.graph.model import GraphAttentionNetwork


def build_experiment(config: GraphConfig, data: Path | Graph | None = None) -> GraphExperiment:
    """Return the experiment of a config; `data` is the folder of the data sets, or the graph if it is loaded already."""
    graph = data if isinstance(data, Graph) else load_config_graph(config, data)
    return GraphExperiment(config, graph) if config.training.batch_size == 1 else BatchExperiment(config, graph)


TRAINING = Training("graph", GraphConfig, CONFIGS, build_experiment, lambda config: True)
load_config, fit, train_run = TRAINING.load_config, TRAINING.fit, TRAINING.train_run


def load_run(folder: Path, data: Path | None = None) -> tuple[GraphConfig, GraphAttentionNetwork, Graph]:
    """Read a run folder back: its config, the trained network in eval mode, and its graph."""
    config = TRAINING.load_run_config(folder)
    graph = load_config_graph(config, data)
    model = GraphAttentionNetwork(config, graph)
    load_parameters(folder, model)
    return config, model, graph
