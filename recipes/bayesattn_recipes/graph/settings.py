"""The settings a search looks at: as many for every kind of network."""

import itertools
import random
from typing import Any

from bayesattn_recipes.graph.train import GraphConfig, load_config

POINTS = 8
# of a round, for all kinds
ROUNDS: list[dict[str, Any]] = [
    {"learning_rate": 0.01, "head_dim": 16, "kept_by": "both", "training.epochs": 400},
    {"learning_rate": 0.01, "head_dim": 16, "kept_by": "nll", "training.epochs": 400},
    {"learning_rate": 0.01, "head_dim": 16, "kept_by": "nll", "training.epochs": 200},
]


# the first round looks everywhere: `POINTS` random pairs of dropout and weight decay, the same for all kinds, and for each
# pair noise and prior at random; `kl_weight` is of the loss per label, and the config's is per graph
SHARED = {"dropout": [0.0, 0.1, 0.2, 0.4, 0.6, 0.8], "weight_decay": [5e-5, 5e-4, 2e-3, 5e-3]}
OWN: dict[str, dict[str, list[float]]] = {
    "soft": {},
    "nokl": {"attention.weibull_k": [0.3, 0.5, 1.0, 2.0, 5.0]},
    "wc": {
        "attention.weibull_k": [0.3, 0.5, 1.0, 2.0, 5.0],
        "attention.gamma_beta": [0.1, 1.0],
        "kl_weight": [0.01, 0.1, 1.0],
    },
}
# the others look where it was best: every dropout with two weight decays (soft) or with two sizes of the noise (BAM)
DROPOUTS = [0.2, 0.4, 0.5, 0.6]
FINE: dict[str, dict[str, list[float]]] = {
    "soft": {"dropout": DROPOUTS, "weight_decay": [5e-4, 2e-3]},
    "nokl": {"dropout": DROPOUTS, "weight_decay": [5e-4], "attention.weibull_k": [0.5, 1.0]},
    "wc": {
        "dropout": DROPOUTS,
        "weight_decay": [5e-4],
        "attention.weibull_k": [0.5, 1.0],
        "attention.gamma_beta": [0.1],
        "kl_weight": [1.0],
    },
}
KINDS = tuple(OWN)
NAMES = (*ROUNDS[0], *SHARED, *OWN["wc"])
FIXED: dict[str, dict[str, Any]] = {
    "soft": {},
    "nokl": {},
    "wc": {"attention.preset": "default", "attention.prior_hidden_dim": 5, "prior_scope": "neighbourhood"},
}


def draw_points(kind: str, number: int) -> list[dict[str, Any]]:
    """Return the settings of a round."""
    if number:
        return [{**ROUNDS[number], **point} for point in _combinations(FINE[kind])][:POINTS]
    pairs = _combinations(SHARED)
    # a string seeds Python's generator alike everywhere
    pairs = random.Random("pairs 0").sample(pairs, len(pairs))[:POINTS]
    own = random.Random(f"{kind} {number}")
    return [{**ROUNDS[number], **pair, **{name: own.choice(values) for name, values in OWN[kind].items()}} for pair in pairs]


def _combinations(grid: dict[str, list[float]]) -> list[dict[str, float]]:
    return [dict(zip(grid, values)) for values in itertools.product(*grid.values())]


def point_config(name: str, kind: str, point: dict[str, Any], num_labels: int) -> GraphConfig:
    """Return the config of a setting, on the base of the data set's own."""
    values = {**FIXED[kind], **point}
    if "kl_weight" in values:
        values["training.kl_schedule.final"] = values.pop("kl_weight") * num_labels
    return load_config(f"{name}-{kind}", [f"{key}={value}" for key, value in values.items()])
