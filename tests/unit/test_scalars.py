"""Checks of plain arguments: what passes, and the sentence where something does not."""

import math

import numpy as np
import pytest

from bayesattn import scalars


@pytest.mark.parametrize("value", [1, 7, np.int64(3)])
def test_counts_are_integers_of_any_kind(value):
    scalars.check_count("num_samples", value)


@pytest.mark.parametrize("value", [0, -2, True, 1.5, "3", None])
def test_other_values_are_no_counts(value):
    with pytest.raises(ValueError, match=f"num_samples must be an integer of at least 1, got {value!r}"):
        scalars.check_count("num_samples", value)


@pytest.mark.parametrize("value", [1, 0.5, np.float32(2.0)])
def test_positive_numbers_of_any_kind(value):
    scalars.check_positive(weibull_k=value)


@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan, True, "1"])
def test_other_values_are_not_positive(value):
    with pytest.raises(ValueError, match=f"weibull_k must be a finite number above 0, got {value!r}"):
        scalars.check_positive(weibull_k=value)


def test_choices_are_all_named():
    scalars.check_choice("mode", "a", ("a", "b"))
    with pytest.raises(ValueError, match="mode must be one of 'a', 'b', got 'c'"):
        scalars.check_choice("mode", "c", ("a", "b"))


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (lambda x: scalars.check_fraction("share", x), (0, 0.5, 1), (-0.1, 1.1, math.nan)),
        (lambda x: scalars.check_fraction("share", x, open_ends=True), (0.5,), (0, 1, math.nan)),
        (lambda x: scalars.check_rate("share", x), (0, 0.9), (1, -0.1, math.nan)),
        (lambda x: scalars.check_not_negative(share=x), (0, 3.0), (-0.1, math.inf, math.nan)),
    ],
)
def test_ranges(check, good, bad):
    for value in good:
        check(value)
    for value in bad:
        with pytest.raises(ValueError, match=f"share must be .*, got {value!r}"):
            check(value)
