"""The search for the least of ordered scores, against trying all of them."""

import math

import pytest

from bayesattn.doubt.tuning import follow, most_evaluations, search


@pytest.mark.parametrize("num", range(1, 15))
def test_the_least_of_falling_and_rising_scores_is_found(num):
    for best in range(num):
        # steep on one side, flat on the other
        scores = [float(best - i) if i < best else 0.01 * (i - best) for i in range(num)]
        asked = []
        assert search(num, lambda i, scores=scores, asked=asked: asked.append(i) or scores[i]) == best
        assert len(asked) == len(set(asked)) <= most_evaluations(num)
        assert set(asked) <= set(range(num))


def test_twelve_candidates_need_five_evaluations():
    assert [most_evaluations(num) for num in (1, 2, 3, 4, 5, 7, 8, 12, 13)] == [1, 2, 3, 3, 4, 4, 5, 5, 6]


def test_equal_scores_go_to_the_first():
    assert search(12, lambda i: 0.0) == 0


@pytest.mark.parametrize("broken", range(7))
def test_a_score_that_is_not_a_number_is_never_chosen(broken):
    assert search(7, lambda i: math.nan if i == broken else float(i)) != broken


def test_a_bump_costs_at_most_the_best_of_what_was_tried():
    scores = [3.0, 9.0, 1.0, 4.0, 7.0, 2.0, 8.0]
    asked: dict[int, float] = {}
    found = search(7, lambda i: asked.setdefault(i, scores[i]))
    assert scores[found] == min(asked.values())


@pytest.mark.parametrize("start", range(5))
def test_steps_end_at_the_nearest_valley(start):
    scores = [2.0, 1.0, 3.0, 0.5, 4.0]
    expected = [1, 1, 3, 3, 3][start]
    assert follow(5, start, scores[start], scores.__getitem__) == expected


def test_steps_stop_at_what_is_not_a_number():
    assert follow(3, 1, 1.0, lambda i: math.nan) == 1
