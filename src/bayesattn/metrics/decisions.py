"""Decisions: answer, or abstain, with a guarantee that holds for new data.

Both guarantees are exact for any sample size and any model: they assume only that calibration and new data are draws from
one distribution, and they hold with probability `level` over the draw of the calibration data.

* Target error α. Thresholds are the confidences at K coverages fixed in advance. Given such a threshold, the predictions
  above it are independent draws from the answered population (a property of order statistics), so their errors are binomial
  and Clopper and Pearson (1934) bound the error rate. Each bound takes (1 − level)/K of the risk; the largest coverage whose
  bound is at most α wins.
* Target coverage γ. At the k-th largest of n confidences the coverage of new data is at least Beta(k, n − k + 1)
  distributed; the smallest k with P(Beta < γ) ≤ 1 − level is taken.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from bayesattn.metrics import validate
from bayesattn.scalars import check_count, check_fraction


def clopper_pearson(successes: int, trials: int, *, level: float = 0.95) -> tuple[float, float]:
    """Return the exact two-sided interval for a binomial proportion; no trials give (0, 1).

    Example:
        >>> low, high = clopper_pearson(8, 10)
        >>> round(low, 4), round(high, 4)
        (0.4439, 0.9748)
    """
    check_fraction("level", level, open_ends=True)
    if not 0 <= successes <= trials:
        raise ValueError(f"successes must be from 0 to the number of trials, got {successes} of {trials}")
    # the lower end for successes is the upper end for failures
    counts = torch.tensor([trials - successes, successes])
    failure, success = _upper(counts, torch.tensor(trials), (1.0 - level) / 2.0).tolist()
    return 1.0 - failure, success


@dataclass(frozen=True)
class SelectiveReport:
    """What a selective predictor does on a labeled set.

    Attributes:
        num_predictions: All predictions.
        num_answered: Those that were not withheld.
        coverage: Their share.
        coverage_interval: Clopper-Pearson interval of the coverage.
        error: Error rate of the answered ones; None if none was answered.
        error_interval: Clopper-Pearson interval of that error rate.
        level: Level of both intervals.

    Example:
        >>> confidence = torch.linspace(0.0, 1.0, 200)
        >>> predictor = SelectivePredictor.for_coverage(confidence, confidence > 0.1, 0.8)
        >>> report = predictor.report(confidence, confidence > 0.1)
        >>> report.num_answered, report.coverage, report.error
        (170, 0.85, 0.0)
    """

    num_predictions: int
    num_answered: int
    coverage: float
    coverage_interval: tuple[float, float]
    error: float | None
    error_interval: tuple[float, float]
    level: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class SelectivePredictor:
    """A threshold on the confidence and what is guaranteed about it.

    Attributes:
        threshold: Answer if the confidence is at least this.
        target: `error` or `coverage`.
        target_value: The target.
        bound: What is guaranteed: at most this error rate, or at least this coverage.
        level: Probability, over the calibration data, that the guarantee holds.
        calibration: What the threshold does on the calibration data.

    Example:
        >>> confidence = torch.linspace(0.0, 1.0, 200)
        >>> correct = confidence > 0.1  # the 20 least confident answers are wrong
        >>> predictor = SelectivePredictor.for_error(confidence, correct, 0.05)
        >>> predictor.calibration.coverage, round(predictor.bound, 4)
        (0.9, 0.0327)
        >>> predictor.answers(torch.tensor([0.05, 0.5]))
        tensor([False,  True])
    """

    threshold: float
    target: str
    target_value: float
    bound: float
    level: float
    calibration: SelectiveReport

    @classmethod
    def for_error(
        cls,
        confidence: Float[Tensor, " b"],
        correct: Shaped[Tensor, " b"],
        target_error: float,
        *,
        level: float = 0.95,
        num_thresholds: int = 20,
    ) -> "SelectivePredictor":
        """Find the threshold that answers most while the error rate of the answers is at most `target_error`.

        Args:
            confidence: Confidence of validation predictions that were not used for training; any score, larger is surer.
            correct: Whether each was right: boolean or 0/1.
            target_error: α.
            level: Probability that the guarantee holds.
            num_thresholds: K, the coverages 1/K, 2/K, ..., 1 that are tried.

        Raises:
            ValueError: No threshold can promise the target from these data.
        """
        check_fraction("target_error", target_error)
        check_count("num_thresholds", num_thresholds)
        confidence, correct = _check(confidence, correct, level)
        n = len(confidence)
        ordered = confidence.sort(descending=True).values
        # answer what lies strictly above the confidence at each rank; at full coverage, everything
        ranks = torch.arange(1, num_thresholds + 1, dtype=torch.float64, device=ordered.device) * n / num_thresholds
        lowest = torch.tensor([-torch.inf], dtype=torch.float64, device=ordered.device)
        edges = torch.cat([ordered, lowest])[ranks.round().long()]
        answered = confidence > edges[:, None]
        bounds = _upper((answered & ~correct).sum(dim=1), answered.sum(dim=1), (1.0 - level) / num_thresholds)
        kept = (bounds <= target_error).nonzero()
        if len(kept) > 0:
            best = int(kept[-1])
            threshold = float(torch.nextafter(edges[best], torch.full_like(edges[best], torch.inf)))
            report = _report(answered[best], correct, level)
            return cls(threshold, "error", target_error, float(bounds[best]), level, report)
        raise ValueError(
            f"an error of {target_error} is asked for, but these {n} predictions at level {level} can promise none below "
            f"{float(bounds.min()):.4g}. Use more validation data, a better model or a lower level"
        )

    @classmethod
    def for_coverage(
        cls,
        confidence: Float[Tensor, " b"],
        correct: Shaped[Tensor, " b"],
        target_coverage: float,
        *,
        level: float = 0.95,
    ) -> "SelectivePredictor":
        """Find the highest threshold that still answers at least `target_coverage` of new data.

        Args:
            confidence: Confidence of validation predictions; any score, larger is surer.
            correct: Whether each was right: boolean or 0/1 (only for the report).
            target_coverage: γ.
            level: Probability that the guarantee holds.

        Raises:
            ValueError: No threshold can promise the target from these data.
        """
        from scipy.special import betainc, betaincinv

        check_fraction("target_coverage", target_coverage)
        confidence, correct = _check(confidence, correct, level)
        n = len(confidence)
        rank = np.arange(1.0, n + 1.0)
        enough = betainc(rank, n + 1.0 - rank, target_coverage) <= 1.0 - level
        if not enough.any():
            most = (1.0 - level) ** (1.0 / n)
            raise ValueError(
                f"target_coverage is {target_coverage}, but these {n} predictions can promise at most {most:.4g}"
            )
        first = int(enough.argmax())
        threshold = float(confidence.sort(descending=True).values[first])
        bound = float(betaincinv(rank[first], n + 1.0 - rank[first], 1.0 - level))
        return cls(threshold, "coverage", target_coverage, bound, level, _report(confidence >= threshold, correct, level))

    def answers(self, confidence: Float[Tensor, " b"]) -> Bool[Tensor, " b"]:
        """Return True where to answer, False where to abstain."""
        validate.ordered("confidence", confidence)
        return confidence.double() >= self.threshold

    def report(self, confidence: Float[Tensor, " b"], correct: Shaped[Tensor, " b"]) -> SelectiveReport:
        """Return coverage and error with their intervals on labeled data that played no part in the calibration."""
        confidence, correct = _check(confidence, correct, self.level)
        return _report(confidence >= self.threshold, correct, self.level)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def _upper(successes: Tensor, trials: Tensor, tail: float) -> Tensor:
    # p with P(Binomial(trials, p) ≤ successes) = tail: the (1 − tail) quantile of Beta(successes + 1, trials − successes)
    from scipy.special import betaincinv

    failures = (trials - successes).double()
    bound = betaincinv(successes.double().cpu().numpy() + 1.0, failures.clamp(min=1.0).cpu().numpy(), 1.0 - tail)
    return torch.where(failures == 0, 1.0, torch.as_tensor(bound, device=successes.device))


def _report(answered: Tensor, correct: Tensor, level: float) -> SelectiveReport:
    total, kept = len(answered), int(answered.sum())
    wrong = int((answered & ~correct).sum())
    return SelectiveReport(
        num_predictions=total,
        num_answered=kept,
        coverage=kept / total,
        coverage_interval=clopper_pearson(kept, total, level=level),
        error=wrong / kept if kept else None,
        error_interval=clopper_pearson(wrong, kept, level=level),
        level=level,
    )


def _check(confidence: Tensor, correct: Tensor, level: float) -> tuple[Tensor, Tensor]:
    check_fraction("level", level, open_ends=True)
    validate.same_length(confidence=confidence, correct=correct)
    validate.ordered("confidence", confidence)
    if not bool(((correct == 0) | (correct == 1)).all()):
        raise ValueError(
            "correct must be booleans or 0/1, because the binomial bound counts mistakes, got values in between"
        )
    return confidence.double(), correct == 1
