"""The runs behind a table: every variant of a data set with several seeds, trained and measured once, read ever after.

All tables keep their runs alike: `runs/DATASET-VARIANT-SEED` is a run folder, `cells/DATASET-VARIANT-SEED.json` its measures
with the settings they depend on.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from rich.console import Console

from bayesattn.cli.progress import show_runs
from bayesattn.evaluation.runs import RunError
from bayesattn_recipes.common.tables import read_cell, write_cell

Name = TypeVar("Name", bound=str)
CELLS_FOLDER, RUNS_FOLDER = "cells", "runs"


@runtime_checkable
class Work(Protocol):
    """What a recipe says about the runs of one data set."""

    def identity(self, variant: str, seed: int) -> dict[str, Any]:
        """Return what the measures of a run depend on, as plain values."""
        ...

    def run(self, variant: str, seed: int, folder: Path, on_progress: Callable[[int, int], Any]) -> dict[str, Any]:
        """Train a run in its folder, or go on with it, and return its measures."""
        ...


def at_hand(names: Sequence[Name], data: Path | None) -> list[Name]:
    """Return the data sets that can be read: `shapes`, which is generated, and those with a folder in `data`."""
    return [name for name in names if name == "shapes" or (data is not None and (data / name).is_dir())]


def deadline_after(minutes: float | None) -> float:
    """Return when the last run may begin, in seconds of `time.monotonic`."""
    return float("inf") if minutes is None else time.monotonic() + 60.0 * minutes


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
) -> dict[str, dict[int, dict[str, Any]]]:
    """Return the measures of every variant and seed: what is known is read, the rest trained while there is time.

    Args:
        dataset: Of the table.
        variants: Its rows.
        num_seeds: Runs per variant.
        work: The recipe's.
        out: Folder of the table.
        deadline: No run begins later, in seconds of `time.monotonic`.
        console: Where to show progress.
        required: A variant without which there is no table.

    Raises:
        RunError: Nothing, or nothing of the required variant, has been measured yet, and there was no time for a run.
    """
    cells: dict[str, dict[int, dict[str, Any]]] = {variant: {} for variant in variants}
    with show_runs(console, len(variants) * num_seeds) as display:
        # seed by seed: an interrupted experiment has complete pairs
        for done, (seed, variant) in enumerate(itertools.product(range(num_seeds), variants)):
            name = f"{dataset}-{variant}-{seed}"
            path, identity = out / CELLS_FOLDER / f"{name}.json", work.identity(variant, seed)
            cell = read_cell(path, identity)
            if cell is None and time.monotonic() < deadline:
                display.begin(name, done)
                advance = _advance(display, done)
                cell = work.run(variant, seed, out / RUNS_FOLDER / name, advance)
                write_cell(path, identity, cell)
            if cell is not None:
                cells[variant][seed] = cell
            display.advance(done + 1)
    found = {variant: by_seed for variant, by_seed in cells.items() if by_seed}
    if not found or (required is not None and required not in found):
        what = f"run on {dataset}" if required is None else f"run of {dataset}-{required}"
        raise RunError(f"no {what} has finished; the same command with more minutes goes on")
    return found


def _advance(display: Any, done: int) -> Callable[[int, int], Any]:
    return lambda step, steps: display.advance(done + step / steps)
