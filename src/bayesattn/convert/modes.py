"""Temporary eval mode."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode and every module back into its own mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        if any(mode for _, mode in modes):
            model.eval()
        yield
    finally:
        # one by one: train() would also switch on parts that their owner keeps in eval mode
        for module, mode in modes:
            if module.training is not mode:
                module.training = mode
