"""`ba.uncertainty`: which answers of an attention model to trust, without training it and without drawing from it."""

from itertools import combinations
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bayesattn import checks
from bayesattn.config import AttentionConfig
from bayesattn.convert.modes import evaluating
from bayesattn.doubt import closed_form
from bayesattn.doubt.result import Uncertainty
from bayesattn.doubt.targets import Number, Output, Target, settle
from bayesattn.prediction import as_arguments, predict

Method = Literal["closed-form", "draws"]


def uncertainty(
    model: nn.Module,
    inputs: Any,
    *,
    target: Target = "margin",
    config: AttentionConfig | None = None,
    method: Method = "closed-form",
    num_samples: int = 20,
    num_classes: int = 2,
    seed: int = 0,
    output: Output = None,
) -> Uncertainty:
    """Say how far attention noise would move each answer of a batch; the model and its answers stay as they are.

        Var d ≈ Σ_l v_l Σ_hij (∂d/∂Φ_lhij)²,    t = d / √Var d

    with Φ_l the scores of attention call l and v = π²/(6k²) or σ_q² the variance of their noise. One forward and one
    backward pass; with torch's own `nn.MultiheadAttention`, whose fused path has no gradient, one more forward pass for
    the exact answers. Ranking answers by `score` needs no choice of noise: k and σ_q only scale `std` and `t`.

    Args:
        model: A trained model, plain or with Bayesian attention: everything `bayesianize` takes. A plain one is converted
            for the call. Afterwards parameters, gradients, modes, hooks and random generators are what they were.
        inputs: One batch, as for `predict`: a tensor, a sequence of positional or a mapping of keyword arguments.
        target: What the variance is of. `margin`: the difference of the two largest logits. A class, or a tensor with one
            class per example: its logit. `value`: the output of a regression. `span`: the margin of the best span of
            `start_logits` and `end_logits` over the next best. Or a function from the model's outputs to one number per
            example.
        config: Noise for a plain model; None is Weibull noise with k = 5. A Bayesian model has its own.
        method: `closed-form`, or `draws` for the standard deviation over `num_samples` sampled passes, to compare.
        num_samples: M of the p-value, and of the draws.
        num_classes: c, the most probable classes whose logits' covariance is computed, in c(c−1)/2 backward passes; it
            matters for `averaged_probabilities` alone.
        seed: Of the draws.
        output: Gets the logits out of what the model returns, as in `predict`.

    Raises:
        ValueError: Something does not fit; the message says what. The model is unchanged.
        RuntimeError: Called inside `torch.inference_mode()`.

    Example:
        >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> model = nn.Sequential(layer, nn.Flatten(), nn.Linear(5 * 8, 3))
        >>> result = uncertainty(model, torch.randn(4, 5, 8))
        >>> result.std.shape, result.by_token.shape, list(result.by_layer)
        (torch.Size([4]), torch.Size([4, 5]), ['0.self_attn'])
    """
    checks.choice("method", method, ("closed-form", "draws"))
    if not isinstance(num_samples, int) or num_samples < 2:
        raise ValueError(f"num_samples is {num_samples!r}; a p-value needs an integer of at least 2")
    if not isinstance(num_classes, int) or num_classes < 2:
        raise ValueError(f"num_classes is {num_classes!r}; give an integer of at least 2")
    if method == "draws":
        return _from_draws(model, inputs, target, config, num_samples, seed, output)
    settled: list[Number] = []

    def numbers(outputs: Any) -> list:
        number = settle(target, output, outputs, num_classes)
        settled.append(number)
        return [number.of] if number.classes is None else [number.difference(*pair) for pair in _pairs(num_classes)]

    values, found = closed_form.variances(model, inputs, config, numbers)
    result = {"value": values[0], **closed_form.parts(found[0])}
    if settled[0].classes is not None:
        result["differences"] = torch.stack(values[: num_classes - 1], dim=1)
        result["covariance"] = _covariance([closed_form.total(calls) for calls in found], num_classes)
    return _result(settled[0], num_samples, **result)


def _pairs(num_classes: int) -> list[tuple[int, int]]:
    """Return the first class with each other, then the others with each other."""
    return list(combinations(range(num_classes), 2))


def _covariance(variances: list[Tensor], num_classes: int) -> Float[Tensor, "b others others"]:
    """Return the covariance of u_a = z_1 − z_a from all variances: 2 C_ab = V_a + V_b − Var(z_a − z_b)."""
    by_pair = dict(zip(_pairs(num_classes), variances, strict=True))
    others = range(1, num_classes)
    rows = [
        [by_pair[0, a] if a == b else (by_pair[0, a] + by_pair[0, b] - by_pair[min(a, b), max(a, b)]) / 2.0 for b in others]
        for a in others
    ]
    return torch.stack([torch.stack(row, dim=-1) for row in rows], dim=-2)


def _from_draws(model, inputs, target, config, num_samples, seed, output) -> Uncertainty:
    with closed_form.bayesian(model, config):
        args, kwargs = as_arguments(inputs)
        with torch.no_grad(), evaluating(model):
            outputs = model(*args, **kwargs)
            number = settle(target, output, outputs)
            value = number.of(outputs)
        draws = predict(model, inputs, num_samples, seed, task="regression", output=number.of).samples
    return _result(number, num_samples, value=value, std=draws.std(dim=0), by_layer={}, by_head={}, by_token=None)


def _result(number: Number, num_samples: int, **doubt: Any) -> Uncertainty:
    return Uncertainty(
        probabilities=None if number.probabilities is None else number.probabilities.detach(),
        label=number.label,
        num_samples=num_samples,
        is_margin=number.is_margin,
        classes=number.classes,
        **doubt,
    )
