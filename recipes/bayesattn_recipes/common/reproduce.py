"""The runs behind a table: every variant of a data set with several seeds, trained and measured once, then read.

All tables store their runs in the same way: `runs/DATASET-VARIANT-SEED` is a run folder, and
`cells/DATASET-VARIANT-SEED.json` holds its measures with the settings they depend on.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from bayesattn.cli.registry import Request
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
    request: Request,
    plans: Sequence[Runs[AnyWork]],
    *,
    is_strict: bool = False,
    on_missing: Callable[[Sequence[Runs[AnyWork]]], Any] = lambda plans: None,
) -> Outcome:
    """Train and measure the runs that are not finished, seed by seed, so an interrupted experiment has complete pairs.

    Args:
        request: Where the runs go, how many at the same time, and until when.
        plans: The runs of every data set.
        is_strict: Whether an error ends the work; otherwise the other runs continue, and its traceback is in `failures`.
        on_missing: Called before the first run, with the plans that have runs missing.

    Raises:
        RunError: A finished run has other settings.
    """
    out = request.out
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
    with show_runs(request.console, done + len(work)) as display:

        def run_here(*given: Any) -> None:
            place = next(running)
            run_one(*given, on_progress=lambda step, steps: display.advance(place + step / steps))

        outcome = run_all(
            run_here if request.jobs == 1 else run_one,
            work,
            num_processes=request.jobs,
            deadline=request.deadline,
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
    request: Request, dataset: str, variants: Sequence[str], work: Work, *, required: str | None = None
) -> dict[str, dict[int, dict[str, Any]]]:
    """Return the measures of every variant and seed: finished runs are read, the rest are trained while there is time.

    Args:
        request: What was asked for. With several jobs, a run that fails does not end the others.
        dataset: Data set of the table.
        variants: Its rows.
        work: The recipe's part.
        required: A variant without which there is no table.

    Raises:
        RunError: Nothing, or nothing of the required variant, has been measured yet, and there was no time for a run.
    """
    plan = Runs(dataset, work, dict.fromkeys(variants, request.num_seeds))
    run_missing(request, [plan], is_strict=request.jobs == 1)
    found = plan.read(request.out)
    if not found or (required is not None and required not in found):
        what = f"run on {dataset}" if required is None else f"run of {dataset}-{required}"
        raise RunError(f"no {what} has finished. Run the same command with more minutes to continue")
    return found
