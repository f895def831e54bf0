"""What the paper's table does not show: tuned networks on worse data, and which of their predictions to trust.

    python -m bayesattn_recipes.graph.robustness cora --data DIR --out runs/robustness/cora.csv
    python -m bayesattn_recipes.graph.compare runs/robustness/*.csv --out docs/results

Soft attention, MC dropout, BAM without KL and BAM-WC, each with the settings chosen for it (`search.py`), and an ensemble of
five soft networks for every seed. They are trained on the graph as it is and on worse ones (`TRAINED`); those trained on the
graph as it is also predict on worse ones (`PREDICTED`). All seeds of one kind train side by side, and seeds are paired: one
seed has the same split, wrong labels, left-out class and test graph for all kinds. Each test graph is drawn four times, and
seed s takes draw s mod 4; a temperature comes from the validation nodes of the graph that was trained on.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesattn import metrics
from bayesattn.evaluation.runs import write_csv
from bayesattn.evaluation.threads import one_thread
from bayesattn_recipes.graph.corrupt import (
    add_edges,
    change_labels,
    keep_labels,
    remove_edges,
    replace_features,
    rotate_classes,
)
from bayesattn_recipes.graph.data import Graph, leave_out_classes
from bayesattn_recipes.graph.evaluate import LEFT_OUT, available_methods, draw, measure_draws
from bayesattn_recipes.graph.inputs import GraphInputs
from bayesattn_recipes.graph.many import COPIES, train_many
from bayesattn_recipes.graph.model import GraphAttentionNetwork
from bayesattn_recipes.graph.sampling import neighbourhood_inputs
from bayesattn_recipes.graph.train import GraphConfig, load_config, load_seed_graphs

CLEAN = "clean"
OUTSIDE = "class left out"
KINDS = ("soft", "dropout", "nokl", "wc")
ATTENTION = "-attention"
NUM_SAMPLES = 20
TEST_DRAWS = 4
# members of an ensemble have seeds so far apart
MEMBER_STEP = 1000
# how a graph is changed before training, by run seed; the last one has the same edges for all seeds
TRAINED: dict[str, Callable[[Graph, int], Graph]] = {
    CLEAN: lambda graph, seed: graph,
    OUTSIDE: lambda graph, seed: leave_out_classes(rotate_classes(graph, seed), 1),
    "labels wrong 20 %": lambda graph, seed: change_labels(graph, 0.2, seed),
    "labels wrong 40 %": lambda graph, seed: change_labels(graph, 0.4, seed),
    "a quarter of the labels": lambda graph, seed: keep_labels(graph, 0.25, seed),
    "trained with edges added 50 %": lambda graph, seed: add_edges(graph, 0.5),
}
# how the graph is changed on which the networks of the clean graph predict, by number of the draw
PREDICTED: dict[str, Callable[[Graph, int], Graph]] = {
    "features replaced 25 %": lambda graph, seed: replace_features(graph, 0.25, seed),
    "features replaced 50 %": lambda graph, seed: replace_features(graph, 0.5, seed),
    "edges added 50 %": lambda graph, seed: add_edges(graph, 0.5, seed),
    "edges added 100 %": lambda graph, seed: add_edges(graph, 1.0, seed),
    "edges removed 25 %": lambda graph, seed: remove_edges(graph, 0.25, seed),
    "edges removed 50 %": lambda graph, seed: remove_edges(graph, 0.5, seed),
}
MEASURES = (
    "accuracy", "nll", "scaled_nll", "ece", "scaled_ece", "aurc", "selective_accuracy_80", "pavpu_05", "ood_auroc",
)  # fmt: skip


@dataclass(frozen=True)
class Trained:
    """Networks of one kind side by side.

    Attributes:
        model: One copy for each seed and member, members of a seed together.
        graphs: One for each seed.
        seeds: Of the runs.
        members: Networks for each seed.
    """

    model: GraphAttentionNetwork
    graphs: list[Graph]
    seeds: list[int]
    members: int


def train_kind(
    config: GraphConfig, graphs: Sequence[Graph], inputs: GraphInputs, seeds: Sequence[int], members: int, device: str
) -> list[Trained]:
    """Train all seeds and members, as many side by side as the device likes."""
    per_group = max(1, COPIES[device] // members)
    groups = []
    for start in range(0, len(seeds), per_group):
        own = list(seeds[start : start + per_group])
        own_graphs = list(graphs[start : start + per_group])
        runs = train_many(
            config,
            [graph for graph in own_graphs for _ in range(members)],
            [seed + MEMBER_STEP * member for seed in own for member in range(members)],
            device=device,
            inputs=inputs,
            shares_noise=device != "cpu",
        )
        groups.append(Trained(runs.model, own_graphs, own, members))
    return groups


def series_of(kind: str, config: GraphConfig) -> dict[str, str]:
    """Return the series that networks of a kind give, and how each predicts.

    BAM draws all the noise it was trained with; beside it there are its mean and, on the graph that was trained on, draws of
    the attention alone.
    """
    methods = available_methods(config)
    if kind == "soft":
        return {"soft": "mean"}
    if kind == "dropout":
        return {"dropout": "dropout"}
    return {kind: methods[-1], f"{kind}-mean": "mean"} | ({kind + ATTENTION: "attention"} if len(methods) > 2 else {})


@dataclass(frozen=True)
class Asked:
    """Where predictions are wanted.

    Attributes:
        nodes: Validation, test and left-out nodes of any seed.
        home: Inputs of the graph that was trained on.
        worse: Inputs of every test graph, a list of draws.
    """

    nodes: Tensor
    home: GraphInputs
    worse: dict[str, list[GraphInputs]]

    @classmethod
    def of(cls, graphs: Sequence[Graph], inputs: GraphInputs, changes: dict[str, Any], device: str) -> "Asked":
        """Collect the nodes of all graphs and make the worse graphs."""
        distinct = list(dict.fromkeys(graphs))
        nodes = torch.cat([own for graph in distinct for name, own in graph.splits.items() if name != "train"]).unique()

        def ready(whole: GraphInputs) -> GraphInputs:
            return neighbourhood_inputs(whole, nodes).to(device)

        worse = {
            name: [ready(GraphInputs.of(change(graphs[0], number))) for number in range(TEST_DRAWS)]
            for name, change in changes.items()
        }
        return cls(nodes, ready(inputs), worse)


def measure_series(kind: str, config: GraphConfig, trained: Trained, asked: Asked) -> list[dict[str, Any]]:
    """Measure every seed on the graph that was trained on and on every test graph; a row for each, and each series."""
    place = torch.full((trained.graphs[0].num_nodes,), -1)
    place[asked.nodes] = torch.arange(len(asked.nodes))
    is_gpu = next(trained.model.parameters()).is_cuda
    rows = []
    for series, method in series_of(kind, config).items():

        def predict(inputs: GraphInputs, method: str = method) -> Tensor:
            return draw(trained.model, inputs, method, NUM_SAMPLES, 0, shares_noise=is_gpu).cpu()

        home = predict(asked.home)
        worse = {} if series.endswith(ATTENTION) else asked.worse
        for situation, inputs in {CLEAN: [asked.home], **worse}.items():
            drawn = [home] if situation == CLEAN else [predict(one) for one in inputs]
            for index, (seed, graph) in enumerate(zip(trained.seeds, trained.graphs)):
                members = slice(index * trained.members, (index + 1) * trained.members)
                logits = drawn[seed % len(drawn)][:, members]
                parts = {name: place[own] for name, own in graph.splits.items() if name != "train"}
                # the first member is the run of the seed; all of them, as draws, are the ensemble
                choices = {series: (home[:, members.start], logits[:, 0])}
                if trained.members > 1:
                    choices["ensemble"] = (home[0, members], logits[0])
                for name, (validation, test) in choices.items():
                    found = _measure(validation[:, parts["validation"]], test, parts, graph)
                    rows.append({"series": name, "predicted": situation, "seed": seed, **found})
    return rows


def _measure(validation: Tensor, drawn: Tensor, parts: dict[str, Tensor], graph: Graph) -> dict[str, float]:
    truth = {name: graph.labels[graph.splits[name]] for name in ("validation", "test")}
    found = measure_draws(validation, truth["validation"], drawn[:, parts["test"]], truth["test"])
    if LEFT_OUT in parts:
        inside, outside = (
            metrics.entropy(torch.softmax(drawn[:, parts[name]].double(), dim=-1).mean(dim=0)) for name in ("test", LEFT_OUT)
        )
        found["ood_auroc"] = metrics.ood_detection(inside, outside).auroc
    return {name: round(found[name], 6) for name in MEASURES if name in found}


@one_thread()
def study(
    name: str,
    *,
    num_seeds: int,
    members: int,
    trained: Sequence[str],
    kinds: Sequence[str] = KINDS,
    ending: str = "tuned",
    first_seed: int = 0,
    limit: float,
    data: Path | None,
    device: str,
    out: Path,
) -> list[dict[str, Any]]:
    """Run the study of one data set and return its rows; they are written after every way and kind.

    Args:
        name: As its configs begin: `cora`, with configs `cora-soft-tuned`, `cora-dropout-tuned`, …
        num_seeds: Paired runs of each kind.
        members: Networks of an ensemble; 1 for none.
        trained: Of `TRAINED`; a class is left out only where three are.
        kinds: Of `KINDS`.
        ending: Of the configs' names: `tuned`, `selective` or `few` (`search.py`); empty for the plain configs.
        first_seed: The others follow.
        limit: Seconds; no way of training begins that would, at the pace of the slowest before, end later.
        data: Folder of the data sets.
        device: Where to compute.
        out: CSV file.
    """
    if num_seeds < 1 or members < 1:
        raise ValueError(f"num_seeds, members are {num_seeds}, {members}; allowed: integers of at least 1")
    for way in trained:
        if way not in TRAINED:
            raise ValueError(f"trained has {way!r}; allowed: {', '.join(TRAINED)}")
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"kinds has {kind!r}; allowed: {', '.join(KINDS)}")
    start = last = time.perf_counter()
    longest, rows = 0.0, []
    configs = {kind: load_config("-".join(filter(None, (name, kind, ending)))) for kind in kinds}
    seeds = range(first_seed, first_seed + num_seeds)
    loaded = load_seed_graphs(next(iter(configs.values())), data, seeds)
    for way in trained:
        if way == OUTSIDE and loaded[0].num_classes < 3:
            continue
        if rows and time.perf_counter() - start + longest > limit:
            print(f"{name}: no time for {way!r}", flush=True)
            break
        graphs = [TRAINED[way](graph, seed) for graph, seed in zip(loaded, seeds)]
        inputs = GraphInputs.of(graphs[0])
        asked = Asked.of(graphs, inputs, PREDICTED if way == CLEAN else {}, device)
        for kind, config in configs.items():
            for group in train_kind(config, graphs, inputs, seeds, members if kind == "soft" else 1, device):
                about = {"dataset": name, "trained": way}
                rows += [{**about, **row} for row in measure_series(kind, config, group, asked)]
            write_csv(out, rows)
        longest, last = max(longest, time.perf_counter() - last), time.perf_counter()
        print(f"{name}, {way}: {last - start:.0f} s", flush=True)
    return rows


def main() -> None:
    """Run the study of one data set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="data set, as its configs begin: cora, chameleon, …")
    parser.add_argument("--trained", default=",".join(TRAINED), help="ways of training, separated by commas")
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of networks, separated by commas")
    parser.add_argument("--ending", default="tuned", help="of the configs' names; empty for the plain ones")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--members", type=int, default=5, help="networks of an ensemble")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    study(
        arguments.name,
        num_seeds=arguments.seeds,
        members=arguments.members,
        trained=arguments.trained.split(","),
        kinds=arguments.kinds.split(","),
        ending=arguments.ending,
        first_seed=arguments.first_seed,
        limit=arguments.limit,
        data=arguments.data,
        device=arguments.device,
        out=arguments.out,
    )


if __name__ == "__main__":
    main()
