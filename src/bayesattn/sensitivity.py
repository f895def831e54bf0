"""How strongly a number at the end of a model depends on the scores of every attention call.

    with score_sensitivity() as calls:
        d = target(model(x))                       # one number per example
    run_backward(d, calls)
    squares = [call.squares for call in calls]     # None where d does not depend on the call

Every Bayesian module that runs inside the scope adds a `Call`. Its output passes through an identity with a second input,
the anchor, a zero that all calls of the scope share and that belongs to no parameter. In the backward pass the identity
has the gradient of its output, from which Σ_i (∂d/∂Φ_ij)² follows: one value per example, head and key. So the forward
pass is the model's own to the last bit, one backward pass through the activations gives all layers, and parameters need no
gradient. One entry per call: ALBERT runs one module twelve times.

Nodes of a graph mix, so their squares cannot be added up on the way. There every call has its own anchor, which is added to
the scores of the edges. Its gradient is theirs, one number at a time; or it has a direction, and forward mode gives the
number's tangent along it.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from bayesattn.ops.attention.score_gradients import ScoreGradients, squares_of_calls
from bayesattn.ops.segment.edges import Edges

_local = threading.local()


@dataclass(eq=False)
class Call:
    """One attention call inside `score_sensitivity()`.

    Attributes:
        module: The module that made it.
        anchor: The tensor that a backward pass differentiates by; on edges, part of the scores, with gradient ∂d/∂Φ_e.
        edges: The edges, for attention on edges.
        shape: Examples, heads and keys, for attention not on edges.
        squares: Σ_i (∂d/∂Φ_ij)² from the last backward pass that reached it; None before.
        attention: Inputs from which the squares of a dot-product attention are computed, besides its output's gradient.
        grad_output: That gradient, where it waits for other calls of its kind.
    """

    module: nn.Module
    anchor: Float[Tensor, ""] | Float[Tensor, "e h"]
    edges: Edges | None = None
    shape: tuple[int, ...] = ()
    squares: Float[Tensor, "b h n"] | None = None
    attention: ScoreGradients | None = None
    grad_output: Float[Tensor, "b h m dv"] | None = None


@contextmanager
def score_sensitivity(direction: Callable[[nn.Module, Tensor], Tensor] | None = None) -> Iterator[list[Call]]:
    """Open a scope that gives every Bayesian attention call of this thread an anchor. Scopes do not nest.

    Args:
        direction: On edges, returns the tangent of a module's scores, inside `torch.autograd.forward_ad.dual_level()`.
    """
    if is_open():
        raise RuntimeError("score_sensitivity() was opened inside score_sensitivity(); close the outer scope first")
    _local.calls, _local.direction, _local.anchor = [], direction, torch.zeros((), requires_grad=True)
    try:
        yield _local.calls
    finally:
        _local.calls = _local.direction = _local.anchor = None


def run_backward(number: Float[Tensor, " b"], calls: Sequence[Call], *, retain_graph: bool = False) -> None:
    """Run one backward pass from the sum of the numbers, and compute the squares of every call that it reaches."""
    for call in calls:
        call.squares = call.grad_output = None
    torch.autograd.grad(number.sum(), calls[0].anchor, allow_unused=True, retain_graph=retain_graph)
    reached = [
        (call, call.attention, call.grad_output)
        for call in calls
        if call.attention is not None and call.grad_output is not None
    ]
    found = squares_of_calls([(attention, grad) for _, attention, grad in reached])
    for (call, _, _), squares in zip(reached, found, strict=True):
        call.squares, call.grad_output = squares, None


def is_open() -> bool:
    """Whether this thread is inside `score_sensitivity()`."""
    return getattr(_local, "calls", None) is not None


def through_scores(scores: Float[Tensor, "*bh m n"], module: nn.Module) -> Float[Tensor, "*bh m n"]:
    """Return the scores unchanged and add the call to the open scope; for scores of any kind, before the softmax."""
    shape = scores.shape
    full = scores.reshape((*shape[:-2], *([1] * (4 - len(shape))), *shape[-2:]))
    return _ThroughScores.apply(full, _local.anchor, _new_call(module, full.shape)).reshape(shape)


def through_edges(scores: Float[Tensor, "e h"], edges: Edges, module: nn.Module) -> Float[Tensor, "e h"]:
    """Return the scores of edges plus an anchor of zeros, and add the call to the open scope."""
    zeros = torch.zeros_like(scores)
    if _local.direction is None:
        anchor = zeros.requires_grad_()
    else:
        anchor = forward_ad.make_dual(zeros, _local.direction(module, zeros))
    _local.calls.append(Call(module, anchor, edges))
    return scores + anchor


def through_attention(
    output: Float[Tensor, "b _ _ dv"],
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    value: Float[Tensor, "b hk n dv"],
    module: nn.Module,
    *,
    heads_last: bool = False,
    **options: Any,
) -> Float[Tensor, "b _ _ dv"]:
    """Return the output of a dot-product attention unchanged and add the call to the open scope.

    Args:
        output: The output, from any implementation: the scores are needed only in the backward pass and computed there.
        query: Queries.
        key: Keys.
        value: Values.
        module: The module that made the call.
        heads_last: Whether the output has its heads after the queries.
        options: Mask, bias, scale and so on, as for `squared_score_gradients`.
    """
    call = _new_call(module, (*query.shape[:3], key.shape[2]))
    call.attention = ScoreGradients(query, key, value, output, heads_last, **options)
    return _ThroughAttention.apply(output, _local.anchor, call)


def _new_call(module: nn.Module, shape: tuple[int, ...]) -> Call:
    b, h, _, n = shape
    call = Call(module, _local.anchor, shape=(b, h, n))
    _local.calls.append(call)
    return call


class _ThroughScores(torch.autograd.Function):
    """Identity on scores; their gradient is squared, summed over queries and stored in the call."""

    @staticmethod
    def forward(ctx, scores: Tensor, anchor: Tensor, call: Call) -> Tensor:
        ctx.call = call
        return scores.view_as(scores)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        ctx.call.squares = grad.to(torch.promote_types(grad.dtype, torch.float32)).square().sum(dim=-2)
        return grad, None, None


class _ThroughAttention(torch.autograd.Function):
    """Identity on an attention output; its gradient is stored in the call."""

    @staticmethod
    def forward(ctx, output: Tensor, anchor: Tensor, call: Call) -> Tensor:
        ctx.call = call
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        call = ctx.call
        if call.attention.kind(grad) is None:
            call.squares = call.attention.squares(grad)
        else:
            call.grad_output = grad
        return grad, None, None
