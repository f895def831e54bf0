"""Telling two groups apart by a score: out-of-distribution inputs, or wrong answers, by their uncertainty.

Scores are any real numbers, larger meaning more likely *positive* (out of distribution, wrong). torchmetrics' binary AUROC
sends scores outside [0, 1] through a sigmoid, where large entropies become ties, so the ranks are counted here.
"""

import math
from dataclasses import asdict, dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from bayesattn.metrics import validate
from bayesattn.scalars import check_fraction


@dataclass(frozen=True)
class Detection:
    """How well a score separates out-of-distribution inputs from ordinary ones.

    Attributes:
        auroc: Probability that an out-of-distribution input has the larger score; ties count half.
        aupr: Average precision with out-of-distribution as the positive class.
        fpr95: Share of out-of-distribution inputs accepted by the threshold that accepts 95 % of the ordinary ones.

    Example:
        >>> Detection(auroc=0.9, aupr=0.85, fpr95=0.3).to_dict()
        {'auroc': 0.9, 'aupr': 0.85, 'fpr95': 0.3}
    """

    auroc: float
    aupr: float
    fpr95: float

    def to_dict(self) -> dict[str, float]:
        """Return plain values for JSON."""
        return asdict(self)


def ood_detection(score_in: Float[Tensor, " n"], score_out: Float[Tensor, " m"]) -> Detection:
    """Return AUROC, AUPR and FPR95 of an uncertainty score (entropy, mutual information, p-value, ...).

    Args:
        score_in: Scores of inputs from the training distribution.
        score_out: Scores of inputs from elsewhere; should be larger.

    Example:
        >>> ood_detection(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.4, 0.25]))
        Detection(auroc=0.8333333333333334, aupr=0.8333333333333333, fpr95=0.5)
    """
    return Detection(
        auroc=float(auroc(score_in, score_out)),
        aupr=float(average_precision(score_in, score_out)),
        fpr95=float(false_positive_rate(score_in, score_out, true_positive_rate=0.95)),
    )


def auroc(negative: Float[Tensor, " n"], positive: Float[Tensor, " m"]) -> Float[Tensor, ""]:
    """Return P(positive > negative) + P(positive = negative) / 2: the area under the ROC curve (Mann and Whitney).

    Example:
        >>> auroc(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.4, 0.25]))  # 5 of 6 pairs in the right order
        tensor(0.8333, dtype=torch.float64)
    """
    _check(negative, positive)
    ordered = negative.double().sort().values
    below = torch.searchsorted(ordered, positive.double(), side="left")
    up_to = torch.searchsorted(ordered, positive.double(), side="right")
    return (below + up_to).double().mean() / (2.0 * len(negative))


def average_precision(negative: Float[Tensor, " n"], positive: Float[Tensor, " m"]) -> Float[Tensor, ""]:
    """Return Σ_k (recall_k − recall_{k−1}) precision_k over the distinct scores, from the largest down.

    Example:
        >>> average_precision(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.4, 0.25]))  # (1/1 + 2/3) / 2
        tensor(0.8333, dtype=torch.float64)
    """
    _check(negative, positive)
    # per positive: precision among everything that scores at least as high
    positive, negative = positive.double().sort().values, negative.double().sort().values
    hits = (len(positive) - torch.searchsorted(positive, positive, side="left")).double()
    alarms = len(negative) - torch.searchsorted(negative, positive, side="left")
    return (hits / (hits + alarms)).mean()


def false_positive_rate(
    score_in: Float[Tensor, " n"], score_out: Float[Tensor, " m"], *, true_positive_rate: float = 0.95
) -> Float[Tensor, ""]:
    """Return the share of `score_out` at or below the smallest threshold that accepts enough of `score_in`.

    Example:
        >>> false_positive_rate(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.4, 0.25]))  # 0.25 is below 0.3
        tensor(0.5000, dtype=torch.float64)
    """
    _check(score_in, score_out)
    check_fraction("true_positive_rate", true_positive_rate)
    # the allowance keeps 0.95 · 20 from becoming 20 through its binary rounding
    accepted = max(1, math.ceil(true_positive_rate * len(score_in) - 1e-9))
    threshold = score_in.double().sort().values[accepted - 1]
    return (score_out.double() <= threshold).double().mean()


def _check(first: Tensor, second: Tensor) -> None:
    for name, value in (("first score", first), ("second score", second)):
        validate.floating(name, value, "n")
        validate.finite(name, value)
