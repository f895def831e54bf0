"""`tune_noise` in closed form: one scale fitted to validation labels, with one pass over the data.

To first order the covariance of the logits is proportional to the variance v of the noise. It is computed once, for a noise
of variance 1; the probabilities of any other noise follow from it (`predictive.py`), and the best of a fine grid is taken.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bayesattn import metrics
from bayesattn.config import NOISE_FIELD
from bayesattn.doubt.predictive import averaged_probabilities
from bayesattn.doubt.progress import Progress
from bayesattn.doubt.tuning_result import NoiseTuning, Quality, from_deviation, set_noise
from bayesattn.doubt.uncertainty import uncertainty
from bayesattn.nn import BayesianModule
from bayesattn.objective import IGNORED_LABEL

# standard deviations of the log-noise to try, 5 % apart, from almost none to far too much; none costs a pass
DEVIATIONS = tuple(10.0 ** (-3.0 + step / 50.0) for step in range(226))


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
    """Set the noise of all parts to the value that best fits the labels; `tune_noise` documents and checks the arguments."""
    family = next(iter(parts.values())).config.family
    field = NOISE_FIELD[str(family)]
    before = {name: part.config for name, part in parts.items()}
    progress = Progress("tune_noise", len(data), quiet=quiet)
    try:
        set_noise(parts.values(), field, from_deviation(1.0, field))
        known = _run(model, data, num_classes, output, progress)
        probabilities, classes, differences, covariance, t, labels = known
        if bool((labels >= probabilities.shape[1]).any()):
            raise ValueError(f"labels must be classes from 0 to {probabilities.shape[1] - 1}, got {int(labels.max())}")

        def averaged(deviation: float) -> Float[Tensor, "b k"]:
            return averaged_probabilities(probabilities, classes, differences, covariance * deviation**2)

        def nll(deviation: float) -> float:
            return float(metrics.negative_log_likelihood(averaged(deviation), labels).mean())

        def quality(predicted: Float[Tensor, "b k"]) -> Quality:
            return Quality.of(predicted, labels, metrics.negative_log_likelihood(predicted, labels))

        values = [from_deviation(deviation, field) for deviation in DEVIATIONS] if candidates is None else candidates
        # from least noise to most
        deviations = dict(sorted(((value, from_deviation(value, field)) for value in values), key=lambda item: item[1]))
        tried = {value: nll(deviation) for value, deviation in deviations.items()}
        best = min(tried, key=lambda value: tried[value])
        set_noise(parts.values(), field, best)
        correct = metrics.correct(probabilities, labels)
        selector = None if risk is None else metrics.SelectivePredictor.for_error(t / deviations[best], correct, risk)
        result = NoiseTuning(
            parameter=field,
            values=dict.fromkeys(parts, best),
            candidates=tuple(tried),
            nll_by_value=tried,
            before=quality(probabilities),
            after=quality(averaged(deviations[best])),
            selector=selector,
            method="closed-form",
        )
    except BaseException:
        for name, part in parts.items():
            part.config = before[name]
        raise
    progress.line("; ".join(row.strip() for row in str(result).splitlines()))
    return result


def _run(
    model: nn.Module, data: list[tuple[Any, Tensor]], num_classes: int, output: Any, progress: Progress
) -> list[Tensor]:
    """Return probabilities, classes, differences, covariance, t and label of every labeled example."""
    rows: list[list[Tensor]] = []
    for number, (inputs, labels) in enumerate(data, start=1):
        result = uncertainty(model, inputs, num_classes=num_classes, output=output)
        if labels.shape != result.margin.shape:
            raise ValueError(f"labels must be one class per example for the closed form, got shape {tuple(labels.shape)}")
        keep = labels != IGNORED_LABEL
        found = (result.probabilities, result.classes, result.differences, result.covariance, result.t)
        rows.append([x[keep.to(x.device)].cpu() for x in found if x is not None] + [labels[keep].cpu()])
        progress.advance(1, f"batch {number} of {len(data)}")
    return [torch.cat(column) for column in zip(*rows, strict=True)]
