"""Launches of a piece of code, recorded once and replayed with other addresses.

An attention call makes two to five launches. Which kernels, grids and numbers depends on shapes and switches alone, so all
of it is looked up once; a later call of the same kind only fills in where its arrays lie. That takes the host a few
microseconds per launch instead of some twenty.
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
    """The launches of one kind of call: the same shapes, strides, types and switches.

    Example:
        if not tape.replay(arrays):
            with tape.recording(arrays):
                first_launch(x, y)
                second_launch(y, z)
    """

    def __init__(self) -> None:
        # of each launch: launcher, grid, kernel, which addresses, all other arguments
        self._steps: list[tuple[Any, tuple[int, ...], tuple, operator.itemgetter, tuple]] | None = None
        self._device = -1
        self._names: list[str] = []
        self._parts: list[tuple[int, int]] = []

    def replay(self, arrays: Sequence[Tensor | None]) -> bool:
        """Make the recorded launches with these arrays, or return False: nothing recorded, or something is different.

        Args:
            arrays: Everything that the launches read or write, in the order of the recording. Of an array of many parts, the
                whole.
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
        """Record the launches that are made inside, for `replay`; where a kernel is compiled first, the next call is."""
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
        # whole arrays, then parts of them, then None
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
    """Return which array a pointer is or is a part of, and at which byte it begins there."""
    for i, x in enumerate(arrays):
        if x is pointer:
            return i, 0
    # inputs may lie in one piece of memory (queries and keys of one product), but those are given as they are
    for i, x in enumerate(arrays):
        if x is not None and x.untyped_storage().data_ptr() == pointer.untyped_storage().data_ptr():
            # an empty part has the address 0; nothing reads it, so it may begin anywhere
            return i, pointer.data_ptr() - x.data_ptr() if pointer.numel() else 0
    raise RuntimeError(f"a launch has an array of shape {tuple(pointer.shape)} that is not among those of its tape; add it")
