"""Record the kernel launches of a call, and replay them with other addresses.

An attention call makes two to five launches. Their kernels, grids and numbers depend only on shapes and switches, so they
are looked up once. A later call of the same kind only fills in addresses, which takes the host a few microseconds per launch
instead of about twenty.
"""

import functools
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bayesattn.ops.common.launch import INTERPRETED, LAUNCHES, Launch, current_stream, is_observed, recorded_launches


class Tape:
    """The launches of calls with the same shapes, strides, types and switches.

    Example:
        if not tape.replay(arrays):
            with tape.recording(arrays):
                first_launch(x, y)
                second_launch(y, z)
    """

    def __init__(self) -> None:
        # per launch: launcher, grid, kernel, selection of addresses, all other arguments
        self._steps: list[tuple[Any, tuple[int, ...], tuple, operator.itemgetter, tuple]] | None = None
        self._device = -1
        self._names: list[str] = []
        self._parts: list[tuple[int, int]] = []

    def replay(self, arrays: Sequence[Tensor | None]) -> bool:
        """Replay the launches with these arrays, given as in the recording; return False if that is impossible.

        It needs a recording, arrays aligned to 16 bytes, the recorded device as the current one, and no profiler.
        """
        steps = self._steps
        if steps is None:
            return False
        addresses: list[int | None] = [0 if x is None else x.data_ptr() for x in arrays]
        first = arrays[0]
        if functools.reduce(operator.or_, addresses) & 15 or first.get_device() != self._device:  # type: ignore[union-attr]
            return False
        if is_observed() or (self._device >= 0 and torch.cuda.current_device() != self._device):
            return False
        addresses += [addresses[i] + offset for i, offset in self._parts]  # type: ignore[operator]
        addresses.append(None)
        stream = current_stream(self._device)
        for run, grid, kernel, pointers, rest in steps:
            run(*grid, stream, *kernel, *pointers(addresses), *rest)
        for name in self._names:
            LAUNCHES[name] += 1
        return True

    @contextmanager
    def recording(self, arrays: Sequence[Tensor | None]) -> Iterator[None]:
        """Record the launches inside the scope for `replay`, if all arrays are aligned and nothing is interpreted.

        `arrays` has every array that the launches read or write; where they use parts of an array, the whole array.
        """
        made: list[tuple[Launch, tuple[Tensor | None, ...]]] = []
        with recorded_launches(made):
            yield
        if not INTERPRETED:
            self._keep(arrays, made)

    def _keep(self, arrays: Sequence[Tensor | None], made: list[tuple[Launch, tuple[Tensor | None, ...]]]) -> None:
        compiled = [launch.compiled(pointers) for launch, pointers in made]
        held = [x for x in arrays if x is not None]
        if not all(compiled) or any(x.data_ptr() & 15 for x in held):
            return
        found = [[None if x is None else _place(x, arrays) for x in pointers] for _, pointers in made]
        parts = list(dict.fromkeys(place for row in found for place in row if place is not None and place[1]))
        # numbers of the addresses: first whole arrays, then parts of them, then None
        numbers: dict[Any, int] = {(i, 0): i for i in range(len(arrays))}
        numbers |= {part: len(arrays) + i for i, part in enumerate(parts)}
        numbers[None] = len(numbers)
        self._parts, self._device, self._names = parts, held[0].get_device(), [launch.name for launch, _ in made]
        self._steps = [
            (
                kernel.run,
                launch.grid,
                (kernel.function, kernel.packed_metadata, None, None, None),
                operator.itemgetter(*(numbers[place] for place in row)),
                launch.rest,
            )
            for (launch, _), kernel, row in zip(made, compiled, found, strict=True)
        ]


def _place(pointer: Tensor, arrays: Sequence[Tensor | None]) -> tuple[int, int]:
    """Return the index of the array that contains `pointer`, and the byte at which `pointer` begins there."""
    for i, x in enumerate(arrays):
        if x is pointer:
            return i, 0
    # inputs may share memory (queries and keys of one product), but launches get these unchanged, so they match above
    for i, x in enumerate(arrays):
        if x is not None and x.untyped_storage().data_ptr() == pointer.untyped_storage().data_ptr():
            # an empty part has the address 0; nothing reads it, so any offset will do
            return i, pointer.data_ptr() - x.data_ptr() if pointer.numel() else 0
    raise RuntimeError(f"a launch has an array of shape {tuple(pointer.shape)} that is not among those of its tape; add it")
