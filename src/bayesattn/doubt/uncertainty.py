"""`ba.uncertainty`: which answers of an attention model to trust, without training it and without drawing from it."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bayesattn.config import AttentionConfig
from bayesattn.doubt import closed_form, graphs
from bayesattn.doubt.result import Uncertainty
from bayesattn.doubt.targets import Number, Output, Target, require_exclusive_classes, settle
from bayesattn.doubt.temporary import bayesian
from bayesattn.modes import evaluating
from bayesattn.prediction import as_arguments, find_logits, predict
from bayesattn.scalars import check_choice, check_count

Method = Literal["closed-form", "draws", "linearized"]


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
    nodes: Sequence[int] | Tensor | None = None,
) -> Uncertainty:
    """Return how far attention noise would move each answer of a batch; the model and its answers do not change.

        Var d ≈ Σ_l v_l Σ_hij (∂d/∂Φ_lhij)²,    t = d / √Var d

    with Φ_l the scores of attention call l and v = π²/(6k²) or σ_q² the variance of their noise. One forward and one
    backward pass; with torch's own `nn.MultiheadAttention`, whose fused path has no gradient, one more forward pass for
    the exact answers. Ranking answers by `score` needs no choice of noise: k and σ_q only scale `std` and `t`.

    Args:
        model: A trained model, plain or with Bayesian attention: everything `bayesianize` takes. A plain one is converted
            for the call. Afterwards parameters, gradients, modes, hooks and random generators are as before.
        inputs: One batch, as for `predict`: a tensor, a sequence of positional or a mapping of keyword arguments.
        target: The number whose variance is computed. `margin`: the difference of the two largest logits. A class, or a
            tensor with one class per example: its logit. `value`: the output of a regression. `span`: the margin of the best
            span of `start_logits` and `end_logits` over the next best, both without padding; a span may be of any length and
            may lie in the question. Or a function from the model's outputs to one number per example.
        config: Noise for a plain model; None is Weibull noise with k = 5. A Bayesian model has its own.
        method: `closed-form`, or `draws` for the standard deviation over `num_samples` sampled passes, to compare. For
            graph models also `linearized`: draws through the linearized model (`doubt/graphs.py`), which `closed-form` uses
            automatically for more than 1024 nodes. The result's `method` says which was used.
        num_samples: M in the p-value, and the number of draws.
        num_classes: c, the number of most probable classes whose logits' covariance is computed, in c(c−1)/2 backward
            passes; it matters for `averaged_probabilities` alone.
        seed: Seed of the draws.
        output: Extracts the logits from the model's output, as in `predict`.
        nodes: For graph models, the nodes (or graphs) to look at, as positions or a boolean mask; None means all.

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
    check_choice("method", method, ("closed-form", "draws", "linearized"))
    check_count("num_samples", num_samples, least=2)
    check_count("num_classes", num_classes, least=2)
    _check_margin(model, target)
    if nodes is not None:
        target, output = _of_nodes(nodes, target, output)
    inputs = _without_labels(model, inputs, target)
    valid = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    if method == "draws":
        return _from_draws(model, inputs, target, config, num_samples, seed, output, valid)
    settled: list[Number] = []

    def numbers(outputs: Any) -> list:
        number = settle(target, output, outputs, num_classes, valid)
        settled.append(number)
        return [number.of] if number.classes is None else [number.difference(*pair) for pair in _pairs(num_classes)]

    with closed_form.measuring(model, inputs, config) as measured:
        if measured.is_graph:
            values, doubts, used = graphs.doubts(measured, numbers, linearize=method == "linearized", seed=seed)
            parts, variances = doubts[0], [doubt["std"].square() for doubt in doubts]
            # no noise reaches a node without neighbors
            num_keys = 1
        else:
            if method == "linearized" or nodes is not None:
                raise ValueError(f"method='linearized' and nodes= are for graphs; this {type(model).__name__} has no edges")
            values, found = closed_form.variances(measured, numbers)
            parts, used, num_keys = closed_form.parts(found[0]), method, closed_form.most_keys(found[0])
            variances = [parts["std"].square(), *(closed_form.total(calls) for calls in found[1:])]
    _require_meaning(settled[0], values, parts["std"], num_keys)
    result = {"value": values[0], "method": used, **parts}
    if settled[0].classes is not None:
        result["differences"] = torch.stack(values[: num_classes - 1], dim=1)
        result["covariance"] = _covariance(variances, num_classes)
    return _result(settled[0], num_samples, **result)


