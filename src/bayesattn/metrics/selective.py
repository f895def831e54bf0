"""Selective prediction: how good are the answers if the least certain ones are withheld?

Predictions are ranked by confidence. Those with equal confidence share their mean error, which gives the expectation over
all ways to break the ties: no metric here depends on the order of the input.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from bayesattn.metrics import validate
from bayesattn.scalars import check_fraction


@dataclass(frozen=True)
class RiskCoverage:
    """The risk-coverage curve.

    Attributes:
        coverage: i / n for i = 1 … n, the share of predictions answered.
        risk: Mean error of the i most confident predictions.

    Example:
        >>> curve = risk_coverage(torch.tensor([0.9, 0.8, 0.6, 0.5]), torch.tensor([1.0, 1.0, 1.0, 0.0]))
        >>> curve.coverage[curve.risk <= 0.1].max()  # the largest share that can be answered at 10 % risk
        tensor(0.7500, dtype=torch.float64)
    """

    coverage: Float[Tensor, " b"]
    risk: Float[Tensor, " b"]


def risk_coverage(confidence: Float[Tensor, " b"], accuracy: Shaped[Tensor, " b"]) -> RiskCoverage:
    """Return the mean error at every coverage.

    Args:
        confidence: Any score that is larger for more certain predictions (such as minus the p-value, or minus the entropy).
        accuracy: Acc_i of the predictions: boolean, 0/1 or fractions.

    Example:
        >>> risk_coverage(torch.tensor([0.9, 0.8, 0.6, 0.5]), torch.tensor([1.0, 1.0, 1.0, 0.0])).risk
        tensor([0.0000, 0.0000, 0.0000, 0.2500], dtype=torch.float64)
    """
    _check(confidence, accuracy)
    _, error = average_over_ties(confidence.double(), 1.0 - accuracy.double(), descending=True)
    rank = torch.arange(1, len(error) + 1, dtype=torch.float64, device=error.device)
    return RiskCoverage(coverage=rank / len(error), risk=error.cumsum(dim=0) / rank)


def aurc(confidence: Float[Tensor, " b"], accuracy: Shaped[Tensor, " b"]) -> Float[Tensor, ""]:
    """Return the area under the risk-coverage curve, the mean risk over the coverages 1/n … 1 (Geifman et al., 2019).

    Example:
        >>> aurc(torch.tensor([0.9, 0.8, 0.6]), torch.tensor([1.0, 1.0, 0.0]))  # the error is the least confident
        tensor(0.1111, dtype=torch.float64)
    """
    return risk_coverage(confidence, accuracy).risk.mean()


def excess_aurc(confidence: Float[Tensor, " b"], accuracy: Shaped[Tensor, " b"]) -> Float[Tensor, ""]:
    """Return AURC minus that of the best possible ranking of the same predictions; 0 is perfect.

    The best ranking is evaluated exactly (right answers first), not by its limit r + (1 − r) ln(1 − r) for large n.

    Example:
        >>> right = torch.tensor([1.0, 1.0, 0.0])
        >>> excess_aurc(torch.tensor([0.9, 0.8, 0.6]), right)  # the error is the least confident
        tensor(0., dtype=torch.float64)
        >>> excess_aurc(torch.tensor([0.6, 0.8, 0.9]), right) > 0
        tensor(True)
    """
    return aurc(confidence, accuracy) - aurc(accuracy.double(), accuracy)


def selective_accuracy(
    confidence: Float[Tensor, " b"], accuracy: Shaped[Tensor, " b"], *, coverage: float = 0.8
) -> Float[Tensor, ""]:
    """Return the accuracy of the ⌈coverage · n⌉ most confident predictions.

    Example:
        >>> selective_accuracy(torch.tensor([0.9, 0.8, 0.6, 0.5]), torch.tensor([1.0, 1.0, 1.0, 0.0]), coverage=0.75)
        tensor(1., dtype=torch.float64)
    """
    check_fraction("coverage", coverage)
    risk = risk_coverage(confidence, accuracy).risk
    # 0.8 · 5 is 4.000000000000001 in binary; without the allowance it would need a fifth prediction
    kept = max(1, math.ceil(coverage * len(risk) - 1e-9))
    return 1.0 - risk[kept - 1]


def average_over_ties(
    key: Float[Tensor, " b"], value: Float[Tensor, " b"], *, descending: bool
) -> tuple[Float[Tensor, " b"], Float[Tensor, " b"]]:
    """Return both sorted by `key`, every value replaced by the mean of those with the same key."""
    key, order = key.sort(descending=descending)
    _, group, size = torch.unique_consecutive(key, return_inverse=True, return_counts=True)
    total = torch.zeros(len(size), dtype=value.dtype, device=value.device).index_add_(0, group, value[order])
    return key, (total / size)[group]


def _check(confidence: Tensor, accuracy: Tensor) -> None:
    validate.same_length(confidence=confidence, accuracy=accuracy)
    validate.ordered("confidence", confidence)
    validate.unit_interval("accuracy", accuracy.double())
