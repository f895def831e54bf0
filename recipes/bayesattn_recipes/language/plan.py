"""Which runs a table needs, and which are finished.

One training run serves several rows: a model trained with soft attention is also predicted with MC dropout and with noise
tuned afterwards, and three of them make an ensemble.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bayesattn.evaluation.runs import RUN_FILE
from bayesattn_recipes.common.tables import read_cell
from bayesattn_recipes.language.prepare import Prepared, Split, make_split
from bayesattn_recipes.language.shifts import shifted_splits
from bayesattn_recipes.language.tasks import find_task
from bayesattn_recipes.language.train import LanguageConfig, load_config, prepare_run

NUM_SAMPLES = 20
ENSEMBLE_SIZE = 3

# row of the table: variant it is trained with, how it is drawn (None: not at all)
ROWS: dict[str, tuple[str, str | None]] = {
    "soft": ("soft", None),
    "dropout": ("soft", "dropout"),
    "post-hoc": ("soft", "post-hoc"),
    "ensemble": ("soft", "ensemble"),
    "BAM-NOKL": ("BAM-NOKL", "attention"),
    "BAM-LF": ("BAM-LF", "attention"),
    "BAM-LC": ("BAM-LC", "attention"),
    "BAM-WF": ("BAM-WF", "attention"),
    "BAM-WC": ("BAM-WC", "attention"),
    "BAM-WC+dropout": ("BAM-WC", "attention+dropout"),
}
# rows that a kind of task cannot have: tuning needs class labels, and members of an ensemble differ in their candidates
_NOT_FOR = {"regression": ("post-hoc",), "spans": ("post-hoc", "ensemble")}


@dataclass(frozen=True)
class Job:
    """One training run and the rows it serves.

    Attributes:
        name: Of the config.
        config: With variant and seed set.
        methods: How it is drawn.
        data: The data folder.
        noise: Strengths of the shifted test sets.
        out: Folder of the table.
    """

    name: str
    config: LanguageConfig
    methods: tuple[str, ...]
    data: Path | None
    noise: tuple[float, ...]
    out: Path

    @property
    def folder(self) -> Path:
        """Where the run goes."""
        return self.out / "runs" / f"{self.name}-{self.config.attention.variant}-{self.config.seed}"

    @property
    def identity(self) -> dict[str, Any]:
        """What the numbers depend on."""
        return {"config": dataclasses.asdict(self.config), "noise": list(self.noise), "num_samples": NUM_SAMPLES}

    def cell_path(self, method: str) -> Path:
        """Where the measures of one method go."""
        variant, seed = self.config.attention.variant, self.config.seed
        return self.out / "cells" / f"{self.name}-{variant}-{method}-{seed}.json"

    def read(self, method: str) -> dict[str, Any] | None:
        """Return the measures of one method, None where they are missing; of other settings they are an error."""
        return read_cell(self.cell_path(method), self.identity) if (self.folder / RUN_FILE).is_file() else None

    def is_finished(self) -> bool:
        """Whether the run is there with all that its rows need."""
        return all(self.read(method) is not None for method in self.methods)


@dataclass(frozen=True)
class Plan:
    """The part of a table that belongs to one config: its rows and seeds, and the runs behind them."""

    name: str
    configs: dict[str, LanguageConfig]
    rows: tuple[str, ...]
    num_seeds: int
    data: Path | None
    noise: tuple[float, ...]
    out: Path

    @property
    def task(self) -> str:
        """Name of the task."""
        return next(iter(self.configs.values())).task

    def job(self, variant: str, seed: int, methods: Iterable[str] = ()) -> Job:
        """Return one run."""
        config = dataclasses.replace(self.configs[variant], seed=seed)
        return Job(self.name, config, tuple(methods), self.data, self.noise, self.out)

    def prepare(self) -> tuple[Prepared, dict[str, Split]]:
        """Return the data of all runs, and what their models are asked about: validation, test and shifted test sets."""
        config = next(iter(self.configs.values()))
        prepared = prepare_run(config, self.data)
        shifted = shifted_splits(prepared.task, prepared.sources["test"], self.noise, self.data)
        splits = {name: prepared.splits[name] for name in ("validation", "test")} | {
            name: make_split(prepared.task, prepared.tokenizer, found, config.max_length) for name, found in shifted.items()
        }
        return prepared, splits

    def jobs(self) -> list[Job]:
        """Return the runs that the rows need; rows of one trained variant share its runs."""
        needed: dict[tuple[str, int], dict[str, None]] = {}
        for row in self.rows:
            variant, method = ROWS[row]
            for seed in self.seeds(row):
                for member in members(seed) if method == "ensemble" else [seed]:
                    found = needed.setdefault((variant, member), {"mean": None})
                    if method not in (None, "ensemble"):
                        found[str(method)] = None
        return [self.job(variant, seed, methods) for (variant, seed), methods in needed.items()]

    def seeds(self, row: str) -> range:
        """Return the seeds of a row: five runs make three ensembles of three that follow one another."""
        return range(self.num_seeds if row != "ensemble" else max(self.num_seeds - ENSEMBLE_SIZE + 1, 1))


def make_plan(
    name: str,
    rows: Sequence[str],
    num_seeds: int,
    settings: Sequence[str],
    data: Path | None,
    noise: tuple[float, ...],
    out: Path,
) -> Plan:
    """Return the part of the table that belongs to a config; rows that its kind of task cannot have are left out."""
    base = load_config(name, settings)
    possible = tuple(row for row in rows if row not in _NOT_FOR.get(find_task(base.task).kind, ()))
    variants = dict.fromkeys(ROWS[row][0] for row in possible)
    configs = {v: dataclasses.replace(base, attention=dataclasses.replace(base.attention, variant=v)) for v in variants}
    return Plan(name, configs, possible, num_seeds, data, noise, out)


def in_order(plans: Iterable[Plan]) -> list[Job]:
    """Return the unfinished runs, seed by seed: where the time ends early, the tables still compare like with like."""
    todo = [job for plan in plans for job in plan.jobs() if not job.is_finished()]
    return sorted(todo, key=lambda job: job.config.seed)


def members(seed: int) -> list[int]:
    """Return the seeds of an ensemble's members."""
    return list(range(seed, seed + ENSEMBLE_SIZE))
