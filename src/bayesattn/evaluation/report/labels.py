"""What tables and legends call a model: short, and unique among the models compared."""

import json
from collections.abc import Sequence
from typing import Any

# how many config values a label has at most, unless more are needed to tell runs apart, and how long each may be
SHOWN_VALUES, SHOWN_LETTERS = 2, 24
MISSING = "–"


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
    """Return, for configs of which no two are the same, words for what differs between them."""
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
    # both ends of a path say something
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
