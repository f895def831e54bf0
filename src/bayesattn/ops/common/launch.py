"""Launch a Triton kernel, cheaply, and count it.

Triton inspects every argument of every launch to find the compiled kernel: for our forty arguments that takes longer than a
short sequence keeps a GPU busy. Here all arguments but the pointers are prepared once (a `Launch`); a call finds its kernel
by types and alignment of the pointers, and calls the compiled kernel's own launcher.
"""

import functools
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from bayesattn.ops.attention.support import INTERPRETED

# how often each kernel was launched, so that a test can prove which one ran
LAUNCHES: Counter[str] = Counter()

# compiled kernels, by what they were compiled for
_COMPILED: dict[tuple, Any] = {}
# launches that `prepared` keeps: enough for the lengths of a data set, times the kernels
_MOST = 8192
_LARGEST_INT32 = 2**31 - 1


class _Local(threading.local):
    # where the launches of this thread are noted (`recorded_launches`)
    made: "list[tuple[Launch, tuple[Tensor | None, ...]]] | None" = None


_local = _Local()


class Launch:
    """A kernel with everything but its pointers; calling it with them launches it on the device of the first.

    Args:
        kernel: What `triton.jit` returned. It takes pointers first, then numbers, then constants.
        grid: How many programs, on up to three axes.
        numbers: The arguments after the pointers, by position.
        constants: The rest by name, and `num_warps` or `num_stages`.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], numbers: tuple, constants: dict[str, object]) -> None:
        self.kernel, self.numbers, self.constants = kernel, numbers, constants
        self.name = kernel.fn.__name__.removesuffix("_kernel")
        self.grid = grid + (1,) * (3 - len(grid))
        # a compiled kernel takes everything by position, constants too; options are not arguments
        self.rest = (*numbers, *(constants[name] for name in kernel.arg_names if name in constants))
        self._kind = (kernel.fn, *constants.items(), *map(_specialization, numbers))
        self._found: dict[tuple, Any] = {}

    def __call__(self, *pointers: Tensor | None) -> None:
        """Launch the kernel and count it under its name without `_kernel`."""
        LAUNCHES[self.name] += 1
        if _local.made is not None:
            _local.made.append((self, pointers))
        if INTERPRETED:
            self.kernel[self.grid](*pointers, *self.numbers, **self.constants)
            return
        device = pointers[0].device  # type: ignore[union-attr]  (the first is never absent)
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self._launch(pointers, device.index)
        else:
            self._launch(pointers, device.index)

    def compiled(self, pointers: tuple[Tensor | None, ...]) -> Any:
        """Return the kernel that was compiled for such pointers, or None."""
        device = pointers[0].device  # type: ignore[union-attr]
        return _COMPILED.get(
            (self._kind, _facts(pointers, [None if x is None else x.data_ptr() for x in pointers], device.index))
        )

    def _launch(self, pointers: tuple[Tensor | None, ...], index: int | None) -> None:
        # an address saves Triton's launcher a method call and a driver query per pointer
        addresses = [None if x is None else x.data_ptr() for x in pointers]
        facts = _facts(pointers, addresses, index)
        compiled = self._found.get(facts)
        if compiled is None:
            key = (self._kind, facts)
            compiled = _COMPILED.get(key)
            if compiled is None:
                _COMPILED[key] = self.kernel[self.grid](*pointers, *self.numbers, **self.constants)
                return
            self._found[facts] = compiled
        stream = current_stream(index)
        if is_observed():
            compiled[self.grid](*pointers, *self.rest, stream=stream)
        else:
            packed = (compiled.function, compiled.packed_metadata, None, None, None)
            compiled.run(*self.grid, stream, *packed, *addresses, *self.rest)


def _facts(pointers: tuple[Tensor | None, ...], addresses: list[int | None], index: int | None) -> tuple:
    """Return what Triton compiles for (the type of a pointer, whether it is a multiple of sixteen bytes) and the device.

    With another device the lookup fails, and Triton, which then gets the tensors, refuses it.
    """
    return (
        index,
        *[x if x is None else x.dtype for x in pointers],
        *[x if x is None else x.get_device() for x in pointers],
        *[x if x is None else x & 15 == 0 for x in addresses],
    )


def current_stream(index: int | None) -> int:
    """Return the handle of a device's current stream."""
    return driver.active.get_current_stream(index)  # type: ignore[attr-defined]  (every GPU's driver has it)


@contextmanager
def recorded_launches(made: list[tuple[Launch, tuple[Tensor | None, ...]]]) -> Iterator[None]:
    """Append the launches of this thread to a list, with their pointers."""
    before, _local.made = _local.made, made
    try:
        yield
    finally:
        _local.made = before


@functools.lru_cache(maxsize=_MOST, typed=True)
def prepared(kernel: Any, grid: tuple[int, ...], *numbers: int | float | None, **constants: object) -> Launch:
    """Return the launch of these arguments, cached by value and type: 2 and 2.0 differ."""
    return Launch(kernel, grid, numbers, constants)


def is_observed() -> bool:
    """Whether a profiler has launch hooks, which only Triton's own path calls."""
    hooks = knobs.runtime.launch_enter_hook
    return hooks is not None and bool(getattr(hooks, "calls", True))


def _specialization(number: object) -> object:
    """Return what Triton compiles for: the kind of a number, and whether an integer is 1 or a multiple of 16."""
    if type(number) is not int:
        return type(number)
    is_long = not -_LARGEST_INT32 <= number <= _LARGEST_INT32
    return 1 if number == 1 else (number % 16 == 0, is_long)
