"""One number for several runs: the mean over seeds and its 95 % interval."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats


@dataclass(frozen=True)
class Summary:
    """A metric over runs.

    Attributes:
        value: Mean over the runs.
        low: Lower end of the interval; None where there is none.
        high: Upper end.
        num_runs: How many runs were averaged.
    """

    value: float
    low: float | None
    high: float | None
    num_runs: int

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.3f}"
        return f"{self.value:.3f}±{(self.high - self.low) / 2:.3f}"


def over_runs(values: Sequence[float]) -> Summary:
    """Return the mean over runs with Student's 95 % t interval: value ± t · s / √n. One run has no interval.

    The interval is over seeds (initialization, batch order, noise); all runs share their test images.
    """
    if not values or not all(math.isfinite(value) for value in values):
        raise ValueError(f"values must be one or more finite numbers, got {list(values)!r}")
    count, mean = len(values), sum(values) / len(values)
    if count == 1:
        return Summary(mean, None, None, 1)
    error = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1) / count)
    half = float(stats.t.ppf(0.975, count - 1)) * error
    return Summary(mean, mean - half, mean + half, count)
