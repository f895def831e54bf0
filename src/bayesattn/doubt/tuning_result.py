"""What `tune_noise` returns, and how a model is set to a chosen noise."""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from bayesattn import metrics
from bayesattn.nn import BayesianModule

# standard deviation of the log-noise from which on a draw changes a weight e-fold, more than any linearization can follow
SMALL = 1.0


@dataclass(frozen=True)
class Quality:
    """Quality of the predictions on the validation data: mean NLL in nats, expected calibration error, AURC."""

    nll: float
    ece: float
    aurc: float

    @classmethod
    def of(cls, probabilities: Float[Tensor, "b k"], labels: Int[Tensor, " b"], nll: Float[Tensor, " b"]) -> "Quality":
        """Measure predictions whose NLL is given."""
        confidence, correct = probabilities.max(dim=-1).values, metrics.correct(probabilities, labels)
        ece = metrics.expected_calibration_error(confidence, correct)
        return cls(float(nll.mean()), float(ece), float(metrics.aurc(confidence, correct)))


@dataclass(frozen=True)
class NoiseTuning:
    """What `tune_noise` found.

    Attributes:
        parameter: `weibull_k` or `sigma_q`.
        values: Its chosen value for every Bayesian attention module, by name.
        candidates: The values to choose from, from least noise to most.
        nll_by_value: Validation NLL of the candidates that were tried, each used for all layers at once.
        before: Quality of the deterministic model.
        after: Quality of the M-sample predictive with the chosen values; in closed form, of the averaged probabilities.
        selector: With `risk`, which answers to give: `selector.answers(uncertainty(model, inputs).t)`.
        method: `draws` or `closed-form`. The values of the closed form calibrate `averaged_probabilities`, which are of
            linearized logits; they are not for draws, for which they may be far too much noise.

    Example:
        >>> before, after = Quality(0.52, 0.08, 0.05), Quality(0.49, 0.04, 0.04)
        >>> tuning = NoiseTuning("weibull_k", {"attention": 10.0}, (100.0, 10.0), {100.0: 0.51, 10.0: 0.49}, before, after)
        >>> tuning.at_edge
        'weibull_k = 10 is the most noise of all candidates; more may be better: give candidates=[...]'
    """

    parameter: str
    values: dict[str, float]
    candidates: tuple[float, ...]
    nll_by_value: dict[float, float]
    before: Quality
    after: Quality
    selector: metrics.SelectivePredictor | None = None
    method: str = "draws"

    @property
    def at_edge(self) -> str | None:
        """A note if the choice is the first or the last candidate, beyond which nothing was tried; else None."""
        least, most = self.candidates[0], self.candidates[-1]
        if least == most:
            return None
        if most in self.values.values():
            found = f"{self.parameter} = {most:g} is the most noise of all candidates"
            return found if self.is_large else f"{found}; more may be better: give candidates=[...]"
        if least in self.values.values():
            return f"{self.parameter} = {least:g} is the least noise of all candidates: the data ask for hardly any"
        return None

    @property
    def is_large(self) -> bool:
        """Whether the closed form chose noise that is not small, so that draws with it are other than the probabilities."""
        deviation = max(from_deviation(value, self.parameter) for value in self.values.values())
        return self.method == "closed-form" and deviation > SMALL

    def __str__(self) -> str:
        chosen = sorted(set(self.values.values()))
        rows = [
            f"{name:>6}  {getattr(self.before, name):.4f} → {getattr(self.after, name):.4f}"
            for name in ("nll", "ece", "aurc")
        ]
        notes = [] if self.at_edge is None else [self.at_edge]
        if self.is_large:
            notes.append("this noise is not small: use averaged_probabilities with it, not draws")
        return "\n".join([f"{self.parameter}: {', '.join(f'{value:g}' for value in chosen)}", *rows, *notes])


def set_noise(parts: Iterable[BayesianModule], field: str, value: float) -> None:
    """Replace one number in the configs of Bayesian modules."""
    for part in parts:
        part.config = dataclasses.replace(part.config, **{field: value})


def from_deviation(number: float, field: str) -> float:
    """Return k for a standard deviation of the log-noise, or the reverse: π / (√6 k); σ_q is itself a standard deviation."""
    return number if field == "sigma_q" else math.pi / (math.sqrt(6.0) * number)
