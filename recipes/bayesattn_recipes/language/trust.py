"""When to trust an answer: if its probability reaches a threshold, chosen on validation data for a stated error rate.

`bayesattn evaluate` chooses the threshold and keeps it in `metrics.json`; `bayesattn predict` applies and explains it. The
guarantee is that of `metrics.SelectivePredictor`, for new texts like those of the validation split; a little
optimistic if training chose its epoch by that split (`training.keep`).
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtyping import Float, Shaped
from torch import Tensor

from bayesattn.evaluation.runs import METRICS_FILE, METRICS_SCHEMA
from bayesattn.files import RunError, read_json
from bayesattn.metrics import SelectivePredictor
from bayesattn_recipes.common.config import build_config

# targets for the share of wrong answers among the trusted ones: the first that the validation data can guarantee is used.
# Trying several is valid, because the bounds hold for all thresholds at once
TARGETS = (0.05, 0.1, 0.2)
LEVEL = 0.95


@dataclass(frozen=True)
class TrustRule:
    """Which answers to trust.

    Attributes:
        threshold: Smallest probability of a trusted answer; None if no error rate can be promised.
        error: The promise: at most this share of the trusted answers is wrong.
        level: Probability that the promise holds, over the draw of the validation texts.
        num_samples: Draws behind each probability; the rule holds for this number.
        num_examples: Validation texts.
        coverage: Share of them that is trusted.
    """

    threshold: float | None
    error: float
    level: float
    num_samples: int
    num_examples: int
    coverage: float

    def __str__(self) -> str:
        about = f"{100 * self.error:g} % of the trusted answers are wrong"
        if self.threshold is None:
            return f"no answer is marked: {self.num_examples} validation texts cannot promise that at most {about}"
        return (
            f"trust means a probability of at least {self.threshold:.3f}: at most {about}, for texts like the "
            f"{self.num_examples} of the validation split ({100 * self.level:g} % sure), of which "
            f"{100 * self.coverage:.0f} % are trusted"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return dataclasses.asdict(self)


def choose_rule(confidence: Float[Tensor, " n"], correct: Shaped[Tensor, " n"], num_samples: int) -> TrustRule:
    """Return the rule with the smallest error rate of `TARGETS` that these validation answers can promise.

    Args:
        confidence: Probability of every answer, averaged over the draws.
        correct: Whether it is right.
        num_samples: Draws behind every probability.
    """
    for target in TARGETS:
        try:
            found = SelectivePredictor.for_error(confidence, correct, target, level=LEVEL)
        except ValueError:
            continue
        # if everything is trusted, the threshold is below all numbers, but a probability is at least 0
        return TrustRule(max(found.threshold, 0.0), target, LEVEL, num_samples, len(confidence), found.calibration.coverage)
    return TrustRule(None, TARGETS[-1], LEVEL, num_samples, len(confidence), 0.0)


def read_rule(folder: Path, method: str) -> TrustRule | None:
    """Return the rule of a run for one way to draw; None if `bayesattn evaluate` has not chosen one."""
    path = folder / METRICS_FILE
    if not path.exists():
        return None
    methods = read_json(path, METRICS_SCHEMA).get("methods")
    found = methods.get(method) if isinstance(methods, dict) else None
    values = found.get("trust") if isinstance(found, dict) else None
    if values is None:
        return None
    try:
        return build_config(TrustRule, values, "trust")
    except (TypeError, ValueError, AttributeError) as error:
        raise RunError(f"{path} cannot be used ({error}). Run `bayesattn evaluate {folder}` again") from None
