"""Pair annotations with features by the name of their image, or raise with the names that do not match."""

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor


def positions(wanted: Sequence[str], available: Sequence[str], *, what: str, where: str) -> Int[Tensor, " n"]:
    """Return the position of every wanted name in `available`.

    Args:
        wanted: Names to look up; may repeat.
        available: Available names, each once.
        what: The data the names belong to, for error messages ("questions of the train split").
        where: The place to look them up, for error messages ("features").

    Raises:
        ValueError: A wanted name is missing, or an available one occurs twice, so that a pairing could be wrong.
    """
    index = {name: place for place, name in enumerate(available)}
    if len(index) != len(available):
        seen: set[str] = set()
        twice = next(name for name in available if name in seen or seen.add(name))
        raise ValueError(
            f"{where} must name each image once, but {len(available) - len(index)} names occur twice. The first is {twice!r}"
        )
    missing = [name for name in dict.fromkeys(wanted) if name not in index]
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(set(wanted))} images of the {what} are missing from the {where}: "
            f"{', '.join(map(repr, missing[:3]))}{', …' if len(missing) > 3 else ''}. The {where} have {len(index)} images"
        )
    return torch.tensor([index[name] for name in wanted], dtype=torch.int64)


def find_name(image: str, available: Sequence[str]) -> str | None:
    """Return the name of one image in `available`, or None.

    It is its file name, the same without the suffix, or the number at the end of COCO's file names.

    Example:
        >>> find_name("COCO_val2014_000000000042.jpg", ["7", "42"])
        '42'
    """
    number = coco_number(image)
    candidates = (image, Path(image).stem, *(() if number is None else (number,)))
    return next((name for name in candidates if name in available), None)


def coco_number(image: str) -> str | None:
    """Return the number in a file name of COCO (`COCO_val2014_000000000042.jpg`), or None for other names."""
    found = re.fullmatch(r"COCO_\w+_0*(\d+)(?:\.jpg)?", image)
    return None if found is None else found[1]
