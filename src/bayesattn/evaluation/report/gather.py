"""Read run folders and line them up: one series for every run and method, one group for series that differ only by seed.

Tables and legends call a group by a label that is short, and unique among the groups compared.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesattn.evaluation.aggregate import Summary, over_runs
from bayesattn.evaluation.report.names import method_name
from bayesattn.evaluation.runs import METRICS_FILE, METRICS_SCHEMA, Predictions, read_predictions, read_run
from bayesattn.files import RunError, read_json
from bayesattn.metrics import PredictionTable, tabulate_predictions

# how many config values a label has at most, unless more are needed to tell runs apart, and how long each may be
SHOWN_VALUES, SHOWN_LETTERS = 2, 24
MISSING = "–"


@dataclass(frozen=True)
class Run:
    """One run folder, read."""

    folder: Path
    run: dict[str, Any]
    metrics: dict[str, Any]
    predictions: Predictions


@dataclass(frozen=True)
class Group:
    """Runs that differ only by their seed, predicted with one method.

    Attributes:
        label: Name of the group in tables and figures.
        method: How predictions were drawn.
        runs: Its runs.
    """

    label: str
    method: str
    runs: list[Run]

    @property
    def recipe(self) -> str:
        """The recipe of its runs."""
        return self.runs[0].run["recipe"]

    @property
    def num_samples(self) -> int:
        """Draws per prediction."""
        return self.runs[0].metrics["methods"][self.method]["num_samples"]

    def splits(self) -> list[str]:
        """Return the splits that every run of the group has."""
        others = [run.predictions.splits for run in self.runs]
        return [name for name in others[0] if all(name in splits for splits in others)]

    def metric(self, split: str, name: str) -> Summary | None:
        """Return a metric over the group's runs; the interval is over seeds, or the bootstrap's for a single run."""
        found = [run.metrics["methods"][self.method]["splits"][split]["metrics"].get(name) for run in self.runs]
        if any(metric is None for metric in found):
            return None
        if len(found) == 1:
            return Summary(found[0]["value"], found[0]["low"], found[0]["high"], 1)
        return over_runs([metric["value"] for metric in found])

    def pooled_samples(self, split: str) -> Tensor:
        """Return the draws of all runs, their examples one after the other."""
        return torch.cat([run.predictions.splits[split].samples[self.method] for run in self.runs], dim=1)

    def pooled_table(self, split: str) -> PredictionTable:
        """Return one row of numbers per prediction, all runs one after the other; only for splits with labels."""
        labels = [run.predictions.splits[split].labels for run in self.runs]
        return self.tabulate(self.pooled_samples(split), torch.cat([part for part in labels if part is not None]))

    def tables(self, split: str) -> list[PredictionTable]:
        """Return one row of numbers per prediction, for every run; only for splits with labels."""
        parts = [run.predictions.splits[split] for run in self.runs]
        return [self.tabulate(part.samples[self.method], part.labels) for part in parts if part.labels is not None]

    def tabulate(self, samples: Tensor, labels: Tensor) -> PredictionTable:
        """Return one row of numbers per prediction, with the task and the test of the group's runs."""
        predictions = self.runs[0].predictions
        return tabulate_predictions(samples, labels, task=predictions.task, test=predictions.test)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read run folders that have been evaluated.

    Raises:
        RunError: A folder is not a run, was not evaluated, or its files do not belong together.
    """
    if not folders:
        raise ValueError("folders must name at least one run folder, got none")
    counts = Counter(folder.resolve() for folder in folders)
    for folder in folders:
        # the same run twice would pass for a second seed
        if counts[folder.resolve()] > 1:
            raise ValueError(f"{folder} is given {counts[folder.resolve()]} times. Give each run once")
    runs = []
    for folder in folders:
        run, predictions = read_run(folder), read_predictions(folder)
        metrics = read_json(folder / METRICS_FILE, METRICS_SCHEMA)
        measured = {(method, split) for method, result in metrics["methods"].items() for split in result["splits"]}
        predicted = {(method, split) for method in predictions.methods for split in predictions.splits}
        if measured != predicted:
            raise RunError(
                f"{folder}: {METRICS_FILE} does not belong to these predictions; run `bayesattn evaluate {folder}` again"
            )
        runs.append(Run(folder, run, metrics, predictions))
    return runs


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Group runs by recipe, config without its seed, and method, in the order given."""
    same: dict[str, list[Run]] = {}
    for run in runs:
        key = json.dumps([run.run["recipe"], flat(run.run["config"])], sort_keys=True)
        same.setdefault(key, []).append(run)
    labels = row_labels([members[0].run for members in same.values()])
    groups = []
    for label, members in zip(labels, same.values()):
        methods = [
            method for method in members[0].predictions.methods if all(method in m.predictions.methods for m in members)
        ]
        groups += [Group(f"{label}, {method_name(method)}", method, members) for method in methods]
    return groups


def row_labels(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Return a label for each run, given its `run.json`: variant, recipe if there are several, and what differs besides.

    A label has the config values that make it unique, or `SHOWN_VALUES` if fewer do; the rest is counted.
    """
    is_mixed = len({run["recipe"] for run in runs}) > 1
    same: dict[tuple[str, str], list[int]] = {}
    for index, run in enumerate(runs):
        same.setdefault((run["recipe"], run["variant"]), []).append(index)
    labels = [""] * len(runs)
    for (recipe, variant), members in same.items():
        differences = _differences([flat(runs[index]["config"]) for index in members])
        for index, words in zip(members, differences):
            labels[index] = " ".join([*([recipe] if is_mixed else []), variant, *words])
    return labels


def _differences(configs: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return words for what differs between configs, no two of which are the same."""
    columns = {key: _texts([config.get(key, MISSING) for config in configs]) for config in configs for key in config}
    differing = [key for key, column in columns.items() if len(set(column)) > 1]
    # words, such as the name of a data set or a task, say more than numbers
    differing.sort(key=lambda key: not any(isinstance(config.get(key), str) for config in configs))

    def count(keys: Sequence[str]) -> int:
        return len(set(zip(*(columns[key] for key in keys)))) if keys else 1

    chosen: list[str] = []
    while differing and (count(chosen) < len(configs) or len(chosen) < SHOWN_VALUES):
        chosen.append(max(differing, key=lambda key: count([*chosen, key])))
        differing.remove(chosen[-1])
    # the last part of a name is enough where no other ends like it
    parts = [key.rpartition(".")[2] for key in chosen]
    names = [part if parts.count(part) == 1 else key for key, part in zip(chosen, parts)]
    more = [f"+{len(differing)} more"] if differing else []
    return [[*(f"{name}={columns[key][i]}" for key, name in zip(chosen, names)), *more] for i in range(len(configs))]


def _texts(values: Sequence[Any]) -> list[str]:
    """Return the values of one key as short texts, or as long ones where short ones would look the same."""
    exact = [MISSING if value is MISSING else json.dumps(value, sort_keys=True, ensure_ascii=False) for value in values]
    plain = [f"{value:g}" if isinstance(value, float) else str(value) for value in values]
    # both ends of a path are informative
    half = SHOWN_LETTERS // 2
    short = [text if len(text) <= SHOWN_LETTERS else f"{text[:half]}…{text[-half:]}" for text in plain]
    return short if len(set(short)) == len(set(exact)) else exact


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested config as dotted names and values, without the seed."""
    values: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            values |= flat(value, f"{prefix}{key}.")
        elif prefix or key != "seed":
            values[f"{prefix}{key}"] = value
    return values
