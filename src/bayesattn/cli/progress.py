"""Progress in a terminal, and lines of progress in a file."""

import datetime
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text


class _Rate(ProgressColumn):
    """Steps per second, averaged by rich over the last half minute."""

    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:.3g}/s", style="progress.data.speed")


@contextmanager
def progress(console: Console | None = None) -> Iterator[Progress]:
    """Open a progress display with description, bar, count, rate and time left."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as display:
        yield display


def is_first_process() -> bool:
    """Whether this process prints and writes: it is the only one, or the first that a launcher started."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def show_steps(description: str, console: Console, every: float = 30.0) -> Iterator[Callable[[int, int], None]]:
    """Open a display for one count of steps, and yield the function to call with steps done and to do.

    A terminal shows a bar; a file gets an occasional line with the rate and the time left. If there are several processes,
    only the first shows it.

    Args:
        description: What is counted.
        console: Where to print.
        every: Seconds between two lines.
    """
    if not is_first_process():
        yield lambda done, total: None
        return
    if not console.is_terminal:
        yield _StepLines(description, console, every)
        return
    with progress(console) as display:
        task = display.add_task(description, total=None)

        def update(done: int, total: int) -> None:
            if display.tasks[task].total is None:
                # a resumed run does not begin at 0; steps done before do not count towards the rate
                display.reset(task, total=total, completed=done - 1)
            display.update(task, completed=done)

        yield update


class _StepLines:
    """Prints steps done, rate and time left, at most once per given number of seconds."""

    def __init__(self, description: str, console: Console, every: float) -> None:
        self.description, self.console, self.every = description, console, every
        self.first: tuple[float, int] | None = None
        self.last = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first = now, done
        elif now - self.last >= self.every and now > self.first[0]:
            self.last = now
            rate = (done - self.first[1]) / (now - self.first[0])
            left = datetime.timedelta(seconds=round((total - done) / rate)) if rate else "unknown time"
            line = f"{self.description}: step {done} of {total}, {rate:.3g}/s, {left} left"
            self.console.print(line, soft_wrap=True, highlight=False)
