"""A whole run on Cora, 400 epochs: the graph recipe against the same recipe around PyG's `GATConv`, in CPU time.

    python benchmarks/cora.py --data DIR --out benchmarks/results/cpu/cora.csv

Both go through the training loop of the recipes, with the same optimiser, a validation in every epoch and one thread. PyG's
model is the usual one: dense features, dropout on the input of each layer and on the attention weights, 8 heads of 8
features and one head of classes. `BayesianGATConv` takes the place of its layers in further runs: the price of sampling and
KL alone, where the recipe's own network also gains by sparse features and by computing only what the loss depends on.
Runs take turns, and what counts is this process's CPU time.
"""

import argparse
import functools
import statistics
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GATConv

from bayesattn.bench.harness import measure_in_turn, versions
from bayesattn.evaluation.runs import write_csv
from bayesattn.evaluation.threads import one_thread
from bayesattn.integrations.pyg import BayesianGATConv
from bayesattn_recipes.common.config import seed_everything
from bayesattn_recipes.common.loop import train
from bayesattn_recipes.graph.data import Graph
from bayesattn_recipes.graph.train import GraphConfig, GraphExperiment, build_optimizer, fit, load_config, load_config_graph


class PyGNetwork(nn.Module):
    """Two GATConv layers, as in PyG's own example, or Bayesian ones in their place."""

    def __init__(self, graph: Graph, config: GraphConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        options = {"dropout": config.dropout, "add_self_loops": False}
        layer = GATConv
        if config.attention.is_stochastic:
            layer = functools.partial(BayesianGATConv, config=config.attention)
        self.hidden = layer(graph.features.shape[1], config.head_dim, config.num_heads, **options)
        width = config.head_dim * config.num_heads
        self.output = layer(width, graph.num_classes, config.output_heads, concat=False, **options)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = F.elu(self.hidden(F.dropout(x, self.dropout, self.training), edge_index))
        return self.output(F.dropout(x, self.dropout, self.training), edge_index)


class PyGExperiment(GraphExperiment):
    """The recipe's experiment around PyG's network."""

    def __init__(self, config: GraphConfig, graph: Graph) -> None:
        super().__init__(config, graph)
        self.model = PyGNetwork(graph, config)  # type: ignore[assignment]
        self.optimizer = build_optimizer(config, self.model)

    def nll(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(self.graph.features, self.graph.edge_index)
        return F.cross_entropy(logits[self.graph.splits["train"]], batch["labels"], reduction="sum")

    def validate(self, model: nn.Module) -> dict[str, float]:
        nodes = self.graph.splits["validation"]
        logits, labels = model(self.graph.features, self.graph.edge_index)[nodes], self.graph.labels[nodes]
        accuracy = (logits.argmax(dim=-1) == labels).float().mean()
        return {"validation_nll": float(F.cross_entropy(logits, labels)), "validation_accuracy": float(accuracy)}


@one_thread()
def run_pyg(config: GraphConfig, graph: Graph) -> None:
    seed_everything(config.seed)
    train(PyGExperiment(config, graph), config.training, seed=config.seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=400)
    parser.add_argument("--variants", default="soft,nokl,wc")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # no early stopping: every run does the same number of epochs
    settings = [f"training.epochs={arguments.epochs}", "training.patience=null"]
    soft = load_config("cora-soft", settings)
    graph = load_config_graph(soft, arguments.data)
    calls = {"GATConv": lambda: run_pyg(soft, graph)}
    for variant in arguments.variants.split(","):
        config = load_config(f"cora-{variant}", settings)
        calls[f"recipe {variant}"] = lambda config=config: fit(config, graph)
        if config.attention.is_stochastic:
            calls[f"BayesianGATConv {variant}"] = lambda config=config: run_pyg(config, graph)
    # the first call of each, which is not counted, warms up with a run of its own
    times = measure_in_turn(list(calls.values()), rounds=arguments.rounds)
    rows = []
    for name, row in zip(calls, times):
        ratios = [ours / theirs for ours, theirs in zip(row, times[0])]
        about = {"epochs": arguments.epochs, "median_cpu_s": round(statistics.median(row) / 1e3, 3)}
        shown = {
            "ratio": round(statistics.median(ratios), 3),
            "lowest": round(min(ratios), 3),
            "highest": round(max(ratios), 3),
        }
        rows.append({"model": name, **about, **shown, "rounds": len(row), **versions("cpu")})
        print(rows[-1], flush=True)
    write_csv(arguments.out, rows)


if __name__ == "__main__":
    main()
