"""What the paper's table does not show: networks on worse data, and which of their predictions to trust.

    python -m bayesattn.recipes.graph.robustness --configs cora-soft,cora-wc --seeds 20 --data DIR --out runs/robustness

Every config is trained on the clean graph, with wrong training labels, and with a class left out. The test nodes are
predicted on the clean graph, with noisy features, with random edges added, and with edges removed. Compared are the
posterior mean, draws of the attention, MC dropout, and an ensemble of the means of five seeds; a temperature comes from
clean validation nodes. The configs of one call share seeds, so differences are paired.
"""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor

from bayesattn import metrics
from bayesattn.plots._style import COLORS, new_figure
from bayesattn.recipes import _tables
from bayesattn.recipes._train import one_thread, progress
from bayesattn.recipes.graph.corrupt import add_edges, add_feature_noise, change_labels, remove_edges
from bayesattn.recipes.graph.data import Graph, leave_out_classes
from bayesattn.recipes.graph.evaluate import LEFT_OUT, available_methods, draw, measure_draws
from bayesattn.recipes.graph.many import train_many
from bayesattn.recipes.graph.model import GraphInputs
from bayesattn.recipes.graph.sampling import neighbourhood_inputs
from bayesattn.recipes.graph.train import GraphConfig, load_config, load_config_graph
from bayesattn.report.aggregate import over_runs
from bayesattn.runs import write_bytes

ENSEMBLE = 5
NUM_SAMPLES = 20
CLEAN = "clean"
MARKERS = {"mean": "o", "attention": "s", "dropout": "^", "ensemble": "D"}
# how the test nodes are predicted, and how the networks were trained
PREDICTED: dict[str, Callable[[Graph], Graph]] = {
    CLEAN: lambda graph: graph,
    "feature noise 0.5": lambda graph: add_feature_noise(graph, 0.5),
    "feature noise 1": lambda graph: add_feature_noise(graph, 1.0),
    "edges added 50 %": lambda graph: add_edges(graph, 0.5),
    "edges added 100 %": lambda graph: add_edges(graph, 1.0),
    "edges removed 25 %": lambda graph: remove_edges(graph, 0.25),
    "edges removed 50 %": lambda graph: remove_edges(graph, 0.5),
}
TRAINED: dict[str, Callable[[Graph], Graph]] = {
    CLEAN: lambda graph: graph,
    "labels wrong 20 %": lambda graph: change_labels(graph, 0.2),
    "labels wrong 40 %": lambda graph: change_labels(graph, 0.4),
    "class left out": lambda graph: leave_out_classes(graph, 1),
}
# measure: heading, whether larger is better
MEASURES = {
    "accuracy": ("accuracy", True),
    "nll": ("NLL", False),
    "scaled_nll": ("NLL scaled", False),
    "ece": ("ECE", False),
    "aurc": ("AURC", False),
    "selective_accuracy_80": ("accuracy of the surest 80 %", True),
    "pavpu_05": ("PAvPU", True),
    "ood_auroc": ("OOD AUROC", True),
}


def run_group(config: GraphConfig, graph: Graph, seeds: Sequence[int], trained: str) -> dict[str, Any]:
    """Train some seeds side by side and measure them and their ensemble on every kind of test graph.

    Returns:
        By test graph and method: one dictionary of measures for each seed, or for the ensemble alone.
    """
    graph = TRAINED[trained](graph)
    clean = GraphInputs.of(graph)
    model = train_many(config, graph, seeds, inputs=clean).model
    validation, test = graph.splits["validation"], graph.splits["test"]
    truth = (graph.labels[validation], graph.labels[test])
    result: dict[str, Any] = {}
    methods = available_methods(config)[:2]
    temperature_draws = {m: draw(model, neighbourhood_inputs(clean, validation), m, NUM_SAMPLES, 0) for m in methods}
    for name, corrupt in PREDICTED.items() if trained == CLEAN else [(CLEAN, PREDICTED[CLEAN])]:
        inputs = clean if name == CLEAN else GraphInputs.of(corrupt(graph))
        result[name] = {}
        for method in methods:
            drawn = draw(model, neighbourhood_inputs(inputs, test), method, NUM_SAMPLES, 0)
            outside = None
            if LEFT_OUT in graph.splits:
                outside = draw(model, neighbourhood_inputs(inputs, graph.splits[LEFT_OUT]), method, NUM_SAMPLES, 0)
            result[name][method] = [
                _measure(
                    temperature_draws[method][:, copy], drawn[:, copy], truth, None if outside is None else outside[:, copy]
                )
                for copy in range(len(seeds))
            ]
            if method == "mean" and len(seeds) == ENSEMBLE:
                # the members are the draws of an ensemble
                parts = (temperature_draws[method][0], drawn[0], truth, None if outside is None else outside[0])
                result[name]["ensemble"] = [_measure(*parts)]
    return result


def _measure(validation: Tensor, test: Tensor, truth: tuple[Tensor, Tensor], outside: Tensor | None) -> dict[str, float]:
    found = measure_draws(validation, truth[0], test, truth[1])
    if outside is not None:
        inside, outside = (metrics.entropy(torch.softmax(part.double(), dim=-1).mean(dim=0)) for part in (test, outside))
        found["ood_auroc"] = metrics.ood_detection(inside, outside).auroc
    return {name: found[name] for name in MEASURES if name in found}


