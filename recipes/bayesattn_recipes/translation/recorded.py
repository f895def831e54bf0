"""Forward and backward pass of a module, recorded as CUDA graphs to save the launches.

A decoder's loop is about forty small kernels per step; on a GPU their launches cost more than their work.
"""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn


class Recordings:
    """A module's calls, recorded on the first one with given shapes and replayed on every later one.

    The recordings share the memory of the largest one, so the backward pass of a call has to come before the next call, as
    it does in training. At the first call, no earlier result of the same parameters that was computed without a recording
    may still need its backward pass: CUDA refuses to record across streams.

    Args:
        build: Returns the module for inputs of these names, in this order: positional tensors in, a tuple of tensors out.
            Its parameters may change between calls, but not their addresses.
    """

    def __init__(self, build: Callable[[tuple[str, ...]], nn.Module]) -> None:
        self.build = build
        self._recorded: dict[tuple, Callable[..., tuple[Tensor, ...]]] = {}
        self._pool: tuple[int, int] | None = None

    def __call__(self, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the module's output for these inputs, which are on a GPU."""
        facts = ((name, tuple(x.shape), x.dtype, x.requires_grad) for name, x in inputs.items())
        key = (torch.is_grad_enabled(), *facts)
        if key not in self._recorded:
            self._recorded[key] = self._record(inputs)
        return self._recorded[key](*inputs.values())

    def _record(self, inputs: dict[str, Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        samples = tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in inputs.values())
        module, dtype = self.build(tuple(inputs)), torch.get_autocast_dtype("cuda")
        # a low-precision copy of a weight from outside would be baked into the recording; the module makes its own
        with (
            torch.autocast("cuda", dtype, enabled=torch.is_autocast_enabled("cuda"), cache_enabled=False),
            warnings.catch_warnings(),
        ):
            # the warm-up before a recording runs on its own stream
            warnings.filterwarnings("ignore", "The AccumulateGrad node's stream does not match")
            # a module may hold unused parameters; one warm-up loads every kernel
            options = {"num_warmup_iters": 1, "allow_unused_input": True, "pool": self._pool}
            return torch.cuda.make_graphed_callables(module, samples, **options)  # type: ignore[return-value]  (what went in, graphed)
