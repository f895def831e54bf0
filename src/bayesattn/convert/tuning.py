"""Uncertainty without training: choose how much noise the attention of a pretrained model gets, on validation data.

The noise is the only free number of the posterior: k of the Weibull or σ_q of the lognormal. `tune_noise` picks the one
that maximises the validation log-likelihood of the M-sample predictive distribution

    (1/M) Σ_s p(y | x, S_s),   S_s ~ q

for all layers at once, or then layer by layer. With too little noise this is the deterministic model, with too much of it
a model that ignores its attention.
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
from bayesattn.nn import BayesianModule
from bayesattn.predict import _as_arguments, _find_logits, predict

IGNORED_LABEL = -100

# from a hundredth of the scores' unit of standard deviation to about one; ln E has a standard deviation of 1.28
CANDIDATES = {
    "weibull": (100.0, 50.0, 20.0, 10.0, 5.0, 3.0, 2.0, 1.0),
    "lognormal": (0.013, 0.026, 0.064, 0.13, 0.26, 0.43, 0.64, 1.3),
}
_FIELD = {"weibull": "weibull_k", "lognormal": "sigma_q"}


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
        nll_by_value: Validation NLL of every candidate, used for all layers at once.
        before: Quality of the deterministic model.
        after: Quality of the M-sample predictive with the chosen values.
    """

    parameter: str
    values: dict[str, float]
    nll_by_value: dict[float, float]
    before: Quality
    after: Quality

    def __str__(self) -> str:
        chosen = sorted(set(self.values.values()))
        rows = [
            f"{name:>6}  {getattr(self.before, name):.4f} → {getattr(self.after, name):.4f}"
            for name in ("nll", "ece", "aurc")
        ]
        return "\n".join([f"{self.parameter}: {', '.join(f'{value:g}' for value in chosen)}", *rows])


def tune_noise(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    candidates: Sequence[float] | None = None,
    num_samples: int = 20,
    seed: int = 0,
    per_layer: bool = False,
    chunk_size: int | None = None,
    output: Callable[[Any], Tensor] | None = None,
) -> NoiseTuning:
    """Set the noise of every Bayesian attention module to what predicts the validation labels best.

    All candidates are compared under the same random numbers. The choice is kept by `save_bayesian`.

    Args:
        model: A model with Bayesian attention of one family; its configs are replaced, nothing else.
        batches: Validation data, gone through several times: pairs (inputs, labels), or mappings with `labels`. Labels are
            classes, aligned with the logits; −100 is ignored.
        candidates: Values to try; None takes eight that span almost none to a lot.
        num_samples: M of the predictive.
        seed: Same seed, same result.
        per_layer: After the best common value, go once through the layers and keep what improves each.
        chunk_size: Samples per forward pass, as in `predict`; 1 for a graph, whose nodes cannot be repeated like a batch.
        output: Gets the logits out of what the model returns, as in `predict`.

    Raises:
        ValueError: Nothing is stochastic, families are mixed, or the data are empty; the model is unchanged.
    """
    parts = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, BayesianModule) and module.config.is_stochastic
    }
    families = {part.config.family for part in parts.values()}
    if len(families) != 1:
        raise ValueError(f"model has attention of the families {sorted(map(str, families))}; allowed: exactly one")
    family = str(families.pop())
    grid = tuple(float(value) for value in (CANDIDATES[family] if candidates is None else candidates))
    if not grid or not all(0.0 < value < math.inf for value in grid):
        raise ValueError(f"candidates is {candidates!r}; allowed: numbers above 0, at least one")
    data = [_inputs_and_labels(batch) for batch in batches]
    if not any((labels != IGNORED_LABEL).any() for _, labels in data):
        raise ValueError("batches hold no label; allowed: at least one batch with a label that is not -100")

    def evaluate(num: int) -> tuple[Tensor, Tensor]:
        return _evaluate(model, data, num, seed, chunk_size, output)

    before = {name: part.config for name, part in parts.items()}
    try:
        deterministic = _quality(*_evaluate(model, data, None, seed, chunk_size, output))
        scores = {}
        for value in grid:
            _set(parts.values(), _FIELD[family], value)
            scores[value] = _nll(*evaluate(num_samples))
        best = min(scores, key=scores.__getitem__)
        _set(parts.values(), _FIELD[family], best)
        values = dict.fromkeys(parts, best)
        if per_layer:
            _tune_layers(parts, values, _FIELD[family], grid, scores[best], lambda: _nll(*evaluate(num_samples)))
        after = _quality(*evaluate(num_samples))
    except BaseException:
        for name, part in parts.items():
            part.config = before[name]
        raise
    return NoiseTuning(_FIELD[family], values, scores, deterministic, after)


def _tune_layers(
    parts: dict[str, BayesianModule],
    values: dict[str, float],
    field: str,
    grid: Sequence[float],
    best_nll: float,
    nll: Callable[[], float],
) -> None:
    for name, part in parts.items():
        for value in grid:
            if value == values[name]:
                continue
            _set([part], field, value)
            score = nll()
            if score < best_nll:
                best_nll, values[name] = score, value
        _set([part], field, values[name])


def _set(parts: Iterable[BayesianModule], field: str, value: float) -> None:
    for part in parts:
        part.config = dataclasses.replace(part.config, **{field: value})


def _evaluate(
    model: nn.Module,
    data: list[tuple[Any, Tensor]],
    num_samples: int | None,
    seed: int,
    chunk_size: int | None,
    output: Callable[[Any], Tensor] | None,
) -> tuple[Float[Tensor, "s b c"], Int[Tensor, " b"]]:
    """Return logits of all labelled predictions under M draws, or of the deterministic model for None."""
    logits, labels = [], []
    for i, (inputs, target) in enumerate(data):
        if num_samples is None:
            drawn = _mean_logits(model, inputs, output)
        else:
            drawn = predict(model, inputs, num_samples, seed + i, chunk_size, output=output).logits
        if drawn.shape[1:-1] != target.shape:
            raise ValueError(
                f"labels have shape {tuple(target.shape)}; allowed beside these logits: {tuple(drawn.shape[1:-1])}"
            )
        keep = (target != IGNORED_LABEL).flatten()
        logits.append(drawn.flatten(1, -2)[:, keep])
        labels.append(target.flatten()[keep])
    return torch.cat(logits, dim=1), torch.cat(labels)


@torch.no_grad()
def _mean_logits(model: nn.Module, inputs: Any, output: Callable[[Any], Tensor] | None) -> Float[Tensor, "1 b *c"]:
    args, kwargs = _as_arguments(inputs)
    was_training = model.training
    try:
        return (output or _find_logits)(model.eval()(*args, **kwargs)).unsqueeze(0)
    finally:
        model.train(was_training)


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