def _check_margin(model: nn.Module, target: Target) -> None:
    if isinstance(target, str) and target == "margin":
        require_exclusive_classes(model)


def _without_labels(model: nn.Module, inputs: Any, target: Target) -> Any:
    """Return inputs without labels, which only a function of the model's outputs may need; refuse what is not tokenized."""
    values = list(inputs.values()) if isinstance(inputs, Mapping) else inputs
    if isinstance(values, list | tuple) and values and all(isinstance(value, str | list) for value in values):
        kind = "texts" if isinstance(values[0], str) else "lists"
        raise ValueError(f'inputs has {kind} instead of tensors. Give tokenizer(texts, padding=True, return_tensors="pt")')
    # the decoder of an encoder-decoder takes its input from them
    is_encoder_decoder = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    if not isinstance(inputs, Mapping) or callable(target) or is_encoder_decoder:
        return inputs
    return {name: value for name, value in inputs.items() if name != "labels"}


def _of_nodes(nodes: Sequence[int] | Tensor, target: Target, output: Output) -> tuple[Target, Output]:
    """Return target and output restricted to the chosen nodes."""
    chosen = torch.as_tensor(nodes)
    if chosen.ndim != 1 or chosen.is_floating_point() or chosen.is_complex() or not chosen.numel():
        raise ValueError(
            f"nodes must be a list of positions or a boolean mask, got {chosen.dtype} of shape {tuple(chosen.shape)}"
        )
    find = output or find_logits

    def pick(values: Tensor) -> Tensor:
        n = len(values)
        if len(chosen) != n if chosen.dtype == torch.bool else not -n <= int(chosen.min()) <= int(chosen.max()) < n:
            raise ValueError(f"nodes must be positions of the {n} nodes, or a boolean mask of length {n}")
        picked = values[chosen.to(values.device)]
        if not len(picked):
            raise ValueError("nodes must select at least one node, got a mask without True")
        return picked

    if callable(target):
        of_all = target
        return (lambda outputs: pick(of_all(outputs))), output
    return target, lambda outputs: pick(find(outputs))


def _require_meaning(number: Number, values: list[Tensor], std: Tensor | None = None, num_keys: int = 1) -> None:
    what, tensors = ("target gave", values) if number.logits is None else ("the model's logits contain", [number.logits])
    closed_form.require_meaning(what, tensors, std, num_keys=num_keys)


def _pairs(num_classes: int) -> list[tuple[int, int]]:
    """Return all pairs of classes, those with the first class first."""
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


def _from_draws(model, inputs, target, config, num_samples, seed, output, valid) -> Uncertainty:
    with bayesian(model, config) as (_, modules):
        args, kwargs = as_arguments(inputs)
        with torch.no_grad(), evaluating(model, modules):
            outputs = model(*args, **kwargs)
            number = settle(target, output, outputs, valid=valid)
            value = number.of(outputs)
        _require_meaning(number, [value])
        std = predict(model, inputs, num_samples, seed, task="regression", output=number.of).samples.std(dim=0)
    return _result(number, num_samples, value=value, method="draws", std=std, by_layer={}, by_head={}, by_token=None)


def _result(number: Number, num_samples: int, **doubt: Any) -> Uncertainty:
    return Uncertainty(
        probabilities=None if number.probabilities is None else number.probabilities.detach(),
        label=number.label,
        num_samples=num_samples,
        is_margin=number.is_margin,
        classes=number.classes,
        **doubt,
    )
