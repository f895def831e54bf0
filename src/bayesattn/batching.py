"""Several draws in one forward pass: arguments are repeated along the batch axes that the caller names, draws outermost."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

BatchDims = int | Sequence[int | None] | Mapping[str, int | None]
Arguments = Mapping[int | str, Any]

# what a call passes beside its data; an integer for all arguments does not mean these
_SETTINGS = (bool, int, float, str, type(None))


def batch_axes(arguments: Arguments, batch_dims: BatchDims) -> tuple[dict[int | str, int], int]:
    """Return the batch axis of each argument that has one, and the length that all these axes share.

    Args:
        arguments: By position or name.
        batch_dims: One axis for all of them, or one for each, None where all draws share the argument.

    Raises:
        ValueError: An axis does not exist, lengths differ, or an argument with data is not mentioned.
    """
    given = _by_argument(arguments, batch_dims)
    axes, lengths = {}, {}
    for name, axis in given.items():
        if axis is None:
            continue
        value = arguments[name]
        if not isinstance(value, Tensor):
            raise ValueError(
                f"argument {name!r} is a {type(value).__name__}, which has no batch axis; allowed in batch_dims: "
                "an axis for each tensor and None for everything else, or no batch_dims"
            )
        if not isinstance(axis, int) or not -value.ndim <= axis < value.ndim:
            raise ValueError(
                f"batch_dims is {axis!r} for argument {name!r} of shape {tuple(value.shape)}; allowed: one of its axes, or "
                "None for what all draws share"
            )
        axes[name], lengths[name] = axis, value.shape[axis]
    if len(set(lengths.values())) != 1:
        found = ", ".join(f"{length} in argument {name!r}" for name, length in lengths.items()) or "none at all"
        raise ValueError(
            f"batch_dims names batches of length {found}; allowed: one length, and None for what all draws share"
        )
    return axes, next(iter(lengths.values()))


def _by_argument(arguments: Arguments, batch_dims: BatchDims) -> dict[int | str, int | None]:
    if isinstance(batch_dims, int):
        return {name: batch_dims for name, value in arguments.items() if not isinstance(value, _SETTINGS)}
    if not isinstance(batch_dims, Sequence | Mapping) or isinstance(batch_dims, str):
        raise ValueError(f"batch_dims is {batch_dims!r}; allowed: an axis for all arguments, or one for each of them")
    given: dict[int | str, int | None] = {}
    given.update(batch_dims.items() if isinstance(batch_dims, Mapping) else enumerate(batch_dims))
    allowed = ", ".join(map(repr, arguments))
    for name in given.keys() - arguments.keys():
        raise ValueError(f"batch_dims has an entry for argument {name!r}; allowed: {allowed}")
    for name, value in arguments.items():
        if name not in given and not isinstance(value, _SETTINGS):
            raise ValueError(
                f"batch_dims has no entry for argument {name!r}; allowed: an axis, or None if all draws share it"
            )
    return given


def repeated(value: Tensor, axis: int, count: int) -> Tensor:
    """Return `count` copies of the batch behind each other."""
    return value if count == 1 else torch.cat([value] * count, dim=axis)


def split_draws(together: Shaped[Tensor, "..."], one: torch.Size, count: int) -> Shaped[Tensor, "s ..."]:
    """Return the outputs of `count` draws, draws first, from what came out of one pass.

    Args:
        together: Output of the pass.
        one: Shape of the output of a draw alone; the axis that is `count` times as long now is the batch's.
        count: Draws in the pass.
    """
    if count == 1 and together.shape == one:
        return together.unsqueeze(0)
    longer = [axis for axis, (now, before) in enumerate(zip(together.shape, one)) if now != before]
    if together.ndim != len(one) or len(longer) != 1 or together.shape[longer[0]] != count * one[longer[0]]:
        raise ValueError(
            f"the output of {count} draws has shape {tuple(together.shape)} and that of one draw {tuple(one)}; allowed with "
            f"batch_dims: one axis that is {count} times as long (chunk_size=1, or no batch_dims, draws one by one)"
        )
    axis = longer[0]
    return together.unflatten(axis, (count, one[axis])).movedim(axis, 0)
