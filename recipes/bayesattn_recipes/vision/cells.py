"""The runs behind a table of one data set: every variant with several seeds, trained once, read ever after."""

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from bayesattn.cli.progress import show_runs
from bayesattn.evaluation.runs import RunError

Name = TypeVar("Name", bound=str)
# measures of a run by variant and seed
Cells = dict[str, dict[int, dict[str, Any]]]


def at_hand(names: Sequence[Name], data: Path | None) -> list[Name]:
    """Return the data sets that can be read: `shapes`, which is generated, and those with a folder in `data`."""
    return [name for name in names if name == "shapes" or (data is not None and (data / name).is_dir())]


def collect(
    title: str,
    variants: Sequence[str],
    num_seeds: int,
    *,
    read: Callable[[str, int], dict[str, Any] | None],
    run: Callable[[str, int, Callable[[int, int], Any]], dict[str, Any]],
    deadline: float,
    console: Console,
) -> Cells:
    """Return the measures of every variant and seed: what is known is read, the rest trained while there is time.

    Args:
        title: Of the data set, for the progress display.
        variants: Rows of the table.
        num_seeds: Runs per variant.
        read: Returns what an earlier call measured of a variant and seed, or None.
        run: Trains and measures one; calls its last argument with the steps done and to do.
        deadline: No run begins later, in seconds of `time.monotonic`.
        console: Where to show progress.

    Raises:
        RunError: Nothing has been measured yet, and there was no time for a run.
    """
    cells: Cells = {variant: {} for variant in variants}
    with show_runs(console, len(variants) * num_seeds) as display:
        # seed by seed: an interrupted experiment has complete pairs
        for done, (seed, variant) in enumerate(itertools.product(range(num_seeds), variants)):
            cell = read(variant, seed)
            if cell is None and time.monotonic() < deadline:
                display.begin(f"{title}-{variant}-{seed}", done)
                cell = run(variant, seed, lambda step, steps, done=done: display.advance(done + step / steps))
            if cell is not None:
                cells[variant][seed] = cell
            display.advance(done + 1)
    found = {variant: by_seed for variant, by_seed in cells.items() if by_seed}
    if not found:
        raise RunError(f"no run on {title} has finished; the same command with more minutes goes on")
    return found


def deadline_after(minutes: float | None) -> float:
    """Return when the last run may begin, in seconds of `time.monotonic`."""
    return float("inf") if minutes is None else time.monotonic() + 60.0 * minutes
