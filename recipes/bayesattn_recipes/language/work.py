"""Many trainings on one machine: several processes at a time, and one that fails does not take the others with it.

One training leaves a GPU mostly waiting for the host, so several of them at once finish sooner than one after the other.
Data are read and tokenised by the caller and travel with each entry of the work; a packed encoder is decompressed once.
"""

import os
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import forkserver, get_context
from pathlib import Path
from typing import Any

import torch

from bayesattn.evaluation.runs import write_bytes
from bayesattn_recipes.language.model import CACHE_VARIABLE, find_packed, packed_weights

# a process may be killed for what its neighbours do (memory), so its entry gets a second chance
TRIES = 2
# where nothing has worked so far, this many failures end the work: a wrong setting fails everywhere
HOPELESS = 3
# read once by the process that all others are forked from, which never touches a GPU; importing them takes seconds
PRELOADED = ["bayesattn_recipes.language.reproduce"]


@dataclass
class Outcome:
    """What became of the entries of some work.

    Attributes:
        done: Entries that finished.
        failures: Why the others did not, by name: the traceback.
        left: Entries that were not begun.
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
            parts.append(f"{len(self.left)} were not begun")
        return "; ".join(parts)

    def write_failures(self, folder: Path) -> None:
        """Write the tracebacks into a folder, one file each; those of entries that have finished since are removed."""
        for name in self.done:
            (folder / f"{name}.txt").unlink(missing_ok=True)
        for name, text in self.failures.items():
            write_bytes(folder / f"{name}.txt", text.encode())


def warm_up() -> None:
    """Let the imports of later processes begin now, beside whatever the caller does next; may be called again."""
    forkserver.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()


def _set_up(threads: int, cache: str | None) -> None:
    """Give a new process its share of the cores, and the folder of decompressed encoders, younger than its parent."""
    torch.set_num_threads(threads)
    if cache is not None:
        os.environ[CACHE_VARIABLE] = cache


def run_all(
    function: Callable[..., Any],
    work: Mapping[str, tuple[Any, ...]],
    *,
    num_processes: int = 1,
    minutes: float | None = None,
    on_begin: Callable[[str], Any] = lambda name: None,
    on_end: Callable[[str], Any] = lambda name: None,
) -> Outcome:
    """Call `function(*arguments)` for every entry, in their order; each call writes its own results.

    Args:
        function: Of a module, not a local one: other processes have to find it.
        work: Arguments by name.
        num_processes: Calls at the same time; 1 stays in this process.
        minutes: No call begins later than this; those that have begun are waited for.
        on_begin: Called with the name of an entry when its call begins.
        on_end: Called with the name of an entry that has finished or failed.
    """
    deadline = time.monotonic() + 60.0 * (float("inf") if minutes is None else minutes)
    outcome = Outcome()
    if num_processes == 1 or len(work) < 2:
        _run_here(function, work, deadline, outcome, on_begin, on_end)
    else:
        _run_in_processes(function, work, num_processes, deadline, outcome, on_begin, on_end)
    outcome.left = [name for name in work if name not in outcome.done and name not in outcome.failures]
    return outcome


def _may_begin(outcome: Outcome, deadline: float) -> bool:
    return time.monotonic() < deadline and (bool(outcome.done) or len(outcome.failures) < HOPELESS)


def _run_here(function, work, deadline, outcome: Outcome, on_begin, on_end) -> None:
    for name, arguments in work.items():
        if not _may_begin(outcome, deadline):
            return
        on_begin(name)
        try:
            function(*arguments)
        except Exception:
            outcome.failures[name] = traceback.format_exc()
        else:
            outcome.done.append(name)
        on_end(name)


def _run_in_processes(function, work, num_processes: int, deadline, outcome: Outcome, on_begin, on_end) -> None:
    waiting = deque((name, 1) for name in work)
    warm_up()
    threads = max(torch.get_num_threads() // num_processes, 1)
    facts = (threads, os.environ.get(CACHE_VARIABLE))
    while waiting and _may_begin(outcome, deadline):
        # a pool one of whose processes was killed is of no use any more; the next round makes another
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


@contextmanager
def unpacked(encoder: str) -> Iterator[None]:
    """Decompress a packed encoder once for all processes that are started inside; other encoders need nothing.

    Args:
        encoder: From `find_encoder`.
    """
    packed = find_packed(encoder)
    if packed is None or os.environ.get(CACHE_VARIABLE):
        if packed is not None:
            packed_weights(packed)
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ[CACHE_VARIABLE] = folder
        try:
            packed_weights(packed)
            yield
        finally:
            del os.environ[CACHE_VARIABLE]
