"""The variance that attention noise gives to a number, to first order: Var d ≈ Σ_l v_l Σ_hij (∂d/∂Φ_lhij)².

The noise on a score is g = ln E / k or σ_q ε (`noise.log_noise`), independent over entries, with variance v. A mean that a
whole row shares cancels in the softmax. Examples of a batch do not mix, so the gradients of Σ_b d_b are every example's own,
and one backward pass through the activations gives all of them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bayesattn.config import AttentionConfig
from bayesattn.convert import bayesianize, restore
from bayesattn.convert.adapters import converted_modules
from bayesattn.convert.hosted import HostedAttention
from bayesattn.convert.modes import evaluating
from bayesattn.nn import BayesianModule, MultiheadAttention
from bayesattn.noise import log_noise_variance
from bayesattn.prediction import as_arguments
from bayesattn.sensitivity import Call, score_sensitivity

# what a model that is not Bayesian gets for the call; without a KL it needs no prior, so nothing is added to it
DEFAULT = AttentionConfig("BAM-NOKL")


@dataclass(frozen=True)
class CallVariance:
    """What one attention call adds to the variance.

    Attributes:
        name: Of its module in the model.
        variance: By head and key.
        has_positions: Whether the keys are those of the whole sequence; not where an example was cut into windows.
    """

    name: str
    variance: Float[Tensor, "b h n"]
    has_positions: bool


@contextmanager
def bayesian(model: nn.Module, config: AttentionConfig | None) -> Iterator[dict[BayesianModule, str]]:
    """Give the stochastic attention modules by name; a model that has none is converted for the time of the scope.

    Raises:
        ValueError: The model is Bayesian and a config is given as well, or it cannot be converted.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}; give a torch.nn.Module")
    if any(isinstance(module, BayesianModule) for module in model.modules()):
        if config is not None:
            raise ValueError("config is given and the model is Bayesian already; leave it out, or call restore(model) first")
        yield _stochastic(model)
        return
    bayesianize(model, DEFAULT if config is None else config)
    try:
        yield _stochastic(model)
    finally:
        restore(model)


def _stochastic(model: nn.Module) -> dict[BayesianModule, str]:
    # a converted host has the Bayesian part as a child; people know the host's name
    names = {part: name for name, _, part in converted_modules(model)}
    for name, module in model.named_modules():
        if isinstance(module, BayesianModule):
            names.setdefault(module, name)
    found = {part: name for part, name in names.items() if part.config.is_stochastic}
    if not found:
        raise ValueError(
            f"the attention of this {type(model).__name__} is converted to 'soft', which has no noise; call restore(model)"
        )
    sampling = [name for part, name in found.items() if part.samples_in_eval]
    if sampling:
        raise ValueError(f"{sampling[0]!r} is being sampled; call this outside `with ba.sampling(model)`")
    return found


@contextmanager
def _without_parameter_gradients(model: nn.Module) -> Iterator[None]:
    """Switch gradients of parameters off: activations that only they need are then not kept."""
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in learned:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in learned:
            parameter.requires_grad_(True)


