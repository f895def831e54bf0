"""Settings that a fair search tries: the same number for every kind of attention, including the values the paper reports."""

import itertools
from collections.abc import Sequence


def crossed(*fields: tuple[str, Sequence[float | int]]) -> tuple[tuple[str, ...], ...]:
    """Return every combination of values, each as `name=value` settings.

    Example:
        >>> crossed(("dropout", (0, 0.1)), ("rate", (1, 2)))[1]
        ('dropout=0', 'rate=2')
    """
    named = [[f"{name}={value:g}" for value in values] for name, values in fields]
    return tuple(itertools.product(*named))


# k of Weibull noise
SHAPES = crossed(("attention.weibull_k", (1, 2, 5, 10, 20, 50, 100)))
# prior and posterior deviations of lognormal noise; 1.28 is that of Weibull noise with k = 1
SPREADS = (
    *crossed(("attention.sigma_p", (3, 10, 30, 100, 1000)), ("attention.sigma_q", (1.28,))),
    *crossed(("attention.sigma_p", (10, 100, 1000)), ("attention.sigma_q", (0.3,))),
)
