"""What a search tries: a grid of settings for every trained variant, and the trials that they make."""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bayesattn_recipes.language.train import LanguageConfig, load_config

# not those of the tables
FIRST_SEED = 100
NUM_SAMPLES = 20

_SPEED: dict[str, list[Any]] = {"training.learning_rate": [5e-5, 1e-4], "training.epochs": [3, 6]}
# by trained variant; a name with commas sets several values alike
GRIDS: dict[str, dict[str, list[Any]]] = {
    "soft": {**_SPEED, "dropout,attention_dropout,classifier_dropout": [0.1, 0.2]},
    "BAM-NOKL": {**_SPEED, "attention.weibull_k": [1, 0.5]},
    # a pretrained encoder's KL has a gradient 80 to 140 times the likelihood's, through the keys 500 times and more
    # (docs/results/language-gradient.json). With weights of 1e-3 and 1e-2, which were tried first, nearly all models said
    # the majority class of their task, whatever the text
    "BAM-WC": {
        "training.learning_rate": [5e-5],
        "training.epochs": [3, 6],
        "training.kl_schedule.final": [1e-6, 1e-5, 1e-4, 3e-4],
        "attention.detach_keys": ["true"],
    },
}


@dataclass(frozen=True)
class Trial:
    """One setting of a grid on one task with one seed.

    Attributes:
        variant: Whose grid.
        settings: Of the grid, `name=value`.
        config: All settings.
        out: Folder of the search.
    """

    variant: str
    settings: tuple[str, ...]
    config: LanguageConfig
    out: Path

    @property
    def name(self) -> str:
        """Names the trial's file."""
        values = "-".join(setting.partition("=")[2] for setting in self.settings)
        return f"{self.config.task}-{self.variant}-{values}-{self.config.seed}"

    @property
    def path(self) -> Path:
        """The trial's file."""
        return self.out / "cells" / f"{self.name}.json"

    @property
    def identity(self) -> dict[str, Any]:
        """What the numbers depend on."""
        return {"config": dataclasses.asdict(self.config), "num_samples": NUM_SAMPLES}


def grid_settings(grid: dict[str, list[Any]]) -> list[tuple[str, ...]]:
    """Return every combination of a grid as `name=value`."""
    return [
        tuple(f"{name}={value}" for names, value in zip(grid, values) for name in names.split(","))
        for values in itertools.product(*grid.values())
    ]


def trials(
    tasks: Sequence[str],
    variants: Sequence[str],
    num_seeds: int,
    settings: Sequence[str],
    out: Path,
    only: Sequence[str] = (),
    grid: dict[str, list[Any]] | None = None,
) -> list[Trial]:
    """Return all trials; the grids take turns, so that where the time ends early none has lost more than the others."""
    grids = [[(variant, found) for found in grid_settings(grid or GRIDS[variant])] for variant in variants]
    turns = [entry for entries in itertools.zip_longest(*grids) for entry in entries if entry is not None]
    chosen = [(variant, found) for variant, found in turns if set(only) <= set(found)]
    if not chosen:
        raise ValueError(f"only is {list(only)}, which no setting has; allowed, for instance: {' '.join(turns[0][1])}")
    return [
        Trial(
            variant, found,
            load_config(task, [*settings, f"attention.variant={variant}", *found, f"seed={FIRST_SEED + seed}"]), out,
        )
        for seed in range(num_seeds)
        for variant, found in chosen
        for task in tasks
    ]  # fmt: skip
