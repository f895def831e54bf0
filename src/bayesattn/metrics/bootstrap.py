"""Percentile bootstrap over predictions: how far would a metric move on another test set of the same size?"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from bayesattn.metrics import validate
from bayesattn.scalars import check_count, check_fraction

# counts that the vectorized bootstrap holds at once: 128 MiB of float64
_COUNTS_PER_CHUNK = 2**24


def bootstrap_mean(
    values: Float[Tensor, "b *k"], *, num_resamples: int = 1000, confidence: float = 0.95, seed: int = 0
) -> Float[Tensor, "*k 2"]:
    """Return the interval of the mean over predictions for every column, all columns from the same resamples.

    Args:
        values: One number (or several) for each prediction.
        num_resamples: How many times the predictions are resampled, with replacement.
        confidence: Level of the interval.
        seed: The same seed gives the same interval.

    Example:
        >>> right = torch.tensor([1.0] * 80 + [0.0] * 20)  # 80 of 100 answers are right
        >>> low, high = bootstrap_mean(right)
        >>> bool(0.70 < low < 0.8 < high < 0.90)
        True
    """
    _check(num_resamples, confidence)
    validate.finite("values", values)
    predictions = values.shape[0]
    if values.numel() == 0:
        raise ValueError(f"values must hold at least one prediction, got shape {tuple(values.shape)}")
    columns = values.double().reshape(predictions, -1)
    generator = torch.Generator(device="cpu").manual_seed(seed)
    rows = max(1, _COUNTS_PER_CHUNK // predictions)
    means = []
    for start in range(0, num_resamples, rows):
        size = (min(rows, num_resamples - start), predictions)
        drawn = torch.randint(predictions, size, generator=generator).to(values.device)
        # how often each prediction was drawn: the resampled means of all columns are one matrix product
        counts = torch.zeros(size, dtype=torch.float64, device=values.device)
        counts.scatter_add_(1, drawn, torch.ones((), dtype=torch.float64, device=values.device).expand(size))
        means.append(counts @ columns / predictions)
    return _percentiles(torch.cat(means), confidence).reshape(*values.shape[1:], 2)


def bootstrap_statistic(
    statistic: Callable[..., Tensor],
    *columns: Shaped[Tensor, "b *_"],
    num_resamples: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Float[Tensor, "*k 2"]:
    """Return the interval of any statistics of the predictions, such as a calibration error, one row for each.

    Args:
        statistic: Called with resampled columns; returns one number or a vector of them.
        *columns: What the statistic needs, predictions on the first axis.
        num_resamples: How many times the predictions are resampled, with replacement.
        confidence: Level of the interval.
        seed: The same seed gives the same resamples as in `bootstrap_mean`.

    Example:
        >>> from bayesattn.metrics import expected_calibration_error
        >>> confidence, right = torch.full((100,), 0.9), torch.tensor([1.0] * 80 + [0.0] * 20)
        >>> low, high = bootstrap_statistic(expected_calibration_error, confidence, right, num_resamples=200)
        >>> bool(low < 0.1 < high)  # 90 % sure, 80 % right
        True
    """
    _check(num_resamples, confidence)
    lengths = {len(column) for column in columns}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(f"columns must have one common length of at least 1, got {sorted(lengths)}")
    generator = torch.Generator(device="cpu").manual_seed(seed)
    values = []
    for _ in range(num_resamples):
        drawn = torch.randint(len(columns[0]), (len(columns[0]),), generator=generator)
        values.append(statistic(*(column[drawn.to(column.device)] for column in columns)))
    resampled = torch.stack(values).double()
    return _percentiles(resampled.reshape(num_resamples, -1), confidence).reshape(*resampled.shape[1:], 2)


def _percentiles(resampled: Tensor, confidence: float) -> Float[Tensor, "k 2"]:
    tail = (1.0 - confidence) / 2.0
    ends = torch.tensor([tail, 1.0 - tail], dtype=torch.float64, device=resampled.device)
    return torch.quantile(resampled, ends, dim=0).transpose(0, 1)


def _check(num_resamples: int, confidence: float) -> None:
    check_count("num_resamples", num_resamples)
    check_fraction("confidence", confidence, open_ends=True)
