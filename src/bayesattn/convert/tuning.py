"""Uncertainty without training: choose how much noise the attention of a pretrained model gets, on validation data.

The noise is the only free number of the posterior: k of the Weibull or σ_q of the lognormal. `tune_noise` picks the one
that maximises the validation log-likelihood of the M-sample predictive distribution

    (1/M) Σ_s p(y | x, S_s),   S_s ~ q

for all layers at once, or then layer by layer. With too little noise this is the deterministic model, with too much of it
a model that ignores its attention. In between the NLL falls and then rises, so a golden-section search finds its minimum
on the ordered candidates without trying them all.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bayesattn import metrics
from bayesattn.batching import BatchDims
from bayesattn.convert.modes import evaluating
from bayesattn.convert.progress import Progress
from bayesattn.convert.search import follow, most_evaluations, search
from bayesattn.nn import BayesianModule
from bayesattn.prediction import as_arguments, find_logits, predict

IGNORED_LABEL = -100

# from least noise to most: the standard deviation of the log-noise, 1.28/k or σ, goes from 0.013 to 2.6.
# Twelve, because five evaluations find the best of that many
CANDIDATES = {
    "weibull": (100.0, 50.0, 30.0, 20.0, 10.0, 7.0, 5.0, 3.0, 2.0, 1.5, 1.0, 0.5),
    "lognormal": (0.013, 0.026, 0.043, 0.064, 0.13, 0.18, 0.26, 0.43, 0.64, 0.85, 1.3, 2.6),
}
NOISE_FIELD = {"weibull": "weibull_k", "lognormal": "sigma_q"}


@dataclass(frozen=True)
class Quality:
    """How good the predictions on the validation data are: mean NLL in nats, expected calibration error, AURC."""

    nll: float
    ece: float
    aurc: float


@dataclass(frozen=True)
class NoiseTuning:
    """What `tune_noise` found.

    Attributes:
        parameter: `weibull_k` or `sigma_q`.
        values: Its chosen value for every Bayesian attention module, by name.
        candidates: What it was chosen from, from least noise to most.
        nll_by_value: Validation NLL of the candidates that were tried, each used for all layers at once.
        before: Quality of the deterministic model.
        after: Quality of the M-sample predictive with the chosen values.
    """

    parameter: str
    values: dict[str, float]
    candidates: tuple[float, ...]
    nll_by_value: dict[float, float]
    before: Quality
    after: Quality

    @property
    def at_edge(self) -> str | None:
        """What to know about a choice at an end of the candidates, beyond which nothing was tried; None elsewhere."""
        least, most = self.candidates[0], self.candidates[-1]
        if least == most:
            return None
        if most in self.values.values():
            return (
                f"{self.parameter} = {most:g} is the most noise of all candidates; more may be better: give candidates=[...]"
            )
        if least in self.values.values():
            return f"{self.parameter} = {least:g} is the least noise of all candidates: the data ask for hardly any"
        return None

    def __str__(self) -> str:
        chosen = sorted(set(self.values.values()))
        rows = [
            f"{name:>6}  {getattr(self.before, name):.4f} → {getattr(self.after, name):.4f}"
            for name in ("nll", "ece", "aurc")
        ]
        edge = [] if self.at_edge is None else [self.at_edge]
        return "\n".join([f"{self.parameter}: {', '.join(f'{value:g}' for value in chosen)}", *rows, *edge])


def tune_noise(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    candidates: Sequence[float] | None = None,
    num_samples: int = 20,
    seed: int = 0,
    per_layer: bool = False,
    chunk_size: int | None = None,
    batch_dims: BatchDims | None = None,
    output: Callable[[Any], Tensor] | None = None,
    quiet: bool = False,
) -> NoiseTuning:
    """Set the noise of every Bayesian attention module to what predicts the validation labels best.

    All candidates are compared under the same random numbers. The choice is kept by `save_bayesian`. Every candidate that
    is tried is a line on stderr, with the time left.

    Args:
        model: A model with Bayesian attention of one family; its configs are replaced, nothing else.
        batches: Validation data, gone through several times: pairs (inputs, labels), or mappings with `labels`. Labels are
            classes, aligned with the logits; −100 is ignored.
        candidates: Values to choose from; None takes twelve that span almost none to a lot, of which five are tried.
        num_samples: M of the predictive.
        seed: Same seed, same result.
        per_layer: After the best common value, go once through the layers and follow what improves each.
        chunk_size: With `batch_dims`, draws per forward pass at most, as in `predict`.
        batch_dims: The batch axis of the inputs, as in `predict`: 0 in batch-first models. None draws one by one.
        output: Gets the logits out of what the model returns, as in `predict`.
        quiet: Print nothing.

    Raises:
        ValueError: Nothing is stochastic, families are mixed, or the data are empty; the model is unchanged.
    """
    parts = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, BayesianModule) and module.config.is_stochastic
    }
    families = {part.config.family for part in parts.values()}
    if not families:
        raise ValueError(
            f"model is a {type(model).__name__} without stochastic attention; convert it first: "
            'model = ba.bayesianize(model, ba.AttentionConfig("BAM-WC")), and ba.restore(model) before that if it is "soft"'
        )
    if len(families) != 1:
        raise ValueError(f"model has attention of the families {sorted(map(str, families))}; allowed: exactly one")
    family = str(families.pop())
    field = NOISE_FIELD[family]
    grid = {float(value) for value in (CANDIDATES[family] if candidates is None else candidates)}
    if not grid or not all(0.0 < value < math.inf for value in grid):
        raise ValueError(f"candidates is {candidates!r}; allowed: numbers above 0, at least one")
    ordered = tuple(sorted(grid, reverse=family == "weibull"))
    data = [_inputs_and_labels(batch) for batch in batches]
    if not any((labels != IGNORED_LABEL).any() for _, labels in data):
        raise ValueError("batches hold no label; allowed: at least one batch with a label that is not -100")
    # of the layers most need two: a step in either direction, neither of which helps
    trials = most_evaluations(len(ordered)) + (2 * len(parts) if per_layer else 0)
    progress = Progress("tune_noise", len(data) * (1 + num_samples * trials), quiet=quiet)

    passes: dict[str, Any] = {"chunk_size": chunk_size, "batch_dims": batch_dims}

    def evaluate(num: int | None, doing: str) -> Quality:
        quality = _quality(*_evaluate(model, data, num, seed, output, progress, doing, **passes))
        progress.line(f"{doing}: NLL {quality.nll:.4f}")
        return quality

    def attempt(names: Iterable[str], position: int, found: dict[int, Quality]) -> float:
        value, names = ordered[position], list(names)
        _set([parts[name] for name in names], field, value)
        who = "" if len(names) == len(parts) else f"{names[0]}: "
        found[position] = evaluate(num_samples, f"{who}{field} = {value:g}")
        return found[position].nll

    before = {name: part.config for name, part in parts.items()}
    try:
        deterministic = evaluate(None, "deterministic")
        tried: dict[int, Quality] = {}
        best = search(len(ordered), lambda position: attempt(parts, position, tried))
        _set(parts.values(), field, ordered[best])
        values, after = dict.fromkeys(parts, ordered[best]), tried[best]
        for name in parts if per_layer else ():
            alone = {best: after}
            chosen = follow(len(ordered), best, after.nll, lambda p, n=name, found=alone: attempt([n], p, found))
            values[name], after = ordered[chosen], alone[chosen]
            _set([parts[name]], field, values[name])
    except BaseException:
        for name, part in parts.items():
            part.config = before[name]
        raise
    nll_by_value = {ordered[position]: tried[position].nll for position in sorted(tried)}
    result = NoiseTuning(field, values, ordered, nll_by_value, deterministic, after)
    progress.done = progress.work
    progress.line("; ".join(row.strip() for row in str(result).splitlines()))
    return result


def _set(parts: Iterable[BayesianModule], field: str, value: float) -> None:
    for part in parts:
        part.config = dataclasses.replace(part.config, **{field: value})


def _evaluate(
    model: nn.Module,
    data: list[tuple[Any, Tensor]],
    num_samples: int | None,
    seed: int,
    output: Callable[[Any], Tensor] | None,
    progress: Progress,
    doing: str,
    **passes: Any,
) -> tuple[Float[Tensor, "s b c"], Int[Tensor, " b"]]:
    """Return logits of all labelled predictions under M draws, or of the deterministic model for None."""
    logits, labels = [], []
    for i, (inputs, target) in enumerate(data):
        if num_samples is None:
            drawn = _mean_logits(model, inputs, output)
        else:
            drawn = predict(model, inputs, num_samples, seed + i, output=output, **passes).logits
        if drawn.shape[1:-1] != target.shape:
            raise ValueError(
                f"labels have shape {tuple(target.shape)}; allowed beside these logits: {tuple(drawn.shape[1:-1])}"
            )
        keep = (target != IGNORED_LABEL).flatten()
        logits.append(drawn.flatten(1, -2)[:, keep])
        labels.append(target.flatten()[keep])
        progress.advance(num_samples or 1, f"{doing}, batch {i + 1} of {len(data)}")
    return torch.cat(logits, dim=1), torch.cat(labels)


@torch.no_grad()
def _mean_logits(model: nn.Module, inputs: Any, output: Callable[[Any], Tensor] | None) -> Float[Tensor, "1 b *c"]:
    args, kwargs = as_arguments(inputs)
    with evaluating(model):
        return (output or find_logits)(model(*args, **kwargs)).unsqueeze(0)


def _nll(logits: Float[Tensor, "s b c"], labels: Int[Tensor, " b"]) -> float:
    return float(metrics.nll_from_logits(logits, labels).mean())


def _quality(logits: Float[Tensor, "s b c"], labels: Int[Tensor, " b"]) -> Quality:
    probabilities = torch.softmax(logits, dim=-1).mean(dim=0)
    confidence, correct = probabilities.max(dim=-1).values, metrics.correct(probabilities, labels)
    ece = metrics.expected_calibration_error(confidence, correct)
    return Quality(_nll(logits, labels), float(ece), float(metrics.aurc(confidence, correct)))


def _inputs_and_labels(batch: Any) -> tuple[Any, Tensor]:
    if isinstance(batch, Mapping) and isinstance(batch.get("labels"), Tensor):
        return {name: value for name, value in batch.items() if name != "labels"}, batch["labels"]
    if isinstance(batch, Sequence) and len(batch) == 2 and isinstance(batch[1], Tensor):
        return batch[0], batch[1]
    raise ValueError(
        f"a batch is {type(batch).__name__}; allowed: a pair (inputs, labels), or a mapping with a tensor 'labels'"
    )
