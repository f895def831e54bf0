"""The runs of a demo: one per core at a time, and the console shows which."""

import os
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console

from bayesattn.files import RunError
from bayesattn_recipes.common.parallel import run_all
from bayesattn_recipes.common.progress import show_runs


def run_side_by_side(
    function: Callable[..., Any],
    work: Mapping[str, tuple[Any, ...]],
    console: Console,
    on_end: Callable[[str], Any] = lambda name: None,
) -> None:
    """Call `function(*arguments)` for every entry; each call computes with one thread and writes its own files.

    Args:
        function: A function of a module, which other processes can import.
        work: Arguments by name; the names are shown.
        console: Where to show progress.
        on_end: Called with the name of an entry that has finished or failed.

    Raises:
        RunError: A call failed.
    """

    def end(name: str) -> None:
        display.end(name)
        on_end(name)

    with show_runs(console, len(work)) as display:
        outcome = run_all(
            function,
            work,
            num_processes=min(len(work), os.cpu_count() or 1),
            on_begin=display.begin,
            on_end=end,
        )
    if outcome.failures:
        raise RunError(f"the demo is not complete: {outcome.reasons()}\n\n{next(iter(outcome.failures.values()))}")
