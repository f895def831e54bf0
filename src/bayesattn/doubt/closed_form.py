"""The variance that attention noise gives to a number, to first order: Var d ≈ Σ_l v_l Σ_hij (∂d/∂Φ_lhij)².

The noise on a score is g = ln E / k or σ_q ε (`noise.log_noise`), independent over entries, with variance v. A mean that a
whole row shares cancels in the softmax. Examples of a batch do not mix, so the gradient of Σ_b d_b separates by example, and
one backward pass through the activations gives all of them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bayesattn.config import AttentionConfig
from bayesattn.convert.hosted import HostedAttention
from bayesattn.doubt.temporary import bayesian
from bayesattn.modes import evaluating
from bayesattn.nn import BayesianModule, MultiheadAttention
from bayesattn.noise import log_noise_variance
from bayesattn.precision import upcast
from bayesattn.prediction import as_arguments
from bayesattn.sensitivity import Call, run_backward, score_sensitivity


@dataclass(frozen=True)
class CallVariance:
    """What one attention call adds to the variance.

    Attributes:
        name: Name of its module in the model.
        variance: Variance by head and key.
        has_positions: Whether the keys are those of the whole sequence; False where an example was cut into windows.
    """

    name: str
    variance: Float[Tensor, "b h n"]
    has_positions: bool


@contextmanager
def _without_parameter_gradients(modules: list[nn.Module]) -> Iterator[None]:
    """Switch parameter gradients off, so activations that only they need are not kept."""
    # a parameter that two modules share is in the list twice, which is harmless
    held = [parameter for module in modules if module._parameters for parameter in module._parameters.values()]
    learned = [parameter for parameter in held if parameter is not None and parameter.requires_grad]
    try:
        for parameter in learned:
            parameter.requires_grad = False
        yield
    finally:
        for parameter in learned:
            parameter.requires_grad = True


@dataclass(frozen=True)
class Measured:
    """A model with noise, in eval mode, and its inputs.

    Attributes:
        model: The model.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        names: Its stochastic attention modules.
        modules: All of its modules: walking through a model takes as long as running some of its layers.
    """

    model: nn.Module
    args: tuple
    kwargs: dict[str, Any]
    names: dict[BayesianModule, str]
    modules: list[nn.Module]

    @property
    def is_graph(self) -> bool:
        """Whether it attends along edges."""
        return any(part.on_edges for part in self.names)

    def run(self) -> Any:
        """Return the model's outputs."""
        return self.model(*self.args, **self.kwargs)

    def run_measured(self, direction: Callable[[nn.Module, Tensor], Tensor] | None = None) -> tuple[Any, list[Call]]:
        """Return outputs with a graph and the attention calls behind them."""
        with _without_parameter_gradients(self.modules), torch.enable_grad(), score_sensitivity(direction) as calls:
            outputs = self.run()
        if not calls:
            raise ValueError(f"none of the {len(self.names)} attention modules ran in the model's forward pass")
        return outputs, calls


@contextmanager
def measuring(model: nn.Module, inputs: Any, config: AttentionConfig | None) -> Iterator[Measured]:
    """Open a scope in which a model can be measured; afterwards it is unchanged.

    Args:
        model: With Bayesian attention, or without.
        inputs: As for `predict`.
        config: Noise for a model without Bayesian attention.
    """
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "called inside torch.inference_mode(), where no gradient exists. Leave it (torch.no_grad() is fine)"
        )
    args, kwargs = as_arguments(inputs)
    if any(isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == 0 for value in (*args, *kwargs.values())):
        raise ValueError("inputs has a tensor of length 0. The batch needs at least one example")
    with bayesian(model, config) as (names, modules), evaluating(model, modules):
        yield Measured(model, tuple(args), dict(kwargs), names, modules)


Numbers = Callable[[Any], list[Callable[[Any], Float[Tensor, " b"]]]]


def variances(measured: Measured, numbers: Numbers) -> tuple[list[Float[Tensor, " b"]], list[list[CallVariance]]]:
    """Run the model once, and backwards once per number.

    Args:
        measured: A model whose examples do not mix.
        numbers: Given the outputs of the model as it is, returns the functions of outputs whose variance to compute.

    Returns:
        The numbers of the model as it is, and for each the variance of every attention call.
    """
    plain = None
    if any(isinstance(part, MultiheadAttention) for part in measured.names):
        # torch's module has a fused path in eval mode, which rounds differently from the path that is measured
        with torch.no_grad():
            plain = measured.run()
    outputs, calls = measured.run_measured()
    plain = outputs if plain is None else plain
    values: list[Tensor] = []
    found: list[list[CallVariance]] = []
    with torch.enable_grad():
        wanted = numbers(plain)
        for function in wanted:
            number = function(outputs)
            found.append(_backward(number, calls, measured.names, is_last=len(found) + 1 == len(wanted)))
            values.append((number if plain is outputs else function(plain)).detach())
    return values, found


def require_number(number: Any) -> None:
    """Raise unless `number` is one number per example that can be differentiated."""
    if not isinstance(number, Tensor) or number.ndim != 1 or not number.is_floating_point():
        shown = f"shape {tuple(number.shape)}, {number.dtype}" if isinstance(number, Tensor) else type(number).__name__
        raise ValueError(f"target must return one floating-point number per example, got {shown}")
    if not number.requires_grad:
        raise ValueError(
            "target does not depend on the attention: it was detached, rounded or computed outside of torch, or the model's "
            "forward pass runs under torch.no_grad"
        )


