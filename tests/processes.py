"""Run a function on two processes with a deadline: a deadlock must fail a test and say where, not stop the suite."""

import faulthandler
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

DEADLINE = 180.0


def run_on_two(function: Callable[..., None], *args: Any) -> None:
    """Call `function(rank, *args)` on two fresh processes; raise what they raise, or that one took too long."""
    mp.start_processes(_guarded, (function, args), nprocs=2, start_method="spawn")


def _guarded(rank: int, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    # after the deadline every thread's stack goes to stderr and the process ends, which ends the other one too
    faulthandler.dump_traceback_later(DEADLINE, exit=True)
    function(rank, *args)


def leave() -> None:
    """End this process when both are done; the last line of a function given to `run_on_two`.

    Not by returning: with gloo, torch now and then deadlocks while it destroys a DistributedDataParallel.
    """
    dist.barrier()
    os._exit(0)
