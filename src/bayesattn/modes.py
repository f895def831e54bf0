"""Temporary changes to a model: its modules, eval mode, and one thread at a time."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from torch import nn

_LOCKS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_ALL_LOCKS = threading.Lock()


@contextmanager
def one_thread(model: nn.Module) -> Iterator[None]:
    """Make other threads that ask for the same model wait until the scope ends.

    Modes, noise and the conversion of a plain model belong to the model. Without this, one thread could undo them while
    another is in the middle of its forward pass.
    """
    with _ALL_LOCKS:
        lock = _LOCKS.setdefault(model, threading.RLock())
    with lock:
        yield


def all_modules(model: nn.Module) -> list[nn.Module]:
    """Return every module once, like `model.modules()`, which also builds their names and takes five times as long."""
    found = dict.fromkeys([model])
    waiting = [model]
    while waiting:
        for child in waiting.pop()._modules.values():
            if child is not None and child not in found:
                found[child] = None
                waiting.append(child)
    return list(found)


@contextmanager
def evaluating(model: nn.Module, modules: Iterable[nn.Module] | None = None) -> Iterator[None]:
    """Put the model into eval mode and every module back into its own mode afterwards.

    Args:
        model: The model.
        modules: All of its modules, for a caller that has them already.
    """
    learning = [module for module in (all_modules(model) if modules is None else modules) if module.training]
    try:
        if learning:
            model.eval()
        yield
    finally:
        # one by one: train() would also switch on parts that their owner keeps in eval mode
        for module in learning:
            module.training = True
