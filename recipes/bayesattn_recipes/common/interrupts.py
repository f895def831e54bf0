"""Ctrl-C and SIGTERM end a run between two steps, after its state has been saved."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from bayesattn.evaluation.runs import command_line


class Interrupted(KeyboardInterrupt):
    """A run was interrupted and has saved its state; the message says how to continue.

    Args:
        step: Optimizer steps done.
        total: Optimizer steps of the whole run.
        signal_number: The signal; None where another process received it.
    """

    def __init__(self, step: int, total: int, signal_number: int | None) -> None:
        self.exit_code = 128 + (signal_number or signal.SIGINT)
        command = command_line(drop=("--overwrite", "--resume"), add=("--resume",))
        super().__init__(f"interrupted after step {step} of {total}, which is saved. Continue with: {command}")


@contextmanager
def watch_signals() -> Iterator[list[int]]:
    """Collect Ctrl-C and SIGTERM in a list; a second one ends the process at once, as usual.

    Python delivers signals to the main thread only; in any other thread, nothing is watched.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def note(number: int, frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt("interrupted twice, so nothing more was saved")
        received.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