@one_thread()
def study(
    names: Sequence[str], *, num_seeds: int, trained: Sequence[str], data: Path | None, out: Path, console: Console
) -> list[dict[str, Any]]:
    """Run what is missing in `out` and return one row for every config, way of training, test graph, method and seed."""
    if num_seeds < 1:
        raise ValueError(f"num_seeds is {num_seeds!r}; allowed: an integer of at least 1")
    for way in trained:
        if way not in TRAINED:
            raise ValueError(f"trained has {way!r}; allowed: {', '.join(TRAINED)}")
    groups = [range(start, min(start + ENSEMBLE, num_seeds)) for start in range(0, num_seeds, ENSEMBLE)]
    jobs = [(group, way, name) for group in groups for way in trained for name in names]
    rows = []
    with progress(console) as display:
        task = display.add_task("", total=len(jobs))
        for seeds, way, name in jobs:
            display.update(task, description=f"{name}, {way}")
            config = load_config(name)
            identity = {"config": name, "settings": dataclasses.asdict(config), "seeds": list(seeds), "trained": way}
            path = out / "cells" / f"{name}-{way.replace(' ', '-').replace('%', 'percent')}-{seeds[0]}.json"
            found = _tables.read_cell(path, identity)
            if found is None:
                found = run_group(config, load_config_graph(config, data), list(seeds), way)
                _tables.write_cell(path, identity, found)
            for predicted, methods in found.items():
                for method, measured in methods.items():
                    for place, values in enumerate(measured):
                        row = {"config": name, "trained": way, "predicted": predicted, "method": method}
                        rows.append({**row, "seed": seeds[place], **{key: values.get(key) for key in MEASURES}})
            display.advance(task)
    return rows


def compare(rows: Sequence[dict[str, Any]], baselines: Sequence[tuple[str, str]], names: Sequence[str]) -> list[list[str]]:
    """Return lines of a table: every situation, config, method and measure, and its paired difference to each baseline."""
    lines = []
    situations = list(dict.fromkeys((row["trained"], row["predicted"]) for row in rows))
    for situation in situations:
        by_series: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
        for row in rows:
            if (row["trained"], row["predicted"]) == situation:
                by_series.setdefault((row["config"], row["method"]), {})[row["seed"]] = row
        for series, of_seed in by_series.items():
            for name in names:
                ours = {seed: row[name] for seed, row in of_seed.items() if row[name] is not None}
                if not ours:
                    continue
                line = [
                    _words(situation),
                    f"{series[0]}, {series[1]}",
                    MEASURES[name][0],
                    _tables.show(over_runs(list(ours.values())), digits=4),
                ]
                for baseline in baselines:
                    theirs = {seed: row[name] for seed, row in by_series.get(baseline, {}).items() if row[name] is not None}
                    if series == baseline or not ours.keys() <= theirs.keys() or series[1] == "ensemble":
                        line.append("–")
                        continue
                    paired = _tables.paired(ours, theirs)
                    line.append(f"{paired.difference.value:+.4f} ({_tables.show_p(paired.p_value)})")
                lines.append(line)
    return lines


def plot(rows: Sequence[dict[str, Any]], name: str) -> Figure:
    """Draw one measure of every config (colour) and method (shape) over the situations.

    Error bars are 95 % intervals over seeds; with fewer than five values (ensembles) there is none.
    """
    situations = list(dict.fromkeys((row["trained"], row["predicted"]) for row in rows if row[name] is not None))
    series = list(dict.fromkeys((row["config"], row["method"]) for row in rows if row[name] is not None))
    configs = list(dict.fromkeys(config for config, _ in series))
    figure, axes = new_figure(9.0, 4.6)
    ax = axes[0][0]
    for index, key in enumerate(series):
        points = []
        for place, situation in enumerate(situations):
            found = [
                row[name]
                for row in rows
                if (row["config"], row["method"]) == key and (row["trained"], row["predicted"]) == situation
            ]
            if found and None not in found:
                summary = over_runs(found)
                half = summary.high - summary.value if summary.high is not None and len(found) >= 5 else 0.0
                points.append((place + 0.75 * ((index + 0.5) / len(series) - 0.5), summary.value, half))
        places, values, halves = zip(*points, strict=True)
        style = {"color": COLORS[configs.index(key[0]) % len(COLORS)], "fmt": MARKERS[key[1]]}
        ax.errorbar(places, values, yerr=halves, markersize=5, capsize=2, label=f"{key[0]}, {key[1]}", **style)
    ax.set_xticks(
        range(len(situations)), [_words(situation) for situation in situations], rotation=20, ha="right", fontsize=8
    )
    heading, larger = MEASURES[name]
    ax.set_ylabel(f"{heading} ({'higher' if larger else 'lower'} is better)")
    ax.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", fontsize=7, ncols=3)
    return figure


def _words(situation: tuple[str, str]) -> str:
    return ", ".join(part for part in situation if part != CLEAN) or CLEAN


def main() -> None:
    """Run the study, write `robustness.csv`, `robustness.md` and a figure per measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", required=True, help="configs to compare, separated by commas, the soft one first")
    parser.add_argument("--trained", default=",".join(TRAINED), help="ways of training, separated by commas")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/robustness"))
    arguments = parser.parse_args()
    names = arguments.configs.split(",")
    rows = study(
        names,
        num_seeds=arguments.seeds,
        trained=arguments.trained.split(","),
        data=arguments.data,
        out=arguments.out,
        console=Console(stderr=True),
    )
    _tables.write_csv(arguments.out / "robustness.csv", rows)
    baselines = [(names[0], "mean"), (names[0], "dropout")]
    header = [
        "situation",
        "config, prediction",
        "measure",
        "mean ± 95 %",
        *(f"– {config}, {method} (p)" for config, method in baselines),
    ]
    text = _tables.markdown(header, compare(rows, baselines, list(MEASURES)))
    write_bytes(arguments.out / "robustness.md", text.encode())
    for name in MEASURES:
        if any(row[name] is not None for row in rows):
            figure = plot(rows, name)
            figure.savefig(arguments.out / f"robustness-{name}.png", dpi=120)
    print(text)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
