"""PAvPU: is the model certain when it is right and uncertain when it is wrong (App. C.2.1; Mukhoti and Gal, 2018)?

    PAvPU = mean_i [ Acc_i Cer_i + (1 − Acc_i)(1 − Cer_i) ],   Cer_i = 1 if p_i ≤ threshold else 0

Accuracies may be fractions, as in VQA. The number means nothing without the test, the space it was done in, the number of
samples M and the threshold (as M grows every difference is significant and PAvPU tends to the accuracy), so results carry
all four.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from bayesattn.metrics import validate
from bayesattn.metrics.bootstrap import bootstrap_mean
from bayesattn.metrics.significance import ClassTask, Space, Test, top_two_p_value
from bayesattn.scalars import check_count, check_fraction

THRESHOLDS = (0.01, 0.05, 0.1)


@dataclass(frozen=True)
class PAvPU:
    """One PAvPU with everything needed to compare it to another.

    Attributes:
        value: PAvPU, from 0 to 1.
        threshold: A prediction is certain if its p-value is at most this.
        num_samples: M, draws behind every p-value.
        test: Which test gave the p-values.
        space: Whether probabilities or logits were tested.
        certain_fraction: Share of predictions that are certain.
        num_predictions: How many predictions were averaged.
        low: Lower end of the bootstrap interval over predictions.
        high: Upper end.
        confidence: Level of the interval.

    Example:
        >>> samples = torch.tensor([[[0.7, 0.3]], [[0.6, 0.4]], [[0.65, 0.35]]])  # three draws that agree
        >>> result = pavpu_by_threshold(samples, torch.tensor([1.0]), [0.05])[0]
        >>> result.value, result.threshold, result.num_samples, result.test
        (1.0, 0.05, 3, 'paired')
    """

    value: float
    threshold: float
    num_samples: int
    test: Test
    space: Space
    certain_fraction: float
    num_predictions: int
    low: float
    high: float
    confidence: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def pavpu(
    accuracy: Shaped[Tensor, " b"], p_value: Float[Tensor, " b"], threshold: float | Sequence[float] = 0.05
) -> Float[Tensor, "*t"]:
    """Return PAvPU at one threshold, or at each of several.

    Args:
        accuracy: Acc_i of the predicted answers: boolean, 0/1 or fractions.
        p_value: From `top_two_p_value`.
        threshold: One number (the result is a scalar) or several (the result has one entry each).

    Example:
        >>> right, p_value = torch.tensor([1.0, 1.0, 0.0]), torch.tensor([0.01, 0.5, 0.5])
        >>> pavpu(right, p_value)  # certain and right, uncertain and right, uncertain and wrong
        tensor(0.6667, dtype=torch.float64)
        >>> pavpu(right, p_value, [0.05, 0.001])
        tensor([0.6667, 0.3333], dtype=torch.float64)
    """
    terms = pavpu_terms(accuracy, p_value, [threshold] if isinstance(threshold, int | float) else threshold)
    value = terms.mean(dim=0)
    return value.squeeze(0) if isinstance(threshold, int | float) else value


def pavpu_by_threshold(
    samples: Float[Tensor, "s b c"],
    accuracy: Shaped[Tensor, " b"],
    thresholds: Sequence[float] = THRESHOLDS,
    *,
    test: Test = "paired",
    space: Space = "probability",
    task: ClassTask = "multiclass",
    num_resamples: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
) -> list[PAvPU]:
    """Return PAvPU with a bootstrap interval at every threshold: the curve over thresholds.

    Args:
        samples: Probabilities (or logits, see `space`) of M draws.
        accuracy: Acc_i of the predicted answers.
        thresholds: Where to cut the p-values.
        test: See `top_two_p_value`.
        space: See `top_two_p_value`.
        task: See `top_two_p_value`.
        num_resamples: Bootstrap resamples of the predictions.
        confidence: Level of the interval.
        seed: Seed of the resampling.

    Example:
        >>> samples = torch.tensor([[[0.7, 0.3]], [[0.6, 0.4]], [[0.65, 0.35]]])  # three draws, p = 0.035
        >>> [(result.threshold, result.value) for result in pavpu_by_threshold(samples, torch.tensor([1.0]))]
        [(0.01, 0.0), (0.05, 1.0), (0.1, 1.0)]
    """
    p_value = top_two_p_value(samples, test=test, space=space, task=task)
    terms = pavpu_terms(accuracy, p_value, thresholds)
    intervals = bootstrap_mean(terms, num_resamples=num_resamples, confidence=confidence, seed=seed)
    return [
        PAvPU(
            value=float(value),
            threshold=float(threshold),
            num_samples=samples.shape[0],
            test=test,
            space=space,
            certain_fraction=float((p_value <= threshold).double().mean()),
            num_predictions=len(p_value),
            low=float(low),
            high=float(high),
            confidence=confidence,
        )
        for value, threshold, (low, high) in zip(terms.mean(dim=0), thresholds, intervals, strict=True)
    ]


def pavpu_by_num_samples(
    samples: Float[Tensor, "s b c"],
    accuracy: Shaped[Tensor, " b"],
    num_samples: Sequence[int],
    threshold: float = 0.05,
    **options: Any,
) -> list[PAvPU]:
    """Return PAvPU from the first M draws for every M in `num_samples`: the curve over M.

    Args:
        samples: Probabilities (or logits, see `space`) of at least max(num_samples) draws.
        accuracy: Acc_i of the predicted answers; the same for every M, so only the p-values change.
        num_samples: The values of M, each at least 2.
        threshold: Where to cut the p-values.
        **options: As for `pavpu_by_threshold`.

    Example:
        >>> samples = torch.tensor([[[0.7, 0.3]], [[0.6, 0.4]], [[0.65, 0.35]]])
        >>> results = pavpu_by_num_samples(samples, torch.tensor([1.0]), [2, 3])
        >>> [(result.num_samples, result.value) for result in results]  # two draws are too few to be certain
        [(2, 0.0), (3, 1.0)]
    """
    for draws in num_samples:
        check_count("num_samples", draws, least=2)
        if draws > samples.shape[0]:
            raise ValueError(f"num_samples must be at most {samples.shape[0]}, the number of draws, got {draws}")
    return [pavpu_by_threshold(samples[:draws], accuracy, [threshold], **options)[0] for draws in num_samples]


def pavpu_terms(
    accuracy: Shaped[Tensor, " b"], p_value: Float[Tensor, " b"], thresholds: Sequence[float]
) -> Float[Tensor, "b t"]:
    """Return Acc_i Cer_i + (1 − Acc_i)(1 − Cer_i) for every prediction and threshold; PAvPU is its mean."""
    validate.same_length(accuracy=accuracy, p_value=p_value)
    if len(thresholds) == 0:
        raise ValueError("thresholds must hold at least one number from 0 to 1, got none")
    for threshold in thresholds:
        check_fraction("threshold", threshold)
    accuracy = accuracy.double()
    validate.unit_interval("accuracy", accuracy)
    validate.unit_interval("p_value", p_value)
    certain = p_value[:, None] <= torch.as_tensor(list(thresholds), dtype=p_value.dtype, device=p_value.device)
    return torch.where(certain, accuracy[:, None], 1.0 - accuracy[:, None])
