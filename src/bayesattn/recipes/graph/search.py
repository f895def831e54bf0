"""How settings are chosen: every one of a grid, a few seeds each, ranked on validation nodes. No test node is read.

    python -m bayesattn.recipes.graph.search chameleon_filtered wc --data DIR

First `soft` settles dropout and weight decay, by the NLL of the soft network itself, so that the baseline gets the settings
that suit it best. Then each Bayesian grid settles noise and prior, and may lower the dropout, by the NLL of 20 draws.
"""

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bayesattn import metrics
from bayesattn.recipes._train import one_thread, progress
from bayesattn.recipes.graph.data import Graph
from bayesattn.recipes.graph.evaluate import available_methods, draw
from bayesattn.recipes.graph.many import train_many
from bayesattn.recipes.graph.model import GraphInputs
from bayesattn.recipes.graph.sampling import neighbourhood_inputs
from bayesattn.recipes.graph.train import GraphConfig, load_config, load_config_graph
from bayesattn.runs import write_bytes

SEEDS = (100, 101, 102, 103, 104)
GRIDS: dict[str, dict[str, list[Any]]] = {
    "soft": {"dropout": [0.2, 0.4, 0.6], "weight_decay": [5e-5, 5e-4]},
    "nokl": {"attention.weibull_k": [0.5, 1, 2], "dropout": [0.2, 0.4, 0.6]},
    "wc": {"attention.weibull_k": [1, 2, 5], "attention.gamma_beta": [1e-1, 1], "dropout": [0.2, 0.4]},
}


def measure(config: GraphConfig, graph: Graph) -> dict[str, float]:
    """Train one network per seed of `SEEDS` and return means over them, on the validation nodes, plain and with 20 draws."""
    inputs = GraphInputs.of(graph)
    model = train_many(config, graph, SEEDS, inputs=inputs).model
    nodes = graph.splits["validation"]
    wanted, labels = neighbourhood_inputs(inputs, nodes), graph.labels[nodes]
    result: dict[str, float] = {}
    for name, method in zip(("plain", "sampled"), available_methods(config)):
        logits = draw(model, wanted, method, 20, seed=0)
        found = [
            metrics.evaluate_predictions(logits[:, copy], labels, space="logit", num_resamples=0)
            for copy in range(len(SEEDS))
        ]
        for key in ("accuracy", "nll", "ece", "aurc"):
            result[f"{name}_{key}"] = sum(estimates[key].value for estimates in found) / len(found)
    return result


@one_thread()
def search(name: str, grid: dict[str, list[Any]], data: Path | None, console: Console) -> list[dict[str, Any]]:
    """Return one row per setting of the config `name`, best first."""
    rows = []
    combinations = list(itertools.product(*grid.values()))
    with progress(console) as display:
        task = display.add_task(name, total=len(combinations))
        for values in combinations:
            settings = [f"{key}={value}" for key, value in zip(grid, values)]
            config = load_config(name, settings)
            rows.append({"settings": settings, **measure(config, load_config_graph(config, data))})
            display.advance(task)
    is_soft = load_config(name).attention.variant == "soft"
    return sorted(rows, key=lambda row: row["plain_nll" if is_soft else "sampled_nll"])


def main() -> None:
    """Run one grid on one data set, print its table and optionally write it as JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("grid", choices=list(GRIDS))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = search(f"{arguments.dataset}-{arguments.grid}", GRIDS[arguments.grid], arguments.data, Console(stderr=True))
    for row in rows:
        numbers = "  ".join(f"{key} {value:.3f}" for key, value in row.items() if key != "settings")
        print(f"{' '.join(row['settings']):70s} {numbers}")
    if arguments.out:
        write_bytes(arguments.out, "".join(json.dumps(row) + "\n" for row in rows).encode())


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
