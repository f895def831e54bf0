"""The two-sided Wilcoxon signed-rank test for many rows of differences at once.

The rules are those of `scipy.stats.wilcoxon(method="auto", zero_method="wilcox", correction=False)`, decided for every row
by itself: zeros are dropped; up to 50 draws without ties or zeros use the exact distribution; with them, up to 13 draws use
the exact distribution given the ties, more use the normal approximation; beyond 50 draws always the normal approximation.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

_EXACT_UP_TO = 50
_EXACT_WITH_TIES_UP_TO = 13


def wilcoxon_p_value(differences: Tensor) -> Tensor:
    """Return the p-value of every column of `differences`, shape (draws, rows) in float64; all zero gives 1."""
    difference = differences.transpose(0, 1).contiguous()
    ranks, tie_sizes = _average_ranks(difference)
    plus = (ranks * (difference > 0)).sum(dim=1)
    draws = difference.shape[1]
    p_value = _normal_approximation(plus, ranks, tie_sizes)
    if draws > _EXACT_UP_TO:
        return p_value
    untidy = ((tie_sizes > 1) & (ranks > 0)).any(dim=1) | (difference == 0).any(dim=1)
    exact = _exact_p_value(plus.long(), _exact_distribution(draws).to(plus.device))
    p_value = torch.where(untidy, p_value, exact)
    if draws <= _EXACT_WITH_TIES_UP_TO and bool(untidy.any()):
        p_value[untidy] = _exact_given_ties(plus[untidy], ranks[untidy])
    return p_value


def _average_ranks(difference: Tensor) -> tuple[Tensor, Tensor]:
    # rank of |d| among the non-zero entries of its row, ties sharing their mean rank; zeros get rank 0
    magnitude = difference.abs()
    ordered = magnitude.sort(dim=1).values
    below = torch.searchsorted(ordered, magnitude, side="left")
    up_to = torch.searchsorted(ordered, magnitude, side="right")
    zeros = (magnitude == 0).sum(dim=1, keepdim=True)
    ranks = (below + up_to + 1).double() / 2.0 - zeros
    return torch.where(magnitude == 0, 0.0, ranks), (up_to - below).double()


def _normal_approximation(plus: Tensor, ranks: Tensor, tie_sizes: Tensor) -> Tensor:
    counted = ranks > 0
    n = counted.sum(dim=1).double()
    mean = n * (n + 1.0) / 4.0
    # Σ over groups of (t³ − t) = Σ over entries of (t² − 1)
    ties = ((tie_sizes.square() - 1.0) * counted).sum(dim=1)
    deviation = ((n * (n + 1.0) * (2.0 * n + 1.0) - ties / 2.0) / 24.0).sqrt()
    z = (plus - mean).abs() / deviation
    return torch.where(n == 0, 1.0, torch.special.erfc(z / math.sqrt(2.0)))


@lru_cache(maxsize=_EXACT_UP_TO)
def _exact_distribution(draws: int) -> Tensor:
    # number of sign patterns for each rank sum, from ∏_r (1 + q^r); at most 2⁵⁰, exact in float64
    ways = torch.zeros(draws * (draws + 1) // 2 + 1, dtype=torch.float64)
    ways[0] = 1.0
    for rank in range(1, draws + 1):
        ways[rank:] += ways[:-rank].clone()
    return ways / 2.0**draws


def _exact_p_value(plus: Tensor, distribution: Tensor) -> Tensor:
    # the distribution is symmetric: the two tails at a rank sum are the lower tails at it and at its mirror image
    lower = distribution.cumsum(dim=0)
    return (2.0 * lower[torch.minimum(plus, len(lower) - 1 - plus)]).clamp(max=1.0)


def _exact_given_ties(plus: Tensor, ranks: Tensor) -> Tensor:
    # the same product with each row's own ranks, doubled so that shared ranks are whole numbers
    doubled = (2.0 * ranks).round().long()
    total = doubled.sum(dim=1, keepdim=True)
    sums = torch.arange(int(total.amax()) + 1, device=ranks.device).expand(len(ranks), -1)
    ways = (sums == 0).double()
    for rank in doubled.unbind(dim=1):
        # a dropped zero has rank 0: doubling the counts there and halving below leaves the distribution as it was
        source = sums - rank[:, None]
        ways = (ways + ways.gather(1, source.clamp(min=0)) * (source >= 0)) / 2.0
    statistic = (2.0 * plus).round().long()[:, None]
    lower = (ways * (sums <= statistic)).sum(dim=1)
    upper = (ways * (sums >= statistic)).sum(dim=1)
    return (2.0 * torch.minimum(lower, upper)).clamp(max=1.0)
