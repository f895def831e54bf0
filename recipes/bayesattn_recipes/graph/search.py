"""How settings are chosen: a random search of equal size for every kind of network, ranked on validation nodes alone.

    python -m bayesattn_recipes.graph.search run cora --seeds 5 --data DIR --out runs/search/cora.csv
    python -m bayesattn_recipes.graph.search choose runs/search/*.csv --out CONFIGS --chosen runs/search/chosen.json

A round fixes learning rate, width and which epoch is kept (`settings.py`). Soft attention, BAM without KL and BAM-WC train
with equally many settings: dropout and weight decay, and for the last two noise and prior; MC dropout chooses among soft's
networks. The settings and seeds of a round and kind train side by side, as many as the device likes.

A setting counts by how its predictions are made: soft by its mean, MC dropout by 20 draws of its dropout, BAM by its mean or
by 20 draws of all the noise it was trained with, whichever is better; so soft and MC dropout together have the choice that
each BAM has. Of the settings whose mean validation accuracy is within one point of the best, the one is chosen with the
lowest NLL after temperature scaling (the temperature for one half of the validation nodes comes from the other half); or,
with `--by aurc`, of all settings the one with the lowest AURC. No test node is read.

Configs are called `-tuned` (all labels, by NLL), `-selective` (all labels, by AURC) and `-few` (a quarter of the labels,
another one for each seed, by AURC).
"""

import argparse
import csv
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from jaxtyping import Float, Int
from torch import Tensor

from bayesattn import metrics
from bayesattn.evaluation.measure import mean_logits
from bayesattn.evaluation.runs import write_bytes, write_csv, write_json
from bayesattn.evaluation.threads import one_thread
from bayesattn_recipes.graph.corrupt import keep_labels
from bayesattn_recipes.graph.data import Graph
from bayesattn_recipes.graph.evaluate import available_methods, draw
from bayesattn_recipes.graph.inputs import GraphInputs
from bayesattn_recipes.graph.many import COPIES, train_many
from bayesattn_recipes.graph.sampling import neighbourhood_inputs
from bayesattn_recipes.graph.settings import FIXED, KINDS, NAMES, OWN, draw_points, point_config
from bayesattn_recipes.graph.targets import Targets
from bayesattn_recipes.graph.train import CONFIGS, load_config, load_seed_graphs

FIRST_SEED = 100
NUM_SAMPLES = 20
# what settings may be chosen by, and how much less accurate than the best they may be; AURC is itself a mean of errors
MEASURES = {"scaled_nll": 0.01, "aurc": math.inf}


# what is chosen: the networks it trains, and the methods that may predict: their mean, or draws of all their noise
CHOICES = {
    "soft": ("soft", ("mean",)),
    "dropout": ("soft", ("all",)),
    "nokl": ("nokl", ("mean", "all")),
    "wc": ("wc", ("mean", "all")),
}


def run_round(
    name: str, kind: str, number: int, graphs: Sequence[Graph], inputs: GraphInputs, seeds: Sequence[int], device: str
) -> list[dict[str, Any]]:
    """Train all settings and seeds of one kind; a row for every setting, seed and method."""
    # neighbours with the same noise and prior share the computation of the KL
    points = sorted(draw_points(kind, number), key=lambda point: [point.get(name, 0.0) for name in OWN["wc"]])
    num_labels = len(graphs[0].splits["train"])
    jobs = [(point, seed, graph) for point in points for seed, graph in zip(seeds, graphs)]
    rows = []
    for start in range(0, len(jobs), COPIES[device]):
        group = jobs[start : start + COPIES[device]]
        configs = [point_config(name, kind, point, num_labels) for point, _, _ in group]
        own_graphs = [graph for _, _, graph in group]
        runs = train_many(
            configs, own_graphs, [seed for _, seed, _ in group], device=device, inputs=inputs, shares_noise=device != "cpu"
        )
        validation = Targets.of(own_graphs, "validation", torch.device("cpu"))
        wanted = neighbourhood_inputs(inputs, validation.nodes).to(device)
        # the copy that drops most says which methods there are
        methods = available_methods(max(configs, key=lambda config: config.dropout))
        for method in dict.fromkeys(["mean", methods[-1]]):
            logits = draw(runs.model, wanted, method, NUM_SAMPLES, 0, shares_noise=device != "cpu").cpu()
            for copy, (point, seed, _) in enumerate(group):
                own = validation.is_own[copy]
                found = measure(logits[:, copy, own], validation.labels[copy, own])
                row = {"dataset": name, "kind": kind, "round": number, "method": "mean" if method == "mean" else "all"}
                about = {
                    "num_labels": num_labels,
                    "kept_epoch": int(runs.kept_epoch[copy]),
                    "seconds": round(runs.seconds, 2),
                }
                rows.append({**row, "seed": seed, **point, **found, **about})
    return rows


