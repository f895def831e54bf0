"""The settings a search looks at: the same dropouts and weight decays for every kind of network, noise and prior on top."""

import itertools
import random
from dataclasses import dataclass
from typing import Any

from bayesattn.recipes.graph.train import GraphConfig, load_config

POINTS = 8
# of a round, for all kinds
ROUNDS: list[dict[str, Any]] = [
    {"learning_rate": 0.01, "head_dim": 16, "kept_by": "both"},
    {"learning_rate": 0.01, "head_dim": 16, "kept_by": "nll"},
    {"learning_rate": 0.005, "head_dim": 8, "kept_by": "nll"},
]


@dataclass(frozen=True)
class Grid:
    """Where a round looks.

    Attributes:
        shared: Settings of all kinds; the round takes `POINTS` of their combinations.
        own: Further settings by kind; `kl_weight` is of the loss per label, and the config's is per graph.
    """

    shared: dict[str, list[Any]]
    own: dict[str, dict[str, list[Any]]]


# the first round looks everywhere, the others where it was best on the validation nodes of the first four graphs
BROAD = Grid(
    {"dropout": [0.0, 0.1, 0.2, 0.4, 0.6, 0.8], "weight_decay": [5e-5, 5e-4, 2e-3, 5e-3]},
    {
        "soft": {},
        "nokl": {"attention.weibull_k": [0.3, 0.5, 1.0, 2.0, 5.0]},
        "wc": {
            "attention.weibull_k": [0.3, 0.5, 1.0, 2.0, 5.0],
            "attention.gamma_beta": [0.1, 1.0],
            "kl_weight": [0.01, 0.1, 1.0],
        },
    },
)
FINE = Grid(
    {"dropout": [0.2, 0.4, 0.5, 0.6], "weight_decay": [5e-4, 2e-3]},
    {
        "soft": {},
        "nokl": {"attention.weibull_k": [0.3, 0.5, 1.0]},
        "wc": {"attention.weibull_k": [0.3, 0.5, 1.0], "attention.gamma_beta": [0.1], "kl_weight": [0.3, 1.0, 3.0]},
    },
)
KINDS = tuple(BROAD.own)
NAMES = (*ROUNDS[0], *BROAD.shared, *BROAD.own["wc"])
FIXED: dict[str, dict[str, Any]] = {
    "soft": {},
    "nokl": {},
    "wc": {"attention.preset": "default", "attention.prior_hidden_dim": 5, "prior_scope": "neighbourhood"},
}


def draw_points(kind: str, number: int) -> list[dict[str, Any]]:
    """Return the settings of a round; those that kinds share are the same for all of them."""
    grid = FINE if number else BROAD
    pairs = [dict(zip(grid.shared, values)) for values in itertools.product(*grid.shared.values())]
    # a string seeds Python's generator alike everywhere
    pairs = random.Random("pairs 0").sample(pairs, len(pairs))[:POINTS]
    own = random.Random(f"{kind} {number}")
    return [
        {**ROUNDS[number], **pair, **{name: own.choice(values) for name, values in grid.own[kind].items()}} for pair in pairs
    ]


def point_config(name: str, kind: str, point: dict[str, Any], num_labels: int) -> GraphConfig:
    """Return the config of a setting, on the base of the data set's own."""
    values = {**FIXED[kind], **point}
    if "kl_weight" in values:
        values["training.kl_schedule.final"] = values.pop("kl_weight") * num_labels
    return load_config(f"{name}-{kind}", [f"{key}={value}" for key, value in values.items()])
