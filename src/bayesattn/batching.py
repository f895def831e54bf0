"""Compute several draws in one forward pass by repeating arguments along their batch axes, draws outermost."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

BatchDims = int | Sequence[int | None] | Mapping[str, int | None]
Arguments = Mapping[int | str, Any]

# settings that a call passes besides its data; a batch axis given for all arguments does not apply to them
_SETTINGS = (bool, int, float, str, type(None))


def batch_axes(arguments: Arguments, batch_dims: BatchDims) -> tuple[dict[int | str, int], int]:
    """Return the batch axis of each argument that has one, and the common length of these axes.

    `batch_dims` is one axis for all arguments, or one per argument, None for an argument that all draws share.

    Raises:
        ValueError: An axis does not exist, lengths differ, or an argument with data has no entry.
    """
    given = _by_argument(arguments, batch_dims)
    axes, lengths = {}, {}
    for name, axis in given.items():
        if axis is None:
            continue
        value = arguments[name]
        if not isinstance(value, Tensor):
            raise ValueError(
                f"batch_dims gives an axis to argument {name!r}, which is a {type(value).__name__} and has none. Give an "
                "axis per tensor and None for everything else, or leave out batch_dims"
            )
        if not isinstance(axis, int) or not -value.ndim <= axis < value.ndim:
            raise ValueError(
                f"batch_dims for argument {name!r} must be an axis of its shape {tuple(value.shape)}, or None if all draws "
                f"share it, got {axis!r}"
            )
        axes[name], lengths[name] = axis, value.shape[axis]
    if len(set(lengths.values())) != 1:
        found = ", ".join(f"{length} in argument {name!r}" for name, length in lengths.items()) or "none at all"
        raise ValueError(
            f"batch_dims must select batches of one length, got {found}. Use None for arguments that all draws share"
        )
    return axes, next(iter(lengths.values()))


def _by_argument(arguments: Arguments, batch_dims: BatchDims) -> dict[int | str, int | None]:
    if isinstance(batch_dims, int):
        return {name: batch_dims for name, value in arguments.items() if not isinstance(value, _SETTINGS)}
    if not isinstance(batch_dims, Sequence | Mapping) or isinstance(batch_dims, str):
        raise ValueError(f"batch_dims must be one axis for all arguments, or one axis per argument, got {batch_dims!r}")
    given: dict[int | str, int | None] = {}
    given.update(batch_dims.items() if isinstance(batch_dims, Mapping) else enumerate(batch_dims))
    known = ", ".join(map(repr, arguments))
    for name in given.keys() - arguments.keys():
        raise ValueError(f"batch_dims has an entry for argument {name!r}, but the arguments are {known}")
    for name, value in arguments.items():
        if name not in given and not isinstance(value, _SETTINGS):
            raise ValueError(
                f"batch_dims has no entry for argument {name!r}. Give its batch axis, or None if all draws share it"
            )
    return given


def repeated(value: Tensor, axis: int, count: int) -> Tensor:
    """Return `count` copies of the batch, one after another."""
    return value if count == 1 else torch.cat([value] * count, dim=axis)


def split_draws(together: Shaped[Tensor, "..."], one: torch.Size, count: int) -> Shaped[Tensor, "s ..."]:
    """Split the output of one pass into its `count` draws, draws first.

    `one` is the shape of one draw's output. The batch axis is the one that is `count` times as long in `together`.
    """
    if count == 1 and together.shape == one:
        return together.unsqueeze(0)
    longer = [axis for axis, (now, before) in enumerate(zip(together.shape, one)) if now != before]
    if together.ndim != len(one) or len(longer) != 1 or together.shape[longer[0]] != count * one[longer[0]]:
        raise ValueError(
            f"batch_dims needs an output with one axis that is {count} times as long for {count} draws: one draw has shape "
            f"{tuple(one)}, all together gave {tuple(together.shape)}. Use chunk_size=1 or leave out batch_dims to compute "
            "the draws one by one"
        )
    axis = longer[0]
    return together.unflatten(axis, (count, one[axis])).movedim(axis, 0)
