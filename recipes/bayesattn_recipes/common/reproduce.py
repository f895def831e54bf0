"""The runs behind a table: every variant of a data set with several seeds, trained and measured once, then read.

All tables store their runs in the same way: `runs/DATASET-VARIANT-SEED` is a run folder, and
`cells/DATASET-VARIANT-SEED.json` holds its measures with the settings they depend on.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from rich.console import Console

from bayesattn.files import RunError
from bayesattn_recipes.common.parallel import Outcome, run_all
from bayesattn_recipes.common.progress import show_runs
from bayesattn_recipes.common.tables import read_cell, write_cell

Name = TypeVar("Name", bound=str)
CELLS_FOLDER, RUNS_FOLDER, FAILURES_FOLDER = "cells", "runs", "failures"


@runtime_checkable
class Work(Protocol):
    """The part of a recipe behind the runs of one data set."""

    def identity(self, variant: str, seed: int) -> dict[str, Any]:
        """Return what the measures of a run depend on, as plain values."""
        ...

    def run(self, variant: str, seed: int, folder: Path, on_progress: Callable[[int, int], Any]) -> dict[str, Any]:
        """Train a run in its folder, or continue it, and return its measures."""
        ...


def at_hand(names: Sequence[Name], data: Path | None) -> list[Name]:
    """Return the data sets that can be read: `shapes`, which is generated, and those with a folder in `data`."""
    return [name for name in names if name == "shapes" or (data is not None and (data / name).is_dir())]


def deadline_after(minutes: float | None) -> float:
    """Return when the last run may begin, in seconds of `time.monotonic`."""
    return float("inf") if minutes is None else time.monotonic() + 60.0 * minutes


AnyWork = TypeVar("AnyWork", bound=Work)


@dataclass(frozen=True)
class Runs(Generic[AnyWork]):
    """The runs of one data set.

    Attributes:
        dataset: Its name; folders and files begin with it.
        work: The recipe's part.
        num_seeds: Runs of every variant, with seeds 0, 1, …
    """

    dataset: str
    work: AnyWork
    num_seeds: Mapping[str, int]

    def all(self) -> Iterator[tuple[str, str, int]]:
        """Return name, variant and seed of every run."""
        return (
            (f"{self.dataset}-{variant}-{seed}", variant, seed)
            for variant, count in self.num_seeds.items()
            for seed in range(count)
        )

    def read(self, out: Path) -> dict[str, dict[int, dict[str, Any]]]:
        """Return the measures of the runs that are finished, by variant and seed."""
        found: dict[str, dict[int, dict[str, Any]]] = {variant: {} for variant in self.num_seeds}
        for name, variant, seed in self.all():
            cell = read_cell(cell_path(out, name), self.work.identity(variant, seed))
            if cell is not None:
                found[variant][seed] = cell
        return {variant: by_seed for variant, by_seed in found.items() if by_seed}


def cell_path(out: Path, name: str) -> Path:
    """Return where the measures of a run are kept."""
    return out / CELLS_FOLDER / f"{name}.json"


def run_missing(
    plans: Sequence[Runs[AnyWork]],
    out: Path,
    *,
    deadline: float,
    console: Console,
    jobs: int = 1,
    is_strict: bool = False,
    on_missing: Callable[[Sequence[Runs[AnyWork]]], Any] = lambda plans: None,
) -> Outcome:
    """Train and measure the runs that are not finished, seed by seed, so an interrupted experiment has complete pairs.

    Args:
        plans: The runs of every data set.
        out: Folder of the table.
        deadline: No run begins later, in seconds of `time.monotonic`.
        console: Where to show progress.
        jobs: Runs at the same time, each in a process of its own.
        is_strict: Whether an error ends the work; otherwise the other runs continue, and its traceback is in `failures`.
        on_missing: Called before the first run, with the plans that have runs missing.

    Raises:
        RunError: A finished run has other settings.
    """
    known = [plan.read(out) for plan in plans]
    todo = [
        (seed, name, variant, plan)
        for plan, cells in zip(plans, known)
        for name, variant, seed in plan.all()
        if seed not in cells.get(variant, {})
    ]
    if not todo:
        return Outcome()
    on_missing([plan for plan in plans if any(entry[-1] is plan for entry in todo)])
    # a stable sort: within a seed, the order of the table
    work = {name: (plan.work, variant, seed, name, out) for seed, name, variant, plan in sorted(todo, key=itemgetter(0))}
    done = sum(len(by_seed) for cells in known for by_seed in cells.values())
    begun, running, ended = itertools.count(done), itertools.count(done), itertools.count(done + 1)
    with show_runs(console, done + len(work)) as display:

        def run_here(*given: Any) -> None:
            place = next(running)
            run_one(*given, on_progress=lambda step, steps: display.advance(place + step / steps))

        outcome = run_all(
            run_here if jobs == 1 else run_one,
            work,
            num_processes=jobs,
            deadline=deadline,
            is_strict=is_strict,
            on_begin=lambda name: display.begin(name, next(begun)),
            on_end=lambda name: display.advance(next(ended)),
        )
    outcome.write_failures(out / FAILURES_FOLDER)
    return outcome


def run_one(
    work: Work,
    variant: str,
    seed: int,
    name: str,
    out: Path,
    on_progress: Callable[[int, int], Any] = lambda done, total: None,
) -> None:
    """Train and measure one run, and write its cell."""
    measures = work.run(variant, seed, out / RUNS_FOLDER / name, on_progress)
    write_cell(cell_path(out, name), work.identity(variant, seed), measures)


def collect(
    dataset: str,
    variants: Sequence[str],
    num_seeds: int,
    work: Work,
    out: Path,
    *,
    deadline: float,
    console: Console,
    required: str | None = None,
    jobs: int = 1,
) -> dict[str, dict[int, dict[str, Any]]]:
    """Return the measures of every variant and seed: finished runs are read, the rest are trained while there is time.

    Args:
        dataset: Data set of the table.
        variants: Its rows.
        num_seeds: Runs per variant.
        work: The recipe's part.
        out: Folder of the table.
        deadline: No run begins later, in seconds of `time.monotonic`.
        console: Where to show progress.
        required: A variant without which there is no table.
        jobs: Runs at the same time, each in its own process; one that fails then does not end the others.

    Raises:
        RunError: Nothing, or nothing of the required variant, has been measured yet, and there was no time for a run.
    """
    plan = Runs(dataset, work, dict.fromkeys(variants, num_seeds))
    run_missing([plan], out, deadline=deadline, console=console, jobs=jobs, is_strict=jobs == 1)
    found = plan.read(out)
    if not found or (required is not None and required not in found):
        what = f"run on {dataset}" if required is None else f"run of {dataset}-{required}"
        raise RunError(f"no {what} has finished. Run the same command with more minutes to continue")
    return found
