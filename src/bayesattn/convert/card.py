"""The model card: README.md beside a saved model, with the uncertainty that was measured."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bayesattn.files import write_bytes
from bayesattn.metrics import aurc, bootstrap_statistic, correct, risk_coverage
from bayesattn.scalars import check_fraction

CARD_FILE = "README.md"
_BEGIN, _END = "<!-- bayesattn: this section is written by save_bayesian -->", "<!-- bayesattn: end -->"


@dataclass(frozen=True, kw_only=True)
class MeasuredUncertainty:
    """How well a model's confidence and its doubt find its errors on labeled data that it was not trained on.

        doubt = ba.uncertainty(model, batch)
        measured = MeasuredUncertainty.of(doubt.probabilities, doubt.score, labels, data="SST-2, validation", risk=0.05)
        save_bayesian(model, "folder", whole=True, measured=measured)

    Attributes:
        data: What it was measured on.
        num_examples: Number of examples.
        accuracy: Share of correct answers.
        aurc_confidence: Area under the risk-coverage curve, ranked by the largest probability; lower is better.
        aurc_doubt: The same, ranked by doubt.
        difference_interval: 95 % bootstrap interval of `aurc_doubt − aurc_confidence`, over the examples.
        risk: Accepted error rate of the answers.
        coverage_confidence: Largest share of the examples that can be answered at this risk, ranked by confidence.
        coverage_doubt: The same, ranked by doubt.

    Example:
        >>> probabilities = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3], [0.4, 0.6]])
        >>> score, labels = torch.tensor([0.1, 0.2, 0.9, 0.3]), torch.tensor([0, 1, 1, 1])  # it doubts its one error
        >>> measured = MeasuredUncertainty.of(probabilities, score, labels, data="four sentences")
        >>> measured.coverage_confidence, measured.coverage_doubt
        (0.5, 0.75)
    """

    data: str
    num_examples: int
    accuracy: float
    aurc_confidence: float
    aurc_doubt: float
    difference_interval: tuple[float, float]
    risk: float
    coverage_confidence: float
    coverage_doubt: float

    @classmethod
    def of(
        cls,
        probabilities: Float[Tensor, "b c"],
        score: Float[Tensor, " b"],
        labels: Int[Tensor, " b"],
        *,
        data: str,
        risk: float = 0.05,
    ) -> "MeasuredUncertainty":
        """Measure confidence and doubt on labeled examples.

        Args:
            probabilities: Probabilities of the model as it is, `ba.uncertainty(...).probabilities` of all batches.
            score: `ba.uncertainty(...).score`; higher is less certain.
            labels: The true classes.
            data: What these examples are, for the reader of the card.
            risk: Accepted error rate of the answers.
        """
        check_fraction("risk", risk)
        probabilities, score, labels = (value.detach().cpu() for value in (probabilities, score, labels))
        right, confidence = correct(probabilities, labels), probabilities.amax(dim=1)
        interval = bootstrap_statistic(
            lambda sure, doubt, accuracy: aurc(-doubt, accuracy) - aurc(sure, accuracy), confidence, score, right
        )
        return cls(
            data=data,
            num_examples=len(labels),
            accuracy=float(right.mean()),
            aurc_confidence=float(aurc(confidence, right)),
            aurc_doubt=float(aurc(-score, right)),
            difference_interval=(float(interval[0]), float(interval[1])),
            risk=risk,
            coverage_confidence=_coverage(confidence, right, risk),
            coverage_doubt=_coverage(-score, right, risk),
        )


def _coverage(confidence: Float[Tensor, " b"], right: Float[Tensor, " b"], risk: float) -> float:
    curve = risk_coverage(confidence, right)
    kept = torch.nonzero(curve.risk <= risk)
    return float(curve.coverage[kept[-1]]) if len(kept) else 0.0


def write_card(folder: Path, model: str, variants: Sequence[str], where: str, measured: MeasuredUncertainty | None) -> None:
    """Write README.md, or this library's section of an existing one; the rest of that file is kept.

    Args:
        folder: Where the model is saved.
        model: Its class.
        variants: Variants of its attention modules, one for each.
        where: The argument of `load_bayesian` that reads it.
        measured: The numbers of the table; None leaves it out.
    """
    path = folder / CARD_FILE
    section = f"{_BEGIN}\n{_section(model, variants, where, measured)}{_END}\n"
    if path.is_file():
        before = path.read_text(encoding="utf-8")
        own = re.compile(f"{re.escape(_BEGIN)}.*?{re.escape(_END)}\n?", re.DOTALL)
        # a function, so backslashes in the section are not taken for group references
        text = own.sub(lambda _: section, before, count=1) if own.search(before) else f"{before.rstrip()}\n\n{section}"
    else:
        text = f"---\nlibrary_name: bayesattn\ntags:\n- bayesattn\n- uncertainty\n---\n\n# {model}\n\n{section}"
    write_bytes(path, text.encode())


def _section(model: str, variants: Sequence[str], where: str, measured: MeasuredUncertainty | None) -> str:
    kinds = ", ".join(f"{variants.count(kind)} × {kind}" for kind in dict.fromkeys(variants))
    lines = [
        "## Uncertainty",
        "",
        f"The attention of this model can be sampled (bayesattn, {kinds}). Without sampling its answers are those of the "
        f"plain `{model}`. `ba.uncertainty` says which of them to trust, from one backward pass:",
        "",
        "```python",
        "import bayesattn as ba",
        "",
        f"ba.load_bayesian(model, {json.dumps(where)})  # model: a plain {model}",
        "doubt = ba.uncertainty(model, batch)",
        "print(doubt.label, doubt.score)  # higher score: less certain",
        "```",
        "",
    ]
    if measured is not None:
        low, high = measured.difference_interval
        data = " ".join(measured.data.split()).replace("<", "&lt;")
        lines += [
            f"Measured on {measured.num_examples:,} examples ({data}), accuracy {measured.accuracy:.1%}:",
            "",
            f"| answers ranked by | AURC (lower is better) | answered at {measured.risk:.1%} wrong answers |",
            "|---|--:|--:|",
            f"| confidence | {measured.aurc_confidence:.4f} | {measured.coverage_confidence:.1%} |",
            f"| doubt | {measured.aurc_doubt:.4f} | {measured.coverage_doubt:.1%} |",
            "",
            f"AURC of doubt minus AURC of confidence: 95 % interval {low:+.4f} to {high:+.4f}, by bootstrap over the "
            "examples. The last column describes these examples and promises nothing about others.",
            "",
        ]
    return "\n".join(lines)
