"""The runs behind a table: every variant of a data set with several seeds, trained and measured once, then read.

All tables store their runs in the same way: `runs/DATASET-VARIANT-SEED` is a run folder, and
`cells/DATASET-VARIANT-SEED.json` holds its measures with the settings they depend on.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

from bayesattn.cli.registry import Request
from bayesattn.files import RunError
from bayesattn_recipes.common.cells import run_cells
from bayesattn_recipes.common.parallel import Outcome

Name = TypeVar("Name", bound=str)
RUNS_FOLDER = "runs"


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


class Run(NamedTuple):
    """What identifies a run."""

    dataset: str
    variant: str
    seed: int

    @property
    def name(self) -> str:
        """Name of its folder and of its cell."""
        return f"{self.dataset}-{self.variant}-{self.seed}"


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

    def all(self) -> list[Run]:
        """Return every run."""
        return [Run(self.dataset, variant, seed) for variant, count in self.num_seeds.items() for seed in range(count)]


def run_plans(
    request: Request,
    plans: Sequence[Runs[AnyWork]],
    *,
    is_strict: bool = False,
    on_missing: Callable[[Sequence[Runs[AnyWork]]], Any] = lambda plans: None,
) -> tuple[dict[str, dict[str, dict[int, dict[str, Any]]]], Outcome]:
    """Train and measure the runs that are not finished, seed by seed, so an interrupted experiment has complete pairs.

    Args:
        request: Where the runs go, how many at the same time, and until when.
        plans: The runs of every data set.
        is_strict: Whether an error ends the work of a single process; otherwise the other runs continue.
        on_missing: Called before the first run, with the plans that have runs missing.

    Returns:
        The measures of the finished runs, by data set, variant and seed; and what became of those that were missing.

    Raises:
        RunError: A finished run has other settings.
    """
    by_name = {plan.dataset: plan for plan in plans}
    # a stable sort: within a seed, the order of the table
    runs = sorted(itertools.chain.from_iterable(plan.all() for plan in plans), key=attrgetter("seed"))

    def arguments(missing: list[Run]) -> list[tuple[Any, ...]]:
        on_missing([plan for plan in plans if any(run.dataset == plan.dataset for run in missing)])
        return [(by_name[run.dataset].work, run, request.out / RUNS_FOLDER / run.name) for run in missing]

    cells, outcome = run_cells(
        request,
        {run.name: run for run in runs},
        lambda run: by_name[run.dataset].work.identity(run.variant, run.seed),
        _measure,
        arguments,
        module=type(plans[0].work).__module__,
        is_strict=is_strict,
        has_steps=True,
    )
    found = {}
    for plan in plans:
        measured = {variant: {} for variant in plan.num_seeds}
        for run in plan.all():
            if run in cells:
                measured[run.variant][run.seed] = cells[run]
        found[plan.dataset] = {variant: by_seed for variant, by_seed in measured.items() if by_seed}
    return found, outcome


def _measure(
    work: Work, run: Run, folder: Path, on_progress: Callable[[int, int], Any] = lambda done, total: None
) -> dict[str, Any]:
    return work.run(run.variant, run.seed, folder, on_progress)


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
    found = run_plans(request, [Runs(dataset, work, dict.fromkeys(variants, request.num_seeds))], is_strict=True)[0][dataset]
    if not found or (required is not None and required not in found):
        what = f"run on {dataset}" if required is None else f"run of {dataset}-{required}"
        raise RunError(f"no {what} has finished. Run the same command with more minutes to continue")
    return found