def measure(logits: Float[Tensor, "s v c"], labels: Int[Tensor, " v"]) -> dict[str, float]:
    """Return accuracy, NLL, the NLL after cross-fitted temperature scaling and AURC of drawn predictions."""
    mean = mean_logits(torch.softmax(logits.double(), dim=-1))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    halves = order.tensor_split(2)
    total = 0.0
    for fitted, scored in (halves, halves[::-1]):
        temperature = metrics.fit_temperature(mean[fitted], labels[fitted])
        total += float(F.cross_entropy(mean[scored] / temperature, labels[scored], reduction="sum"))
    return {
        "accuracy": float((mean.argmax(dim=-1) == labels).double().mean()),
        "nll": float(F.cross_entropy(mean, labels)),
        "scaled_nll": total / len(labels),
        "aurc": metrics.evaluate_predictions(logits, labels, space="logit", num_resamples=0)["aurc"].value,
    }


@one_thread()
def search(
    name: str,
    *,
    num_seeds: int,
    rounds: Sequence[int],
    limit: float,
    data: Path | None,
    device: str,
    out: Path,
    labels: float = 1.0,
    kinds: Sequence[str] = KINDS,
) -> list[dict[str, Any]]:
    """Run some rounds, until the next one would end after `limit` seconds; write after each kind of a round.

    Every round trains all `kinds`, so that a search that ends at its limit is still one of equal size. `labels` is the share
    of the training nodes' labels that each seed keeps, its own choice of them.
    """
    start = last = time.perf_counter()
    longest = 0.0
    seeds = range(FIRST_SEED, FIRST_SEED + num_seeds)
    graphs = load_seed_graphs(load_config(f"{name}-soft"), data, seeds)
    if labels < 1.0:
        graphs = [keep_labels(graph, labels, seed) for graph, seed in zip(graphs, seeds)]
    inputs = GraphInputs.of(graphs[0])
    rows: list[dict[str, Any]] = []
    for number in rounds:
        for kind in kinds:
            rows += run_round(name, kind, number, graphs, inputs, seeds, device)
            write_csv(out, rows)
            now = time.perf_counter()
            print(f"{name}: round {number}, {kind}, {now - start:.0f} s", flush=True)
        longest, last = max(longest, now - last), now
        if now - start + longest > limit:
            break
    return rows


def choose(rows: Sequence[dict[str, Any]], by: str = "scaled_nll") -> dict[str, dict[str, Any]]:
    """Return the chosen setting of each kind of prediction, with its means over seeds and how many it was chosen from.

    Rows without the measure `by` do not count, and a kind without rows (a search was cut short) is left out.
    """
    chosen = {}
    measured = ("accuracy", "nll", *dict.fromkeys(("scaled_nll", by)))
    for choice, (kind, methods) in CHOICES.items():
        points: dict[tuple, list[dict[str, Any]]] = {}
        for row in rows:
            # MC dropout without dropout is soft attention, which chooses for itself
            is_idle = choice == "dropout" and float(row["dropout"]) == 0.0
            is_measured = row.get(by, "") != ""
            if row["kind"] == kind and row["method"] in methods and is_measured and not is_idle:
                points.setdefault((row["method"], *(row.get(name, "") for name in NAMES)), []).append(row)
        if not points:
            continue
        means = {
            key: {name: sum(float(row[name]) for row in own) / len(own) for name in measured} for key, own in points.items()
        }
        best = max(mean["accuracy"] for mean in means.values())
        fine = [key for key, mean in means.items() if mean["accuracy"] >= best - MEASURES[by]]
        key = min(fine, key=lambda key: means[key][by])
        own = points[key]
        point = {
            name: own[0][name] if name == "kept_by" else float(own[0][name]) for name in NAMES if own[0].get(name, "") != ""
        }
        about = {
            "num_points": len({other[1:] for other in points}),
            "num_seeds": len({row["seed"] for row in own}),
            "num_labels": int(own[0]["num_labels"]),
        }
        chosen[choice] = {"kind": kind, "method": key[0], "point": point, **about, **means[key]}
    return chosen


