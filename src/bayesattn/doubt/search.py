"""The position of the smallest of ordered scores, with few evaluations."""

import math
from collections.abc import Callable


def search(num: int, score: Callable[[int], float]) -> int:
    """Return the position, below `num`, of the smallest score, if scores fall and then rise: golden section on a grid.

    Each step compares two positions inside the interval and cuts off what lies beyond the worse one. Interval lengths are
    Fibonacci numbers, so the next step can reuse one position.
    """
    scores: dict[int, float] = {}

    def at(position: int) -> float:
        if position >= num:
            return math.inf
        if position not in scores:
            found = score(position)
            # NaN compares with nothing, so it would never be replaced
            scores[position] = math.inf if math.isnan(found) else found
        return scores[position]

    # the best is strictly between `low` and `low + length`
    low, (shorter, length) = -1, _fibonacci(num)
    while length > 2:
        left, right = low + length - shorter, low + shorter
        low = low if at(left) <= at(right) else left
        shorter, length = length - shorter, shorter
    at(low + 1)
    return min(sorted(scores), key=scores.__getitem__)


def most_evaluations(num: int) -> int:
    """Return the largest number of scores that `search` computes."""
    (shorter, length), count = _fibonacci(num), 1
    while length > 2:
        shorter, length, count = length - shorter, shorter, count + 1
    return count


def _fibonacci(num: int) -> tuple[int, int]:
    """Return two consecutive Fibonacci numbers; an interval as long as the second has `num` inner positions."""
    shorter, length = 1, 2
    while length - 1 < num:
        shorter, length = length, shorter + length
    return shorter, length


def follow(num: int, start: int, best: float, score: Callable[[int], float]) -> int:
    """Step from `start`, whose score is `best`, in one direction while that helps, else in the other; return the end."""
    for way in (1, -1):
        position = start
        while 0 <= position + way < num and (found := score(position + way)) < best:
            position, best = position + way, found
        if position != start:
            return position
    return start
