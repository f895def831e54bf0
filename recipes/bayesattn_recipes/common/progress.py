"""Progress of several runs: a bar in a terminal, lines in a file."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress

from bayesattn.cli.progress import progress


class RunDisplay:
    """Shows which run of a table is in progress: a bar in a terminal, a line per run in a file.

    Args:
        console: Where to print.
        total: Runs of the table.
        bar: Bar of a terminal.
    """

    def __init__(self, console: Console, total: int, bar: Progress | None) -> None:
        self.console, self.total, self.bar = console, total, bar
        self.task = None if bar is None else bar.add_task("", total=total)

    def begin(self, name: str, done: int) -> None:
        """Show that a run begins after `done` others."""
        if self.bar is None or self.task is None:
            self.console.print(f"{name}: run {done + 1} of {self.total}", soft_wrap=True, highlight=False, markup=False)
        else:
            self.bar.update(self.task, description=name)

    def advance(self, done: float | int) -> None:
        """Show how many runs are done, with a fraction for the current one."""
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, completed=done)


@contextmanager
def show_runs(console: Console, total: int) -> Iterator[RunDisplay]:
    """Open a display for the runs of a table."""
    if not console.is_terminal:
        yield RunDisplay(console, total, None)
        return
    with progress(console) as bar:
        yield RunDisplay(console, total, bar)
