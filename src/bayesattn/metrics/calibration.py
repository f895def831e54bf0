"""Calibration: of the answers given with confidence 0.8, are 80 % right?

One binning serves the expected calibration error (equal widths; Guo et al., 2017), its adaptive form (equal counts; Nguyen
and O'Connor, 2015) and the reliability diagram. Temperature scaling repairs the overall level with one number.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from bayesattn.metrics import validate
from bayesattn.metrics.selective import average_over_ties
from bayesattn.scalars import check_choice, check_count, check_positive

Scheme = Literal["equal_width", "equal_count"]


@dataclass(frozen=True)
class ReliabilityBins:
    """Predictions grouped by confidence; empty bins are left out.

    Attributes:
        confidence: Mean confidence in each bin.
        accuracy: Mean accuracy in each bin.
        count: Predictions in each bin.

    Example:
        >>> bins = reliability_bins(torch.tensor([0.55, 0.9, 0.9]), torch.tensor([1.0, 1.0, 0.0]))
        >>> bins.count
        tensor([1., 2.], dtype=torch.float64)
    """

    confidence: Float[Tensor, " k"]
    accuracy: Float[Tensor, " k"]
    count: Float[Tensor, " k"]

    @property
    def error(self) -> Float[Tensor, ""]:
        """Σ_bins (count / total) |accuracy − confidence|."""
        return (self.count * (self.accuracy - self.confidence).abs()).sum() / self.count.sum()


def reliability_bins(
    confidence: Float[Tensor, " b"],
    accuracy: Shaped[Tensor, " b"],
    *,
    num_bins: int = 15,
    scheme: Scheme = "equal_width",
) -> ReliabilityBins:
    """Group predictions by confidence.

    Args:
        confidence: Probability of the predicted class.
        accuracy: Acc_i of the predictions: boolean, 0/1 or fractions.
        num_bins: Maximum number of bins.
        scheme: `equal_width`: [0, 1/k), [1/k, 2/k), ..., as in torchmetrics; `equal_count`: equally many predictions in
            each, to within one. Predictions of equal confidence share their mean accuracy, so input order does not matter.

    Example:
        >>> bins = reliability_bins(torch.tensor([0.55, 0.9, 0.9]), torch.tensor([1.0, 1.0, 0.0]))
        >>> bins.confidence, bins.accuracy
        (tensor([0.5500, 0.9000], dtype=torch.float64), tensor([1.0000, 0.5000], dtype=torch.float64))
    """
    check_choice("scheme", scheme, ("equal_width", "equal_count"))
    check_count("num_bins", num_bins)
    validate.same_length(confidence=confidence, accuracy=accuracy)
    validate.unit_interval("confidence", confidence)
    validate.unit_interval("accuracy", accuracy.double())
    if scheme == "equal_width":
        edges = torch.linspace(0, 1, num_bins + 1, dtype=confidence.dtype, device=confidence.device)
        index = (torch.bucketize(confidence, edges, right=True) - 1).clamp(max=num_bins - 1)
        confidence, accuracy = confidence.double(), accuracy.double()
    else:
        confidence, accuracy = average_over_ties(confidence.double(), accuracy.double(), descending=False)
        # position · bins // n splits n predictions into bins that differ by at most one
        index = torch.arange(len(confidence), device=confidence.device) * num_bins // len(confidence)
    total = torch.zeros(3, num_bins, dtype=torch.float64, device=confidence.device)
    total.index_add_(1, index, torch.stack([confidence, accuracy, torch.ones_like(confidence)]))
    total = total[:, total[2] > 0]
    return ReliabilityBins(total[0] / total[2], total[1] / total[2], total[2])


def expected_calibration_error(
    confidence: Float[Tensor, " b"],
    accuracy: Shaped[Tensor, " b"],
    *,
    num_bins: int = 15,
    scheme: Scheme = "equal_width",
) -> Float[Tensor, ""]:
    """Return Σ_bins (count / total) |accuracy − confidence|; adaptive ECE with `scheme="equal_count"`.

    Example:
        >>> expected_calibration_error(torch.tensor([0.9, 0.9]), torch.tensor([1.0, 0.0]))  # 90 % sure, 50 % right
        tensor(0.4000, dtype=torch.float64)
    """
    return reliability_bins(confidence, accuracy, num_bins=num_bins, scheme=scheme).error


def fit_temperature(
    logits: Float[Tensor, "b c"], labels: Int[Tensor, " b"], *, bounds: tuple[float, float] = (0.01, 100.0)
) -> float:
    """Return the T that minimizes the NLL of softmax(logits / T) on validation data.

    The NLL is convex in 1/T with derivative Σ_i (E_{p_T}[logit] − logit_label), so bisection finds the one minimum to
    machine precision. For M draws pass ln of the mean probability as `logits`.

    Args:
        logits: Unnormalized log-probabilities.
        labels: Class indices.
        bounds: Where to look for T. An optimum outside them (a perfect classifier has T → 0) gives the nearest bound.

    Example:
        >>> logits = torch.tensor([[4.0, 0.0]] * 4)  # 98 % sure each time
        >>> round(fit_temperature(logits, torch.tensor([0, 0, 0, 1])), 4)  # 75 % right: 4 / T = ln 3
        3.641
    """
    validate.floating("logits", logits, "b c")
    validate.finite("logits", logits)
    validate.labels(labels, *logits.shape)
    low, high = bounds
    if not 0.0 < low < high < float("inf"):
        raise ValueError(f"bounds must be two numbers with 0 < low < high, got {bounds!r}")
    # subtracting the label's logit leaves the softmax as it is and makes the derivative the mean of one term
    margin = logits.double() - logits.double().gather(1, labels.long()[:, None])

    def wants_larger(temperature: float) -> bool:
        return float((torch.softmax(margin / temperature, dim=1) * margin).sum(dim=1).mean()) > 0.0

    if not wants_larger(low):
        return low
    if wants_larger(high):
        return high
    # halving the exponent's range: 60 steps leave a relative width of 1e-17
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if wants_larger(middle) else (low, middle)
    return (low * high) ** 0.5


def apply_temperature(logits: Float[Tensor, "*b c"], temperature: float) -> Float[Tensor, "*b c"]:
    """Return softmax(logits / T): T above 1 makes the probabilities less certain and keeps their order.

    Example:
        >>> apply_temperature(torch.tensor([4.0, 0.0]), 1.0)
        tensor([0.9820, 0.0180])
        >>> apply_temperature(torch.tensor([4.0, 0.0]), 3.641)
        tensor([0.7500, 0.2500])
    """
    check_positive(temperature=temperature)
    return torch.softmax(logits / temperature, dim=-1)
