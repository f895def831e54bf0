"""Graphs that outgrow a full batch: a training step on ten million edges, and mini-batches on a graph of ogbn-arxiv's size.

    python benchmarks/large_graphs.py step --out benchmarks/results/cpu/large-step.json
    python benchmarks/large_graphs.py batches --processes 1 --out benchmarks/results/cpu/large-batches-1.json
    python benchmarks/large_graphs.py batches --processes 2 --out benchmarks/results/cpu/large-batches-2.json

The graphs are generated. `step` is one Bayesian GAT layer with KL, forward, backward and Adam. `batches` trains the recipe's
network through its training loop: batches of nodes with 10 sampled neighbours of each node, the KL scaled to that of the
whole graph, on one process or on two that average their gradients. Memory is the largest resident set of a process.
"""

import argparse
import contextlib
import os
import resource
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

from bayesattn import AttentionConfig, record_kl
from bayesattn.evaluation.runs import write_json
from bayesattn.integrations.pyg import BayesianGATConv
from bayesattn_recipes.common.config import seed_everything
from bayesattn_recipes.common.loop import train
from bayesattn_recipes.graph.config import load_config
from bayesattn_recipes.graph.experiment import BatchExperiment
from bayesattn_recipes.graph.generated import generate_graph

# ogbn-arxiv: 169,343 nodes, 1,166,243 edges, 128 features, 40 classes, 90,941 training labels
ARXIV = {"num_nodes": 169_343, "num_classes": 40, "num_words": 128, "mean_degree": 2 * 1_166_243 / 169_343}
SPLITS = {"num_train": 90_941, "num_validation": 29_799}


class _Stop(Exception):
    """Enough steps."""


def peak_gib() -> float:
    """Return the largest resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def step(num_nodes: int, num_edges: int) -> dict[str, Any]:
    """Train a layer for one step on random edges."""
    torch.manual_seed(0)
    layer = BayesianGATConv(16, 8, heads=8, add_self_loops=False, config=AttentionConfig("BAM-WC"))
    optimizer = torch.optim.Adam(layer.parameters())
    edge_index = torch.randint(num_nodes, (2, num_edges))
    x, labels = torch.randn(num_nodes, 16), torch.randint(64, (num_nodes,))
    before, start, cpu = peak_gib(), time.perf_counter(), time.process_time()
    with record_kl() as kl:
        logits = layer(x, edge_index)
    loss = F.cross_entropy(logits, labels) + kl.total() / num_nodes
    loss.backward()
    optimizer.step()
    seconds = {"seconds": round(time.perf_counter() - start, 1), "cpu_seconds": round(time.process_time() - cpu, 1)}
    memory = {"peak_gib": round(peak_gib(), 2), "before_gib": round(before, 2)}
    return {"nodes": num_nodes, "edges": num_edges, "loss": float(loss.detach()), **seconds, **memory}


def batches(rank: int, world: int, port: int, steps: int, out: str) -> None:
    """Train some steps in one of `world` processes; the first writes what was measured."""
    torch.set_num_threads(1)
    if world > 1:
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in places.items()}, MASTER_ADDR="127.0.0.1")
    os.environ.update(ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1")
    start = time.perf_counter()
    graph = generate_graph(**ARXIV, **SPLITS)
    made = time.perf_counter() - start
    config = load_config("generated-wc", ["training.batch_size=2048", "prior_scope=neighbourhood", "fanout=10"])
    config = replace(config, training=replace(config.training, epochs=1, keep="last", patience=None))
    seed_everything(0)
    experiment = BatchExperiment(config, graph)
    # validation of the whole graph is not what is timed
    experiment.validate = lambda model: {}
    times: list[float] = [time.perf_counter()]

    def watch(done: int, total: int) -> None:
        times.append(time.perf_counter())
        if done == steps:
            raise _Stop

    first = torch.cat([parameter.detach().flatten() for parameter in experiment.model.parameters()])
    with contextlib.suppress(_Stop):
        train(experiment, config.training, seed=0, on_progress=watch)
    last = torch.cat([parameter.detach().flatten() for parameter in experiment.model.parameters()])
    if not bool(torch.isfinite(last).all()) or torch.equal(first, last):
        raise RuntimeError("parameters are not finite, or did not move")
    if rank == 0:
        about = {"nodes": graph.num_nodes, "edges": graph.edge_index.shape[1], "processes": world, "steps": steps}
        seconds = {"graph_seconds": round(made, 1), "seconds_per_step": round((times[-1] - times[1]) / (steps - 1), 3)}
        write_json(
            Path(out), {**about, "batch_size": config.training.batch_size, **seconds, "peak_gib": round(peak_gib(), 2)}
        )
    if world > 1:
        dist.barrier()
    # torch now and then deadlocks while it destroys a DistributedDataParallel on gloo
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["step", "batches"])
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--edges", type=int, default=10_000_000)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.what == "step":
        torch.set_num_threads(1)
        found = step(arguments.nodes, arguments.edges)
        write_json(arguments.out, found)
        print(found)
        return
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    options = (arguments.processes, port, arguments.steps, str(arguments.out))
    mp.start_processes(batches, options, nprocs=arguments.processes, start_method="spawn")
    print(arguments.out.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
