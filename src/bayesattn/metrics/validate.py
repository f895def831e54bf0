"""Argument checks of the metrics: each error names the argument, its value and what is allowed.

The metrics are the innermost layer of the package, so these checks stand apart from those of the attention functions.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

# how far a row of probabilities may be from one: rounding of a softmax over thousands of classes, with room to spare
_SUM_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 5e-2, torch.float32: 1e-4, torch.float64: 1e-4}


def choice(name: str, value: object, allowed: Sequence[str]) -> None:
    """Require one of a few strings."""
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; allowed: {', '.join(map(repr, allowed))}")


def count(name: str, value: int, least: int = 1) -> None:
    """Require an integer of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}; allowed: an integer of at least {least}")


def fraction(name: str, value: float, *, open_ends: bool = False) -> None:
    """Require a number in [0, 1], or in (0, 1)."""
    inside = 0.0 < value < 1.0 if open_ends else 0.0 <= value <= 1.0
    if not inside:
        raise ValueError(f"{name} is {value!r}; allowed: {'above 0 and below 1' if open_ends else 'from 0 to 1'}")


def floating(name: str, value: Tensor, axes: str) -> None:
    """Require a floating-point tensor with the named axes, none of them empty."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{name} is {kind}; allowed: a floating-point tensor ({axes})")
    if value.ndim != len(axes.split()) or value.numel() == 0:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; allowed: axes ({axes}), none of them empty")


def finite(name: str, value: Tensor) -> None:
    """Raise on NaN or infinity."""
    if not bool(torch.isfinite(value).all()):
        raise ValueError(f"{name} has NaN or infinite entries; allowed: finite values only")


def unit_interval(name: str, value: Tensor) -> None:
    """Require every entry to be in [0, 1]; NaN is outside."""
    low, high = (float(end) for end in torch.aminmax(value))
    # a NaN makes both ends NaN, and every comparison with it false
    if not (low >= 0.0 and high <= 1.0):
        raise ValueError(f"{name} has entries from {low:g} to {high:g}; allowed: from 0 to 1, no NaN")


def probabilities(name: str, value: Tensor) -> None:
    """Require distributions over the last axis: in [0, 1] and summing to one."""
    unit_interval(name, value)
    total = value.sum(dim=-1, dtype=torch.promote_types(value.dtype, torch.float32))
    worst = float((total - 1.0).abs().amax())
    tolerance = _SUM_TOLERANCE.get(value.dtype, 1e-4)
    if worst > tolerance:
        raise ValueError(
            f"{name} has rows that sum to one only within {worst:.3g}; allowed: probabilities, to within {tolerance:g} "
            "(are these logits? pass their softmax)"
        )


def samples(value: Tensor, task: str, *, least_draws: int = 1) -> None:
    """Require sampled class probabilities (draws, predictions, classes)."""
    choice("task", task, ("multiclass", "multilabel"))
    floating("samples", value, "s b c")
    if value.shape[0] < least_draws:
        raise ValueError(f"samples has {value.shape[0]} draws on its first axis; allowed: at least {least_draws}")
    if value.shape[2] < 2:
        raise ValueError(f"samples has {value.shape[2]} class on its last axis; allowed: at least 2")


def task_probabilities(name: str, value: Tensor, task: str) -> None:
    """Require what the task says: distributions over classes, or one probability for each class."""
    if task == "multiclass":
        probabilities(name, value)
    else:
        unit_interval(name, value)


def labels(value: Tensor, num_predictions: int, num_classes: int) -> None:
    """Require one class index for every prediction."""
    if not isinstance(value, Tensor) or value.is_floating_point() or value.dtype == torch.bool or value.is_complex():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"labels is {kind}; allowed: an integer tensor of class indices")
    if tuple(value.shape) != (num_predictions,):
        raise ValueError(f"labels has shape {tuple(value.shape)}; allowed: ({num_predictions},), one for every prediction")
    low, high = (int(end) for end in torch.aminmax(value))
    if low < 0 or high >= num_classes:
        raise ValueError(f"labels has values from {low} to {high}; allowed: from 0 to {num_classes - 1}")


def same_length(**tensors: Tensor) -> int:
    """Require vectors of one common length of at least one, and return it."""
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    if len(set(shapes.values())) != 1 or any(len(shape) != 1 or shape[0] == 0 for shape in shapes.values()):
        found = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"shapes are {found}; allowed: vectors of one length, at least 1")
    return next(iter(shapes.values()))[0]
