"""Train one graph attention network with the loop that all recipes share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bayesattn.evaluation.threads import one_thread
from bayesattn_recipes.common import runs
from bayesattn_recipes.common.config import MetricLog, seed_everything
from bayesattn_recipes.common.loop import train
from bayesattn_recipes.graph.config import GraphConfig, load_config_graph
from bayesattn_recipes.graph.config import load_config as load_config
from bayesattn_recipes.graph.data import Graph
from bayesattn_recipes.graph.experiment import BatchExperiment, GraphExperiment
from bayesattn_recipes.graph.model import GraphAttentionNetwork

RECIPE = "graph"


def build_experiment(config: GraphConfig, data: Path | None = None) -> GraphExperiment:
    """Return the experiment of a config, with the graph that it names."""
    return _experiment(config, load_config_graph(config, data))


def _experiment(config: GraphConfig, graph: Graph) -> GraphExperiment:
    return GraphExperiment(config, graph) if config.training.batch_size == 1 else BatchExperiment(config, graph)


@one_thread()
def fit(
    config: GraphConfig, graph: Graph, on_progress: Callable[[int, int], Any] = lambda done, total: None
) -> tuple[GraphAttentionNetwork, MetricLog]:
    """Train a network on a graph that is loaded already; return it with its log, without a run folder."""
    seed_everything(config.seed)
    experiment = _experiment(config, graph)
    log = train(experiment, config.training, seed=config.seed, on_progress=on_progress)
    return experiment.model, log


train_run = one_thread()(runs.TrainRun(RECIPE, build_experiment))


def load_run(folder: Path, data: Path | None = None) -> tuple[GraphConfig, GraphAttentionNetwork, Graph]:
    """Read a run folder back: its config, the trained network in eval mode, and its graph."""
    config = runs.load_run_config(folder, GraphConfig, RECIPE)
    graph = load_config_graph(config, data)
    model = GraphAttentionNetwork(config, graph)
    runs.load_parameters(folder, model)
    return config, model, graph
