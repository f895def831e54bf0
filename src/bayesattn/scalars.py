"""Checks of plain arguments, shared by all layers: each error says what the argument must be and what was given."""

import math
from numbers import Integral, Real


# a bare tuple: for `tuple[str, ...]` the tests' type checker would draw a random entry from Python's generator per call
def check_choice(name: str, value: object, choices: tuple) -> None:
    """Raise unless the value is one of a few."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_positive(**values: object) -> None:
    """Raise on anything that is not a finite number above 0, by its name."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Real) or not (0.0 < float(value) < math.inf):
            raise ValueError(f"{name} must be a finite number above 0, got {value!r}")


def check_not_negative(**values: int | float) -> None:
    """Raise on anything that is not a finite number of at least 0, by its name."""
    for name, value in values.items():
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}")


def check_count(name: str, value: object, least: int = 1) -> None:
    """Raise unless the value is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


def check_fraction(name: str, value: int | float, *, open_ends: bool = False) -> None:
    """Raise unless the value is in [0, 1], or in (0, 1)."""
    if not (0.0 < value < 1.0 if open_ends else 0.0 <= value <= 1.0):
        raise ValueError(f"{name} must be {'above 0 and below 1' if open_ends else 'from 0 to 1'}, got {value!r}")


def check_rate(name: str, value: int | float) -> None:
    """Raise unless the value is in [0, 1), as a dropout rate is."""
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{name} must be at least 0 and below 1, got {value!r}")