def write_config(name: str, choice: str, found: dict[str, Any], folder: Path, ending: str = "tuned") -> Path:
    """Write the config of a chosen setting."""
    config = f"{name}-{choice}-{ending}"
    base = yaml.safe_load((CONFIGS / f"{name}-{found['kind']}.yaml").read_text(encoding="utf-8"))
    values = {**FIXED[found["kind"]], **found["point"]}
    if "kl_weight" in values:
        values["training.kl_schedule.final"] = values.pop("kl_weight") * found["num_labels"]
    for key, value in values.items():
        target = base
        *parents, last = key.split(".")
        for parent in parents:
            target = target.setdefault(parent, {})
        target[last] = int(value) if last in ("head_dim", "prior_hidden_dim", "epochs") else value
    words = {"soft": "soft attention", "dropout": "soft attention", "nokl": "BAM-NOKL", "wc": "BAM-WC"}
    ranked = f", AURC {found['aurc']:.4f}" if "aurc" in found else ""
    how = {"mean": "its mean", "all": "20 draws of all its noise"}[found["method"]]
    header = (
        f"# {name}, {words[choice]}, to predict with {how}: the best of {found['num_points']} settings on validation nodes, "
        f"{found['num_seeds']} seeds each, {found['num_labels']} labels (search.py).\n"
        f"# Validation: accuracy {found['accuracy']:.4f}, NLL {found['nll']:.4f}, {found['scaled_nll']:.4f} after "
        f"cross-fitted temperature scaling{ranked}.\n"
        f"# bayesattn train graph --config {config} --data DIR --out runs/{config}\n"
    )
    path = folder / f"{config}.yaml"
    write_bytes(path, (header + yaml.safe_dump(base, sort_keys=False)).encode())
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read what `search` wrote."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def main() -> None:
    """Search one data set, or choose from what searches wrote."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="search one data set")
    run.add_argument("name", help="data set, as its configs begin: cora, chameleon, …")
    run.add_argument("--seeds", type=int, default=5)
    run.add_argument("--rounds", default="0,1,2", help="numbers of the rounds, separated by commas")
    run.add_argument("--limit", type=float, default=float("inf"), help="seconds; no round begins that would end later")
    run.add_argument("--labels", type=float, default=1.0, help="share of the labels that are kept for training")
    run.add_argument("--data", type=Path)
    run.add_argument("--out", type=Path, required=True)
    run.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    pick = commands.add_parser("choose", help="write the configs of the chosen settings")
    pick.add_argument("files", type=Path, nargs="+")
    pick.add_argument("--out", type=Path, required=True, help="folder of the configs")
    pick.add_argument("--chosen", type=Path, required=True, help="JSON file with all choices")
    pick.add_argument("--by", default="scaled_nll", choices=MEASURES, help="measure that ranks the accurate settings")
    pick.add_argument("--ending", default="tuned", help="of the configs' names")
    arguments = parser.parse_args()
    if arguments.command == "run":
        search(
            arguments.name,
            num_seeds=arguments.seeds,
            rounds=[int(number) for number in arguments.rounds.split(",")],
            limit=arguments.limit,
            data=arguments.data,
            device=arguments.device,
            out=arguments.out,
            labels=arguments.labels,
        )
        return
    by_name: dict[str, list[dict[str, Any]]] = {}
    for file in arguments.files:
        for row in read_rows(file):
            by_name.setdefault(row["dataset"], []).append(row)
    chosen = {name: choose(rows, arguments.by) for name, rows in by_name.items()}
    for name, choices in chosen.items():
        for choice, found in choices.items():
            print(write_config(name, choice, found, arguments.out, arguments.ending), found)
    write_json(arguments.chosen, chosen)


if __name__ == "__main__":
    main()
