"""Ways to rank one model's answers from most to least certain, and the measures of a ranking.

All rankings order the same answers: those of the fine-tuned model as it is. So accuracy is the same in every row, and rows
differ only in the order. Nothing is chosen on test texts: temperatures and scales are fitted to validation labels.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bayesattn import metrics
from bayesattn.doubt.predictive import averaged_probabilities
from bayesattn_recipes.doubt.gradients import PLACES

# candidate factors of the default noise's standard deviation, chosen by validation labels, for averaged probabilities
SCALES = tuple(10.0 ** (step / 20.0) for step in range(-40, 61, 3))
# validation texts that a scale is fitted to; more than two classes are averaged over many points
FITTED_ON = 500
BASELINE = "own confidence"
FLAGSHIP = "closed form"
# measurements that a study may leave out: the beginning of the names of the rows that need one, and an array that it writes
OPTIONAL = {
    "draws": ("attention draws", "attention20.t"),
    "dropout": ("MC dropout", "dropout20.t"),
    "laplace": ("last-layer Laplace", "laplace.t"),
    "controls": ("control", PLACES[0]),
}
# for other tasks: the standard deviation alone and, for SQuAD 2.0, the score of the best span minus that of "no answer"
DEVIATION, NULL_SCORE = "standard deviation", "null score"

Found = Mapping[str, Tensor]
Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """The results of one model, and those of the models of the other seeds for the same texts.

    Attributes:
        found: From `examine`.
        others: The same for all seeds of the task, this one first.
    """

    found: Found
    others: Sequence[Found]

    def get(self, split: str, key: str) -> Tensor:
        """Return an array of a split."""
        return self.found[f"{split}.{key}"]

    def correct(self, split: str) -> Bool[Tensor, " n"]:
        """Whether the model's answers are right."""
        return self.get(split, "logits").argmax(dim=1) == self.get(split, "labels")

    def margin(self, split: str) -> Float[Tensor, " n"]:
        """Difference of the two largest logits."""
        first, second = self.get(split, "logits").double().topk(2, dim=1).values.unbind(dim=1)
        return first - second

    def averaged(self, split: str, scale: float, most: int | None = None) -> Float[Tensor, "n c"]:
        """Class probabilities averaged over noise of `scale` times the default deviation, of the first `most` texts."""
        parts = (self.get(split, name)[:most] for name in ("logits", "classes", "differences", "covariance"))
        logits, classes, differences, covariance = parts
        return averaged_probabilities(torch.softmax(logits.double(), dim=1), classes, differences, covariance * scale**2)

    @cached_property
    def fitted_scale(self) -> float:
        """The scale whose averaged probabilities have the lowest NLL on validation texts."""
        labels = self.get("validation", "labels")[:FITTED_ON]
        return min(SCALES, key=lambda s: _nll(self.averaged("validation", s, FITTED_ON), labels))

    def has(self, row: str) -> bool:
        """Whether the measurements behind a row were made, and all members of an ensemble exist."""
        if row.startswith("ensemble of "):
            return len(self.others) >= int(row.removeprefix("ensemble of "))
        return all(f"test.{key}" in self.found for start, key in OPTIONAL.values() if row.startswith(start))

    def ensemble(self, split: str, size: int) -> Float[Tensor, "n c"]:
        """Mean probabilities of the models of `size` seeds, this one among them."""
        members = [torch.softmax(found[f"{split}.logits"].double(), dim=1) for found in self.others[:size]]
        return torch.stack(members).mean(dim=0)


def _nll(probabilities: Float[Tensor, "n c"], labels: Int[Tensor, " n"]) -> float:
    return float(metrics.negative_log_likelihood(probabilities, labels).mean())


def _own(run: Run, split: str) -> Float[Tensor, "n c"]:
    return torch.softmax(run.get(split, "logits").double(), dim=1)


def _fitted(run: Run, split: str) -> Float[Tensor, "n c"]:
    return run.averaged(split, run.fitted_scale)


def _drawn(kind: str) -> Callable[[Run, str], Tensor]:
    return lambda run, split: run.get(split, f"{kind}.mean")


# rows that give probabilities; these are also measured by NLL and ECE, before and after a temperature
PREDICTIVES: dict[str, Callable[[Run, str], Float[Tensor, "n c"]]] = {
    BASELINE: _own,
    "closed form, scale fitted": _fitted,
    "attention draws, 20: mean": _drawn("attention20"),
    "attention draws, 100: mean": _drawn("attention100"),
    "MC dropout, 20: mean": _drawn("dropout20"),
    "last-layer Laplace: mean": _drawn("laplace"),
    "ensemble of 3": lambda run, split: run.ensemble(split, 3),
    "ensemble of 5": lambda run, split: run.ensemble(split, 5),
}


def _closed_form(run: Run, split: str, layers: float = 1.0) -> Float[Tensor, " n"]:
    """Return margin / std, counting the first share of the layers."""
    variance = run.get(split, "layers").double()
    kept = variance[:, : round(layers * variance.shape[1])].sum(dim=1)
    return run.margin(split) / kept.clamp(min=1e-30).sqrt()


