"""Launch Triton kernels with little overhead, and count the launches.

At every launch Triton inspects every argument to find the compiled kernel. For our forty arguments this takes longer than a
short sequence takes on a GPU. A `Launch` prepares all arguments except the pointers once. A call then finds the compiled
kernel by the types and alignments of the pointers, and calls that kernel's own launcher.
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

# number of launches per kernel, so that a test can prove which one ran
LAUNCHES: Counter[str] = Counter()

# compiled kernels by what they are specialized for
_COMPILED: dict[tuple, Any] = {}
# launches that `prepared` caches: enough for every kernel with all sequence lengths of a data set
_MOST = 8192
_LARGEST_INT32 = 2**31 - 1


class _Local(threading.local):
    # list of this thread's launches inside `recorded_launches`
    made: "list[tuple[Launch, tuple[Tensor | None, ...]]] | None" = None


_local = _Local()


class Launch:
    """A kernel with all arguments except its pointers; call it with these to launch it on the first one's device.

    `kernel` is a `triton.jit` function that takes pointers first, then `numbers` by position, then `constants` by name. The
    constants may include options such as `num_warps`. `grid` has up to three axes.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], numbers: tuple, constants: dict[str, object]) -> None:
        self.kernel, self.numbers, self.constants = kernel, numbers, constants
        self.name = kernel.fn.__name__.removesuffix("_kernel")
        self.grid = grid + (1,) * (3 - len(grid))
        # a compiled kernel takes all arguments by position, constants included; options are not arguments
        self.rest = (*numbers, *(constants[name] for name in kernel.arg_names if name in constants))
        self._kind = (kernel.fn, *constants.items(), *map(_specialization, numbers))
        self._found: dict[tuple, Any] = {}

    def __call__(self, *pointers: Tensor | None) -> None:
        """Launch the kernel, counted under its name without `_kernel`."""
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
        """Return the kernel compiled for such pointers, or None."""
        device = pointers[0].device  # type: ignore[union-attr]
        return _COMPILED.get(
            (self._kind, _facts(pointers, [None if x is None else x.data_ptr() for x in pointers], device.index))
        )

    def _launch(self, pointers: tuple[Tensor | None, ...], index: int | None) -> None:
        # for tensors, Triton's launcher would make a method call and a driver query per pointer
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
    """Return the pointers' types and 16-byte alignments, for which Triton specializes a kernel, and their devices.

    With a pointer on another device the lookup fails; Triton then gets the tensors themselves and raises an error.
    """
    return (
        index,
        *[x if x is None else x.dtype for x in pointers],
        *[x if x is None else x.get_device() for x in pointers],
        *[x if x is None else x & 15 == 0 for x in addresses],
    )


def current_stream(index: int | None) -> int:
    """Return the handle of the device's current stream."""
    return driver.active.get_current_stream(index)  # type: ignore[attr-defined]  (every GPU's driver has it)


@contextmanager
def recorded_launches(made: list[tuple[Launch, tuple[Tensor | None, ...]]]) -> Iterator[None]:
    """Append this thread's launches, with their pointers, to a list."""
    before, _local.made = _local.made, made
    try:
        yield
    finally:
        _local.made = before


@functools.lru_cache(maxsize=_MOST, typed=True)
def prepared(kernel: Any, grid: tuple[int, ...], *numbers: int | float | None, **constants: object) -> Launch:
    """Return the `Launch` with these arguments, cached by value and type: 2 and 2.0 differ."""
    return Launch(kernel, grid, numbers, constants)


def is_observed() -> bool:
    """Return whether a profiler has set launch hooks, which only Triton's own launch path calls."""
    hooks = knobs.runtime.launch_enter_hook
    return hooks is not None and bool(getattr(hooks, "calls", True))


def _specialization(number: object) -> object:
    """Return what Triton specializes for: the type and, of an integer, whether it is 1, a multiple of 16, or long."""
    if type(number) is not int:
        return type(number)
    is_long = not -_LARGEST_INT32 <= number <= _LARGEST_INT32
    return 1 if number == 1 else (number % 16 == 0, is_long)
