"""Launch a Triton kernel, cheaply, and count it.

Triton looks at every argument of every launch to find the compiled kernel: for the forty of ours that takes longer than a
short sequence keeps a GPU busy. Here the kernel is found by the few facts it was compiled for.
"""

from collections import Counter
from typing import Any

import torch

from bayesattn.ops.attention.support import INTERPRETED

# how often each kernel was launched, so that a test can prove which one ran
LAUNCHES: Counter[str] = Counter()

# kernels by what they were compiled for; and, found faster, by the very numbers of recent launches
_COMPILED: dict[tuple, tuple[Any, tuple]] = {}
_RECENT: dict[tuple, tuple[Any, tuple]] = {}
_MOST_RECENT = 4096
_LARGEST_INT32 = 2**31 - 1
_NUMBERS = (int, float, type(None))


def launch(kernel: Any, grid: tuple[int, ...], *args: object, **constants: object) -> None:
    """Launch a kernel on the device of its first argument and count it under its name without `_kernel`.

    Args:
        kernel: What `triton.jit` returned.
        grid: How many programs, on up to three axes.
        args: Its first arguments, by position; the first is a tensor.
        constants: The rest by name, and `num_warps` or `num_stages`.
    """
    LAUNCHES[kernel.fn.__name__.removesuffix("_kernel")] += 1
    if INTERPRETED:
        kernel[grid](*args, **constants)
        return
    device = args[0].device  # type: ignore[attr-defined]
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            _launch(kernel, grid, args, constants, device)
    else:
        _launch(kernel, grid, args, constants, device)


def _launch(kernel: Any, grid: tuple[int, ...], args: tuple, constants: dict[str, object], device: torch.device) -> None:
    # with the type of a number: 2 and 2.0 are equal, but not to Triton
    facts = [(x, type(x)) if type(x) in _NUMBERS else (x.dtype, x.data_ptr() & 15) for x in args]
    recent = (kernel.fn, device, *constants.values(), *facts)
    found = _RECENT.get(recent)
    if found is None:
        key = (kernel.fn, device, *constants.values(), *map(specialisation, args))
        found = _COMPILED.get(key)
        if found is None:
            compiled = kernel[grid](*args, **constants)
            if compiled is not None:
                # a compiled kernel takes everything by position, constants too; options are no arguments
                _COMPILED[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(args) :])
            return
        if len(_RECENT) >= _MOST_RECENT:
            _RECENT.clear()
        _RECENT[recent] = found
    compiled, rest = found
    compiled[grid + (1,) * (3 - len(grid))](*args, *rest)


def specialisation(argument: Any) -> object:
    """Return what Triton compiles for: whether an integer is 1 or a multiple of 16, a pointer's type and alignment."""
    kind = type(argument)
    if kind is int:
        is_long = not -_LARGEST_INT32 <= argument <= _LARGEST_INT32
        return 1 if argument == 1 else (argument % 16 == 0, is_long)
    if kind is float or argument is None:
        return kind
    return argument.dtype, argument.data_ptr() % 16 == 0