def _place(place: str) -> Callable[[Run, str], Tensor]:
    return lambda run, split: run.margin(split) / run.get(split, place).double().clamp(min=1e-30).sqrt()


def _loss_gradient(run: Run, split: str) -> Float[Tensor, " n"]:
    """Return minus the norm of the gradient of the answer's own loss (Oberdiek et al., 2018), exact for two classes."""
    return -(1.0 - _own(run, split).max(dim=1).values) * run.get(split, "parameters").double().sqrt()


def _confidence(of: Callable[[Run, str], Tensor]) -> Callable[[Run, str], Tensor]:
    return lambda run, split: -metrics.entropy(of(run, split).double())


def _scaled(run: Run, split: str) -> Float[Tensor, " n"]:
    temperature = metrics.fit_temperature(run.get("validation", "logits"), run.get("validation", "labels"))
    return metrics.apply_temperature(run.get(split, "logits").double(), temperature).max(dim=1).values


# certainty of every answer: higher is more certain
RANKINGS: dict[str, Callable[[Run, str], Float[Tensor, " n"]]] = {
    BASELINE: lambda run, split: _own(run, split).max(dim=1).values,
    "own entropy": _confidence(_own),
    "temperature": _scaled,
    FLAGSHIP: _closed_form,
    "closed form, lower two thirds": lambda run, split: _closed_form(run, split, 2.0 / 3.0),
    "closed form, scale fitted": _confidence(_fitted),
    "attention draws, 20: t": lambda run, split: run.get(split, "attention20.t"),
    "attention draws, 20: mutual information": lambda run, split: -run.get(split, "attention20.mi"),
    "attention draws, 100: t": lambda run, split: run.get(split, "attention100.t"),
    "attention draws, 100: mutual information": lambda run, split: -run.get(split, "attention100.mi"),
    "MC dropout, 20: t": lambda run, split: run.get(split, "dropout20.t"),
    "MC dropout, 20: mutual information": lambda run, split: -run.get(split, "dropout20.mi"),
    "MC dropout, 20: entropy": _confidence(_drawn("dropout20")),
    "last-layer Laplace: t": lambda run, split: run.get(split, "laplace.t"),
    "last-layer Laplace: entropy": _confidence(_drawn("laplace")),
    "ensemble of 3": _confidence(PREDICTIVES["ensemble of 3"]),
    "ensemble of 5": _confidence(PREDICTIVES["ensemble of 5"]),
    **{f"control: {place}": _place(place) for place in PLACES},
    "control: loss gradient": _loss_gradient,
}


def measure_ranking(certainty: Float[Tensor, " n"], correct: Bool[Tensor, " n"]) -> dict[str, float]:
    """Return AURC, the AUROC of errors, and accuracy when the least certain fifth or tenth is withheld."""
    certainty = certainty.double()
    return {
        "aurc": float(metrics.aurc(certainty, correct)),
        "auroc": float(metrics.auroc(-certainty[correct], -certainty[~correct])),
        "accuracy_80": float(metrics.selective_accuracy(certainty, correct, coverage=0.8)),
        "accuracy_90": float(metrics.selective_accuracy(certainty, correct, coverage=0.9)),
    }


def measure_predictive(of: Callable[[Run, str], Tensor], run: Run) -> dict[str, float]:
    """Return accuracy, NLL and ECE of test probabilities; NLL and ECE also after a temperature fitted on validation."""
    labels = run.get("test", "labels")
    known, asked = (of(run, split).double().clamp(min=1e-12).log() for split in ("validation", "test"))
    temperature = metrics.fit_temperature(known, run.get("validation", "labels"))
    found: dict[str, float] = {"temperature": temperature}
    for suffix, p in (("", asked.exp()), ("_scaled", metrics.apply_temperature(asked, temperature))):
        confidence, predicted = p.max(dim=1)
        found[f"nll{suffix}"] = _nll(p / p.sum(dim=1, keepdim=True), labels)
        found[f"ece{suffix}"] = float(metrics.expected_calibration_error(confidence, predicted == labels))
        found["accuracy"] = float((predicted == labels).double().mean())
    return found


def measure(run: Run) -> dict[str, dict[str, float]]:
    """Return the measures of every row that the run has."""
    correct = run.correct("test")
    rows = {name: measure_ranking(certainty(run, "test"), correct) for name, certainty in RANKINGS.items() if run.has(name)}
    for name, of in PREDICTIVES.items():
        if run.has(name):
            rows.setdefault(name, {}).update(measure_predictive(of, run))
    for name in (BASELINE, FLAGSHIP):
        inside, outside = (-RANKINGS[name](run, split).double() for split in ("test", "outside"))
        rows[name]["outside_auroc"] = float(metrics.auroc(inside, outside))
    return rows


def ranked(correct: Tensor, orders: Mapping[str, Tensor], suffix: str = "") -> list[Row]:
    """Return accuracy, and AURC of every order of the answers; the higher, the more certain."""
    rows = [{"row": "all", "measure": f"accuracy{suffix}", "value": float(correct.double().mean())}]
    for name, order in orders.items():
        rows.append(
            {"row": name, "measure": f"AURC{suffix}", "value": float(metrics.aurc(order.double(), correct.double()))}
        )
    return rows
