"""Temporary eval mode."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module, modules: Iterable[nn.Module] | None = None) -> Iterator[None]:
    """Put the model into eval mode and every module back into its own mode afterwards.

    Args:
        model: The model.
        modules: All of its modules, for a caller that has them already.
    """
    modes = [(module, module.training) for module in (model.modules() if modules is None else modules)]
    try:
        if any(mode for _, mode in modes):
            model.eval()
        yield
    finally:
        # one by one: train() would also switch on parts that their owner keeps in eval mode
        for module, mode in modes:
            if module.training is not mode:
                module.training = mode
