"""Checks of the tensors that metrics take: each error says what the argument must be and what was given.

The metrics are the innermost layer of the package, so these checks stand apart from those of the attention functions.
"""

import torch
from torch import Tensor

from bayesattn.scalars import check_choice

# how far a row of probabilities may be from one: rounding of a softmax over thousands of classes, with room to spare
_SUM_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 5e-2, torch.float32: 1e-4, torch.float64: 1e-4}


def floating(name: str, value: Tensor, axes: str) -> None:
    """Require a floating-point tensor with the named axes, none of them empty."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{name} must be a floating-point tensor ({axes}), got {kind}")
    if value.ndim != len(axes.split()) or value.numel() == 0:
        raise ValueError(f"{name} must have the axes ({axes}), none of them empty, got shape {tuple(value.shape)}")


def finite(name: str, value: Tensor) -> None:
    """Raise on NaN or infinity."""
    if not bool(torch.isfinite(value).all()):
        raise ValueError(f"{name} must be finite, got NaN or infinite entries")


def ordered(name: str, value: Tensor) -> None:
    """Raise on NaN; infinity can be sorted, and is the t of an answer that no attention noise moves."""
    if bool(torch.isnan(value).any()):
        raise ValueError(f"{name} must have no NaN, by which nothing can be sorted")


def unit_interval(name: str, value: Tensor) -> None:
    """Require every entry to be in [0, 1]; NaN is outside."""
    low, high = (float(end) for end in torch.aminmax(value))
    # a NaN makes both ends NaN, and every comparison with it false
    if not (low >= 0.0 and high <= 1.0):
        raise ValueError(f"{name} must have entries from 0 to 1 and no NaN, got entries from {low:g} to {high:g}")


def probabilities(name: str, value: Tensor) -> None:
    """Require distributions over the last axis: in [0, 1] and summing to one."""
    unit_interval(name, value)
    total = value.sum(dim=-1, dtype=torch.promote_types(value.dtype, torch.float32))
    worst = float((total - 1.0).abs().amax())
    tolerance = _SUM_TOLERANCE.get(value.dtype, 1e-4)
    if worst > tolerance:
        raise ValueError(
            f"{name} must have rows that sum to one within {tolerance:g}, got a row that is off by {worst:.3g}. If these "
            "are logits, pass their softmax"
        )


def samples(value: Tensor, task: str, *, least_draws: int = 1) -> None:
    """Require sampled class probabilities (draws, predictions, classes)."""
    check_choice("task", task, ("multiclass", "multilabel"))
    floating("samples", value, "s b c")
    if value.shape[0] < least_draws:
        raise ValueError(f"samples must have at least {least_draws} draws on its first axis, got {value.shape[0]}")
    if value.shape[2] < 2:
        raise ValueError(f"samples must have at least 2 classes on its last axis, got {value.shape[2]}")


def task_probabilities(name: str, value: Tensor, task: str) -> None:
    """Require distributions over classes or one probability per class, depending on the task."""
    if task == "multiclass":
        probabilities(name, value)
    else:
        unit_interval(name, value)


def labels(value: Tensor, num_predictions: int, num_classes: int) -> None:
    """Require one class index per prediction."""
    if not isinstance(value, Tensor) or value.is_floating_point() or value.dtype == torch.bool or value.is_complex():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"labels must be an integer tensor of class indices, got {kind}")
    if tuple(value.shape) != (num_predictions,):
        raise ValueError(f"labels must have shape ({num_predictions},), one per prediction, got {tuple(value.shape)}")
    low, high = (int(end) for end in torch.aminmax(value))
    if low < 0 or high >= num_classes:
        raise ValueError(f"labels must be classes from 0 to {num_classes - 1}, got values from {low} to {high}")


def same_length(**tensors: Tensor) -> int:
    """Require vectors of one common length of at least one, and return it."""
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    if len(set(shapes.values())) != 1 or any(len(shape) != 1 or shape[0] == 0 for shape in shapes.values()):
        found = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"vectors must have one common length of at least 1, got {found}")
    return next(iter(shapes.values()))[0]