def variances(
    model: nn.Module,
    inputs: Any,
    config: AttentionConfig | None,
    numbers: Callable[[Any], list[Callable[[Any], Float[Tensor, " b"]]]],
) -> tuple[list[Float[Tensor, " b"]], list[list[CallVariance]]]:
    """Run the model once, and backwards once per number.

    Args:
        model: With Bayesian attention, or without.
        inputs: As for `predict`.
        config: Noise for a model without Bayesian attention.
        numbers: Given the outputs of the model as it is, returns the functions of outputs whose variance is wanted.

    Returns:
        The numbers of the model as it is, and for each the variance of every attention call.
    """
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "called inside torch.inference_mode(), where no gradient exists; leave it (torch.no_grad() is fine)"
        )
    args, kwargs = as_arguments(inputs)
    if any(isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == 0 for value in (*args, *kwargs.values())):
        raise ValueError("inputs has a tensor of length 0; the batch needs at least one example")
    with bayesian(model, config) as names, evaluating(model):
        edges = [name for part, name in names.items() if part.on_edges]
        if edges:
            raise ValueError(
                f"{edges[0]!r} attends along the edges of a graph, whose nodes' answers mix; use method='draws'"
            )
        plain = None
        if any(isinstance(part, MultiheadAttention) for part in names):
            # torch's module has a fused path in eval mode, which rounds in another way than the one that is measured
            with torch.no_grad():
                plain = model(*args, **kwargs)
        with _without_parameter_gradients(model), torch.enable_grad():
            with score_sensitivity() as calls:
                outputs = model(*args, **kwargs)
            if not calls:
                raise ValueError(f"none of the {len(names)} attention modules ran in the model's forward pass")
            plain = outputs if plain is None else plain
            wanted = numbers(plain)
            found = [_backward(number(outputs), calls, names) for number in wanted]
            return [number(plain).detach() for number in wanted], found


def _backward(number: Float[Tensor, " b"], calls: list[Call], names: dict[Any, str]) -> list[CallVariance]:
    if not isinstance(number, Tensor) or number.ndim != 1 or not number.is_floating_point():
        shown = f"shape {tuple(number.shape)}, {number.dtype}" if isinstance(number, Tensor) else type(number).__name__
        raise ValueError(f"target gave {shown}; it must give one floating-point number per example")
    if not bool(torch.isfinite(number).all()):
        raise ValueError("target gave NaN or infinity; nothing can be said about such a prediction")
    if not number.requires_grad:
        raise ValueError("target does not depend on the attention: it was detached, rounded or computed outside of torch")
    squares = torch.autograd.grad(number.sum(), [call.anchor for call in calls], allow_unused=True, retain_graph=True)
    found = []
    for call, square in zip(calls, squares, strict=True):
        square = torch.zeros_like(call.anchor) if square is None else square
        found.append(_of_examples(call, square.detach(), number.shape[0], names[call.module]))
    return found


def _of_examples(call: Call, square: Float[Tensor, "w h n"], examples: int, name: str) -> CallVariance:
    """Give every example its own entries: a model may have cut each into windows, one after another."""
    variance = square * log_noise_variance(call.module.config)  # type: ignore[arg-type]
    entries = variance.shape[0]
    if entries == examples:
        return CallVariance(name, variance, True)
    windows = isinstance(call.module, HostedAttention) and call.module.batch is not None
    if not windows or entries % examples:
        raise ValueError(
            f"{name!r} attends over a batch of {entries} and the target has {examples} numbers; examples must not mix"
        )
    return CallVariance(name, variance.unflatten(0, (examples, -1)).sum(dim=1), False)


def total(found: list[CallVariance]) -> Float[Tensor, " b"]:
    """Return the variance of every example."""
    return torch.stack([call.variance.sum(dim=(1, 2)).to(found[0].variance.device) for call in found]).sum(dim=0)


def parts(found: list[CallVariance]) -> dict[str, Any]:
    """Return `std`, `by_layer`, `by_head` and `by_token` of a `Doubt` from the calls' variances."""
    by_head: dict[str, Tensor] = {}
    for call in found:
        heads = call.variance.sum(dim=-1)
        by_head[call.name] = by_head[call.name] + heads if call.name in by_head else heads
    by_layer = {name: heads.sum(dim=-1) for name, heads in by_head.items()}
    return {"std": total(found).sqrt(), "by_layer": by_layer, "by_head": by_head, "by_token": by_token(found)}


def by_token(found: list[CallVariance]) -> Float[Tensor, "b n"] | None:
    """Return the variance by key position, where all calls attend to one sequence; else None."""
    if len({call.variance.shape[-1] for call in found}) != 1 or not all(call.has_positions for call in found):
        return None
    return torch.stack([call.variance.sum(dim=1).to(found[0].variance.device) for call in found]).sum(dim=0)
