"""Uncertainty without training: choose how much noise the attention of a pretrained model gets, on validation data.

The noise is the only free number of the posterior: k of the Weibull or σ_q of the lognormal. `tune_noise` picks the one
that maximizes the validation log-likelihood of the M-sample predictive distribution

    (1/M) Σ_s p(y | x, S_s),   S_s ~ q

for all layers at once, or then layer by layer. With too little noise this is the deterministic model, with too much of it
a model that ignores its attention. In between the NLL falls and then rises, so a golden-section search finds its minimum
on the ordered candidates without trying them all.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bayesattn import metrics
from bayesattn.batching import BatchDims
from bayesattn.config import NOISE_FIELD
from bayesattn.doubt.calibration import fit_noise
from bayesattn.doubt.progress import Progress
from bayesattn.doubt.tuning_result import NoiseTuning, Quality, set_noise
from bayesattn.modes import evaluating
from bayesattn.nn import BayesianModule
from bayesattn.objective import IGNORED_LABEL
from bayesattn.prediction import as_arguments, find_logits, predict
from bayesattn.scalars import check_choice, check_fraction

# from least noise to most: the standard deviation of the log-noise, 1.28/k or σ, goes from 0.013 to 2.6.
# Twelve, because five evaluations find the best of that many
CANDIDATES = {
    "weibull": (100.0, 50.0, 30.0, 20.0, 10.0, 7.0, 5.0, 3.0, 2.0, 1.5, 1.0, 0.5),
    "lognormal": (0.013, 0.026, 0.043, 0.064, 0.13, 0.18, 0.26, 0.43, 0.64, 0.85, 1.3, 2.6),
}


def tune_noise(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    method: Literal["draws", "closed-form"] = "draws",
    candidates: Sequence[float] | None = None,
    num_samples: int = 20,
    seed: int = 0,
    per_layer: bool = False,
    chunk_size: int | None = None,
    batch_dims: BatchDims | None = None,
    output: Callable[[Any], Tensor] | None = None,
    num_classes: int = 2,
    risk: float | None = None,
    quiet: bool = False,
) -> NoiseTuning:
    """Set the noise of every Bayesian attention module to the value that predicts the validation labels best.

    All candidates are compared under the same random numbers. `save_bayesian` keeps the choice. Every candidate that is
    tried prints a line on stderr, with the time left.

    Args:
        model: A model with Bayesian attention of one family; its configs are replaced, nothing else.
        batches: Validation data, read once into memory: pairs (inputs, labels), or mappings with `labels`. Labels are
            classes, aligned with the logits; −100 is ignored.
        method: `draws`, or `closed-form`: every batch is run once, forwards and backwards (`uncertainty`), and the noise
            that gives the averaged probabilities the lowest NLL is found without another pass. This noise calibrates
            `uncertainty(...).averaged_probabilities` only. It is not for draws, whose predictions it may ruin.
        candidates: Values to choose from. None: for `draws` twelve, from almost no noise to a lot, of which five are tried;
            in closed form a fine grid.
        num_samples: M in the predictive distribution.
        seed: Same seed, same result.
        per_layer: After finding the best common value, go through the layers once and move each while that improves it.
        chunk_size: With `batch_dims`, the most draws per forward pass, as in `predict`.
        batch_dims: The batch axis of the inputs, as in `predict`: 0 in batch-first models. None draws one by one.
        output: Extracts the logits from the model's output, as in `predict`.
        num_classes: In closed form, the number of classes whose logits' covariance is used, as in `uncertainty`.
        risk: In closed form, the largest acceptable error rate: `selector` of the result is then the threshold on t that
            answers the most, with a guarantee from the same data (`metrics.SelectivePredictor.for_error`).
        quiet: Print nothing.

    Raises:
        ValueError: Nothing is stochastic, families are mixed, or the data are empty; the model is unchanged.

    Example:
        >>> import bayesattn as ba
        >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> model = nn.Sequential(layer, nn.Flatten(), nn.Linear(5 * 8, 3))
        >>> model = ba.bayesianize(model, ba.AttentionConfig("BAM-NOKL"))
        >>> validation = [(torch.randn(6, 5, 8), torch.tensor([0, 1, 2, 0, 1, 2]))]
        >>> tuning = tune_noise(model, validation, method="closed-form", quiet=True)
        >>> tuning.parameter, list(tuning.values)
        ('weibull_k', ['0.self_attn'])
    """
    check_choice("method", method, ("draws", "closed-form"))
    if risk is not None and method == "draws":
        raise ValueError("risk is given with method='draws'; it needs method='closed-form'")
    if per_layer and method == "closed-form":
        raise ValueError("per_layer is True with method='closed-form', which fits one scale. Use method='draws'")
    if risk is not None:
        check_fraction("risk", risk)
    parts = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, BayesianModule) and module.config.is_stochastic
    }
    families = {part.config.family for part in parts.values()}
    if not families:
        raise ValueError(
            f"model is a {type(model).__name__} without stochastic attention. Convert it first: model = "
            'ba.bayesianize(model, ba.AttentionConfig("BAM-NOKL")), and ba.restore(model) before that if it is "soft"'
        )
    if len(families) != 1:
        raise ValueError(f"all attention of the model must have one family of noise, got {sorted(map(str, families))}")
    family = str(families.pop())
    field = NOISE_FIELD[family]
    grid = {float(value) for value in (CANDIDATES[family] if candidates is None else candidates)}
    if not grid or not all(0.0 < value < math.inf for value in grid):
        raise ValueError(f"candidates must be one or more finite numbers above 0, got {candidates!r}")
    ordered = tuple(sorted(grid, reverse=family == "weibull"))
    data = [_inputs_and_labels(batch) for batch in batches]
    if not any((labels != IGNORED_LABEL).any() for _, labels in data):
        raise ValueError("batches have no label to tune on. At least one label must differ from -100")
    if method == "closed-form":
        given = None if candidates is None else ordered
        return fit_noise(
            model, data, parts, candidates=given, num_classes=num_classes, risk=risk, output=output, quiet=quiet
        )
    # most layers need two evaluations: one step in either direction, neither of which helps
    trials = most_evaluations(len(ordered)) + (2 * len(parts) if per_layer else 0)
    progress = Progress("tune_noise", len(data) * (1 + num_samples * trials), quiet=quiet)

    passes: dict[str, Any] = {"chunk_size": chunk_size, "batch_dims": batch_dims}

    def evaluate(num: int | None, doing: str) -> Quality:
        logits, labels = _evaluate(model, data, num, seed, output, progress, doing, **passes)
        nll = metrics.nll_from_logits(logits, labels)
        quality = Quality.of(torch.softmax(logits, dim=-1).mean(dim=0), labels, nll)
        progress.line(f"{doing}: NLL {quality.nll:.4f}")
        return quality

    def attempt(names: Iterable[str], position: int, found: dict[int, Quality]) -> float:
        value, names = ordered[position], list(names)
        set_noise([parts[name] for name in names], field, value)
        who = "" if len(names) == len(parts) else f"{names[0]}: "
        found[position] = evaluate(num_samples, f"{who}{field} = {value:g}")
        return found[position].nll

    before = {name: part.config for name, part in parts.items()}
    try:
        deterministic = evaluate(None, "deterministic")
        tried: dict[int, Quality] = {}
        best = search(len(ordered), lambda position: attempt(parts, position, tried))
        set_noise(parts.values(), field, ordered[best])
        values, after = dict.fromkeys(parts, ordered[best]), tried[best]
        for name in parts if per_layer else ():
            alone = {best: after}
            chosen = follow(len(ordered), best, after.nll, lambda p, n=name, found=alone: attempt([n], p, found))
            values[name], after = ordered[chosen], alone[chosen]
            set_noise([parts[name]], field, values[name])
    except BaseException:
        for name, part in parts.items():
            part.config = before[name]
        raise
    nll_by_value = {ordered[position]: tried[position].nll for position in sorted(tried)}
    result = NoiseTuning(field, values, ordered, nll_by_value, deterministic, after)
    progress.done = progress.work
    progress.line("; ".join(row.strip() for row in str(result).splitlines()))
    return result


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
    """Return logits of all labeled predictions under M draws, or of the deterministic model for None."""
    logits, labels = [], []
    for i, (inputs, target) in enumerate(data):
        if num_samples is None:
            drawn = _mean_logits(model, inputs, output)
        else:
            drawn = predict(model, inputs, num_samples, seed + i, output=output, **passes).logits
        if drawn.shape[1:-1] != target.shape:
            raise ValueError(
                f"labels must have shape {tuple(drawn.shape[1:-1])} to fit the logits, got {tuple(target.shape)}"
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


def _inputs_and_labels(batch: Any) -> tuple[Any, Tensor]:
    if isinstance(batch, Mapping) and isinstance(batch.get("labels"), Tensor):
        return {name: value for name, value in batch.items() if name != "labels"}, batch["labels"]
    if isinstance(batch, Sequence) and len(batch) == 2 and isinstance(batch[1], Tensor):
        return batch[0], batch[1]
    raise ValueError(
        f"each batch must be a pair (inputs, labels), or a mapping with a tensor 'labels', got {type(batch).__name__}"
    )


def search(num: int, score: Callable[[int], float]) -> int:
    """Return the position, below `num`, of the smallest score, if scores fall and then rise: golden section on a grid.

    Each step compares two positions inside the interval and cuts off what lies beyond the worse one. Interval lengths are
    Fibonacci numbers, so the next step can reuse one position.
    """
    scores: dict[int, float] = {}

    def at(position: int) -> float:
        if position >= num:
            return math.inf
        if position not in scores:
            found = score(position)
            # NaN compares with nothing, so it would never be replaced
            scores[position] = math.inf if math.isnan(found) else found
        return scores[position]

    # the best is strictly between `low` and `low + length`
    low, (shorter, length) = -1, _fibonacci(num)
    while length > 2:
        left, right = low + length - shorter, low + shorter
        low = low if at(left) <= at(right) else left
        shorter, length = length - shorter, shorter
    at(low + 1)
    return min(sorted(scores), key=scores.__getitem__)


def most_evaluations(num: int) -> int:
    """Return the largest number of scores that `search` computes."""
    (shorter, length), count = _fibonacci(num), 1
    while length > 2:
        shorter, length, count = length - shorter, shorter, count + 1
    return count


def _fibonacci(num: int) -> tuple[int, int]:
    """Return two consecutive Fibonacci numbers; an interval as long as the second has `num` inner positions."""
    shorter, length = 1, 2
    while length - 1 < num:
        shorter, length = length, shorter + length
    return shorter, length


def follow(num: int, start: int, best: float, score: Callable[[int], float]) -> int:
    """Step from `start`, whose score is `best`, in one direction while that helps, else in the other; return the end."""
    for way in (1, -1):
        position = start
        while 0 <= position + way < num and (found := score(position + way)) < best:
            position, best = position + way, found
        if position != start:
            return position
    return start
