"""The one check that the mathematics at the bottom and the config share."""

import math


def check_positive(**values: object) -> None:
    """Raise on anything that is not a finite number above 0, by its name."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not (0.0 < value < math.inf):
            raise ValueError(f"{name} is {value!r}; allowed: a finite number above 0")
