"""Many training runs on one machine: several processes at a time, and one that fails does not end the others.

One run leaves a GPU mostly waiting for the host, so several at once finish sooner than one after the other.
The arguments of a call travel to its process, so data are read once, by the caller.
"""

import math
import os
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import forkserver, get_context
from pathlib import Path
from typing import Any

import torch

from bayesattn.files import write_bytes

# a process may be killed because others use too much memory, so its entry gets a second chance
TRIES = 2
# if nothing has finished yet, this many failures end the work: a wrong setting fails everywhere
MOST_FAILURES = 3
# environment variables of this project that later processes need
VARIABLES = "BAYESATTN_"


@dataclass
class Outcome:
    """The result of all entries.

    Attributes:
        done: Entries that finished.
        failures: Tracebacks of the entries that failed, by name.
        left: Entries that were not started.
    """

    done: list[str] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)

    def reasons(self) -> str:
        """Return one line: how many failed and were left, and why the first failed."""
        parts = []
        if self.failures:
            name, text = next(iter(self.failures.items()))
            parts.append(f"{len(self.failures)} failed, the first {name}: {text.strip().splitlines()[-1]}")
        if self.left:
            parts.append(f"{len(self.left)} were not started")
        return "; ".join(parts)

    def write_failures(self, folder: Path) -> None:
        """Write the tracebacks into a folder, one file each; those of entries that have finished since are removed."""
        for name in self.done:
            (folder / f"{name}.txt").unlink(missing_ok=True)
        for name, text in self.failures.items():
            write_bytes(folder / f"{name}.txt", text.encode())


def warm_up(preload: Sequence[str]) -> None:
    """Import these modules now, in the process that all others are forked from, while the caller goes on.

    It never touches a GPU, and importing takes seconds. May be called again.
    """
    forkserver.set_forkserver_preload(list(preload))
    forkserver.ensure_running()


def _set_up(threads: int, variables: dict[str, str]) -> None:
    """Give a new process its share of the cores, and variables set since its parent was started."""
    torch.set_num_threads(threads)
    os.environ.update(variables)


def run_all(
    function: Callable[..., Any],
    work: Mapping[str, tuple[Any, ...]],
    *,
    num_processes: int = 1,
    deadline: float = math.inf,
    is_strict: bool = False,
    on_begin: Callable[[str], Any] = lambda name: None,
    on_end: Callable[[str], Any] = lambda name: None,
) -> Outcome:
    """Call `function(*arguments)` for every entry, in their order; each call writes its own results.

    Args:
        function: With several processes, a function of a module, which they can import.
        work: Arguments by name.
        num_processes: Calls at the same time; 1 stays in this process.
        deadline: No call begins later, in seconds of `time.monotonic`; those that have begun are waited for.
        is_strict: Whether an error ends the work; only with one process.
        on_begin: Called with the name of an entry when its call begins.
        on_end: Called with the name of an entry that has finished or failed.
    """
    outcome = Outcome()
    if num_processes == 1 or len(work) < 2:
        _run_here(function, work, deadline, is_strict, outcome, on_begin, on_end)
    else:
        _run_in_processes(function, work, num_processes, deadline, outcome, on_begin, on_end)
    outcome.left = [name for name in work if name not in outcome.done and name not in outcome.failures]
    return outcome


def _may_begin(outcome: Outcome, deadline: float) -> bool:
    return time.monotonic() < deadline and (bool(outcome.done) or len(outcome.failures) < MOST_FAILURES)


def _run_here(function, work, deadline, is_strict: bool, outcome: Outcome, on_begin, on_end) -> None:
    for name, arguments in work.items():
        if not _may_begin(outcome, deadline):
            return
        on_begin(name)
        try:
            function(*arguments)
        except Exception:
            if is_strict:
                raise
            outcome.failures[name] = traceback.format_exc()
        else:
            outcome.done.append(name)
        on_end(name)


def _run_in_processes(function, work, num_processes: int, deadline, outcome: Outcome, on_begin, on_end) -> None:
    waiting = deque((name, 1) for name in work)
    forkserver.ensure_running()
    threads = max(torch.get_num_threads() // num_processes, 1)
    facts = (threads, {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)})
    while waiting and _may_begin(outcome, deadline):
        # a pool cannot be used again after one of its processes was killed; the next round makes another
        with ProcessPoolExecutor(num_processes, get_context("forkserver"), _set_up, facts) as pool:
            running: dict[Future, tuple[str, int]] = {}
            try:
                is_broken = False
                while running or (waiting and not is_broken and _may_begin(outcome, deadline)):
                    while waiting and not is_broken and len(running) < num_processes and _may_begin(outcome, deadline):
                        name, number = waiting[0]
                        try:
                            future = pool.submit(function, *work[name])
                        except BrokenProcessPool:
                            is_broken = True
                            break
                        running[future] = waiting.popleft()
                        on_begin(name)
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        name, number = running.pop(future)
                        error = future.exception()
                        is_broken = is_broken or isinstance(error, BrokenProcessPool)
                        if isinstance(error, BrokenProcessPool) and number < TRIES:
                            waiting.append((name, number + 1))
                            continue
                        if error is None:
                            outcome.done.append(name)
                        else:
                            outcome.failures[name] = "".join(traceback.format_exception(error))
                        on_end(name)
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
