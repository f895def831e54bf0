"""`tune_noise` in closed form: one scale fitted to validation labels, without a pass through the model after the first.

To first order the covariance of the logits is proportional to the variance v of the noise. It is computed once, for a noise
of variance 1; the probabilities of any other noise follow from it (`predictive.py`), and the best is a minimum on a line.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bayesattn import metrics
from bayesattn.config import NOISE_FIELD
from bayesattn.doubt.predictive import averaged_probabilities
from bayesattn.doubt.progress import Progress
from bayesattn.doubt.tuning_result import NoiseTuning, Quality, set_noise
from bayesattn.doubt.uncertainty import uncertainty
from bayesattn.nn import BayesianModule

# standard deviations of the log-noise that are tried before the best is refined, from next to none to far too much
DEVIATIONS = tuple(float(value) for value in torch.logspace(-3.0, 1.5, 46))
REFINEMENTS = 40


def fit_noise(
    model: nn.Module,
    data: list[tuple[Any, Tensor]],
    parts: dict[str, BayesianModule],
    *,
    candidates: Sequence[float] | None,
    num_classes: int,
    risk: float | None,
    output: Callable[[Any], Tensor] | None,
    quiet: bool,
) -> NoiseTuning:
    """Set the noise of all parts to what the labels ask for; arguments as for `tune_noise`, which checks them."""
    family = next(iter(parts.values())).config.family
    field = NOISE_FIELD[str(family)]
    before = {name: part.config for name, part in parts.items()}
    progress = Progress("tune_noise", len(data), quiet=quiet)
    try:
        set_noise(parts.values(), field, _value(1.0, field))
        known = _run(model, data, num_classes, output, progress)
        probabilities, classes, differences, covariance, t, labels = known
        if bool((labels >= probabilities.shape[1]).any()):
            raise ValueError(f"labels go up to {int(labels.max())}; the model has {probabilities.shape[1]} classes")

        def averaged(deviation: float) -> Float[Tensor, "b k"]:
            return averaged_probabilities(probabilities, classes, differences, covariance * deviation**2)

        def nll(deviation: float) -> float:
            return float(metrics.negative_log_likelihood(averaged(deviation), labels).mean())

        grid = DEVIATIONS if candidates is None else tuple(_value(value, field) for value in candidates)
        tried = {deviation: nll(deviation) for deviation in grid}
        best = min(tried, key=lambda deviation: tried[deviation])
        if candidates is None:
            best = _refined(nll, grid, best)
            tried[best] = nll(best)
        value = _value(best, field)
        set_noise(parts.values(), field, value)
        correct = metrics.correct(probabilities, labels)
        selector = None if risk is None else metrics.SelectivePredictor.for_error(t / best, correct, risk)
        result = NoiseTuning(
            parameter=field,
            values=dict.fromkeys(parts, value),
            candidates=tuple(_value(deviation, field) for deviation in sorted(tried)),
            nll_by_value={_value(deviation, field): tried[deviation] for deviation in sorted(tried)},
            before=_quality(probabilities, labels),
            after=_quality(averaged(best), labels),
            selector=selector,
        )
    except BaseException:
        for name, part in parts.items():
            part.config = before[name]
        raise
    progress.line("; ".join(row.strip() for row in str(result).splitlines()))
    return result


def _value(number: float, field: str) -> float:
    """Return k for a standard deviation of the log-noise, and the other way round: π / (√6 k); σ_q is one itself."""
    return number if field == "sigma_q" else math.pi / (math.sqrt(6.0) * number)


def _run(
    model: nn.Module, data: list[tuple[Any, Tensor]], num_classes: int, output: Any, progress: Progress
) -> list[Tensor]:
    """Return probabilities, classes, differences, covariance, t and label of every labelled example."""
    rows: list[list[Tensor]] = []
    for number, (inputs, labels) in enumerate(data, start=1):
        result = uncertainty(model, inputs, num_classes=num_classes, output=output)
        if labels.shape != result.margin.shape:
            raise ValueError(f"labels have shape {tuple(labels.shape)}; closed form needs one class for each example")
        keep = labels != -100
        found = (result.probabilities, result.classes, result.differences, result.covariance, result.t)
        rows.append([x[keep.to(x.device)].cpu() for x in found if x is not None] + [labels[keep].cpu()])
        progress.advance(1, f"batch {number} of {len(data)}")
    return [torch.cat(column) for column in zip(*rows, strict=True)]


def _refined(nll: Callable[[float], float], grid: Sequence[float], best: float) -> float:
    """Return the minimum between the neighbors of the best point of a grid, by golden section on a logarithmic scale."""
    position = grid.index(best)
    low, high = (math.log(grid[min(max(position + step, 0), len(grid) - 1)]) for step in (-1, 1))
    ratio = (math.sqrt(5.0) - 1.0) / 2.0
    for _ in range(REFINEMENTS):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, right) if nll(math.exp(left)) <= nll(math.exp(right)) else (left, high)
    return math.exp(0.5 * (low + high))


def _quality(probabilities: Float[Tensor, "b k"], labels: Tensor) -> Quality:
    confidence, correct = probabilities.max(dim=-1).values, metrics.correct(probabilities, labels)
    ece = metrics.expected_calibration_error(confidence, correct)
    nll = metrics.negative_log_likelihood(probabilities, labels).mean()
    return Quality(float(nll), float(ece), float(metrics.aurc(confidence, correct)))