def _backward(number: Float[Tensor, " b"], calls: list[Call], names: dict[Any, str], *, is_last: bool) -> list[CallVariance]:
    require_number(number)
    run_backward(number, calls, retain_graph=not is_last)
    if all(call.squares is None for call in calls):
        raise ValueError(
            "no gradient of the target arrived at any attention call. Either the target does not depend on attention, or "
            "quantized layers lie between, which pass no gradient. Use the model in float32"
        )
    squares = [number.new_zeros(call.shape) if call.squares is None else call.squares for call in calls]
    levels = [log_noise_variance(call.module.config) for call in calls]  # type: ignore[arg-type]
    alike = _stacked(squares) if len(set(levels)) == 1 else None
    scaled = [x * level for x, level in zip(squares, levels, strict=True)] if alike is None else (alike * levels[0]).unbind()
    examples = number.shape[0]
    return [_of_examples(call, x, examples, names[call.module]) for call, x in zip(calls, scaled, strict=True)]


def require_meaning(
    what: str, numbers: Sequence[Tensor], std: Float[Tensor, " b"] | None = None, *, num_keys: int = 1
) -> None:
    """Raise where a deviation would mean nothing: on NaN or infinity, and if no gradient arrived at any score.

    A model with finite answers may still have non-finite gradients, where it divides by 0 or masks everything. Called last,
    and for all tensors at once, because on a GPU the host has to wait for the answer.

    Args:
        what: Describes `numbers` in the message.
        numbers: What the deviation belongs to.
        std: The deviation.
        num_keys: The most keys of an attention call. With one key its weight is 1 whatever the score is.
    """
    gradients = [] if std is None else [std]
    groups = ((what, numbers), ("the gradients of the target in the attention scores contain", gradients))
    flat = [upcast(x.detach()).flatten().to(numbers[0].device) for x in (*numbers, *gradients)]
    is_finite = torch.isfinite(torch.cat(flat)).all()
    arrived = is_finite if std is None or num_keys < 2 else flat[-1].any()
    is_finite, arrived = torch.stack([is_finite, arrived]).tolist()
    if not is_finite:
        found = next(name for name, tensors in groups if not all(bool(torch.isfinite(x).all()) for x in tensors))
        raise ValueError(f"{found} NaN or infinity; the uncertainty of such a prediction is undefined")
    if not arrived:
        raise ValueError(
            "the gradient of the target is 0 at every attention score. Quantized layers pass no gradient, and half "
            "precision may round it to 0. Use the model in float32"
        )


def _of_examples(call: Call, variance: Float[Tensor, "w h n"], examples: int, name: str) -> CallVariance:
    """Give every example its own entries: a model may have cut each into windows, one after another."""
    entries = variance.shape[0]
    if entries == examples:
        return CallVariance(name, variance, True)
    batch = call.module.batch if isinstance(call.module, HostedAttention) else None
    # a model that was given these examples has cut them itself; one that was given several of them at once (two texts of a
    # pair, one after the other) has not, and which entries belong together is unknown
    is_cut = batch is not None and examples in (batch.examples, batch.whole)
    if not is_cut or entries % examples:
        raise ValueError(
            f"{name!r} attends over a batch of {entries}, but the target has {examples} numbers, so it is unknown which "
            "entries belong to which example, and examples must not mix. Call this with one example at a time"
        )
    return CallVariance(name, variance.unflatten(0, (examples, -1)).sum(dim=1), False)


def most_keys(found: list[CallVariance]) -> int:
    """Return the number of keys of the call that has most."""
    return max(call.variance.shape[-1] for call in found)


def total(found: list[CallVariance]) -> Float[Tensor, " b"]:
    """Return the variance of every example."""
    return _sum(_each_sum([call.variance for call in found], (-2, -1)))


def parts(found: list[CallVariance]) -> dict[str, Any]:
    """Return `std`, `by_layer`, `by_head` and `by_token` of a `Doubt` from the calls' variances."""
    heads = _each_sum([call.variance for call in found], (-1,))
    by_head: dict[str, Tensor] = {}
    for call, of_call in zip(found, heads, strict=True):
        by_head[call.name] = by_head[call.name] + of_call if call.name in by_head else of_call
    layers = _each_sum(heads if len(by_head) == len(found) else [*by_head.values()], (-1,))
    by_layer = dict(zip(by_head, layers, strict=True))
    return {"std": _sum(layers).sqrt(), "by_layer": by_layer, "by_head": by_head, "by_token": by_token(found)}


def by_token(found: list[CallVariance]) -> Float[Tensor, "b n"] | None:
    """Return the variance by key position, where all calls attend to one sequence; else None."""
    if len({call.variance.shape[-1] for call in found}) != 1 or not all(call.has_positions for call in found):
        return None
    return _sum(_each_sum([call.variance for call in found], (-2,)))


def _stacked(tensors: Sequence[Tensor] | Tensor) -> Tensor | None:
    """Return the tensors stacked, if they are alike: the layers of most models are, and one operation then serves all."""
    if isinstance(tensors, Tensor):
        return tensors
    is_alike = len({(x.shape, x.dtype, x.device) for x in tensors}) == 1
    return torch.stack([*tensors]) if is_alike else None


def _each_sum(tensors: Sequence[Tensor] | Tensor, dims: tuple[int, ...]) -> Sequence[Tensor] | Tensor:
    """Return the sum of each tensor over the axes `dims`, counted from the end; tensors that are alike give one tensor."""
    alike = _stacked(tensors)
    return [x.sum(dim=dims) for x in tensors] if alike is None else alike.sum(dim=dims)


def _sum(tensors: Sequence[Tensor] | Tensor) -> Tensor:
    """Return the sum, on the device of the first: layers may be on several."""
    if isinstance(tensors, Tensor):
        return tensors.sum(dim=0)
    return torch.stack([x.to(tensors[0].device) for x in tensors]).sum(dim=0)
