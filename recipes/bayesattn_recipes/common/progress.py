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
        done: Those that were finished before.
        bar: Bar of a terminal.
    """

    def __init__(self, console: Console, total: int, done: int, bar: Progress | None) -> None:
        self.console, self.total, self.begun, self.done, self.bar = console, total, done, done, bar
        self.task = None if bar is None else bar.add_task("", total=total, completed=done)

    def begin(self, name: str) -> None:
        """Show that a run begins."""
        self.begun += 1
        if self.bar is None or self.task is None:
            line = f"{name}: run {self.begun} of {self.total}"
            self.console.print(line, soft_wrap=True, highlight=False, markup=False)
        else:
            self.bar.update(self.task, description=name)

    def step(self, step: int, steps: int) -> None:
        """Show how far the only run in progress is."""
        self._show(self.done + step / steps)

    def end(self, name: str) -> None:
        """Show that a run has ended."""
        self.done += 1
        self._show(self.done)

    def _show(self, done: float) -> None:
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, completed=done)


@contextmanager
def show_runs(console: Console, total: int, done: int = 0) -> Iterator[RunDisplay]:
    """Open a display for the runs of a table, some of which are done."""
    if not console.is_terminal:
        yield RunDisplay(console, total, done, None)
        return
    with progress(console) as bar:
        yield RunDisplay(console, total, done, bar)
