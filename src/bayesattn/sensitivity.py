"""Measure how strongly a number computed by a model depends on the scores of each attention call.

    with score_sensitivity() as calls:
        d = target(model(x))                       # one number per example
    run_backward(d, calls)
    squares = [call.squares for call in calls]     # None where d does not depend on the call

Each call of a Bayesian module adds a `Call` (ALBERT runs one module twelve times). From the gradient of its output, or of
its scores where they are given, follows Σ_i (∂d/∂Φ_ij)², one value per example, head and key. Scores, and the first output,
which would need no gradient, pass through an identity with a second input, the anchor: a zero that all calls of the scope
share and that is not a parameter. The forward pass is thus bit-identical to the model's own, one backward pass through the
activations serves all layers, and parameters need no gradient.

The nodes of a graph depend on each other, so one backward pass cannot separate their squares. On edges each call has its own
anchor, which is added to the scores. Its gradient is theirs, for one number at a time; or it has a direction, and forward
mode gives the tangents of all numbers along it.
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
        anchor: The tensor that a backward pass differentiates by; on edges it is added to the scores, with gradient ∂d/∂Φ_e.
        edges: The edges, for attention on edges.
        shape: Examples, heads and keys, for dense attention.
        squares: Σ_i (∂d/∂Φ_ij)² from the last backward pass; None if it did not reach the call.
        attention: Inputs of the squares of a dot-product attention, except the gradient of its output.
    """

    module: nn.Module
    anchor: Float[Tensor, ""] | Float[Tensor, "e h"]
    edges: Edges | None = None
    shape: tuple[int, ...] = ()
    squares: Float[Tensor, "b h n"] | None = None
    attention: ScoreGradients | None = None


@contextmanager
def score_sensitivity(direction: Callable[[nn.Module, Tensor], Tensor] | None = None) -> Iterator[list[Call]]:
    """Open a scope that gives every Bayesian attention call of this thread an anchor. Scopes cannot be nested.

    Args:
        direction: For edges, returns the tangent of the scores, given the module and zeros of their shape; use it inside
            `torch.autograd.forward_ad.dual_level()`.
    """
    if is_open():
        raise RuntimeError("score_sensitivity() was opened inside score_sensitivity(); close the outer scope first")
    _local.calls, _local.direction, _local.anchor = [], direction, torch.zeros((), requires_grad=True)
    try:
        yield _local.calls
    finally:
        _local.calls = _local.direction = _local.anchor = None


def run_backward(number: Float[Tensor, " b"], calls: Sequence[Call], *, retain_graph: bool = False) -> None:
    """Run one backward pass from the sum of the numbers, and compute the squares of each call that it reaches."""
    for call in calls:
        call.squares = None
    # of the outputs themselves, because an autograd function at every call would cost the host time
    dense = [(call, call.attention) for call in calls if call.attention is not None and call.attention.output.requires_grad]
    wanted = [calls[0].anchor, *(attention.output for _, attention in dense)]
    _, *grads = torch.autograd.grad(number.sum(), wanted, allow_unused=True, retain_graph=retain_graph)
    reached = [(call, (attention, grad)) for (call, attention), grad in zip(dense, grads, strict=True) if grad is not None]
    for (call, _), squares in zip(reached, squares_of_calls([inputs for _, inputs in reached]), strict=True):
        call.squares = squares


def is_open() -> bool:
    """Return whether this thread is inside `score_sensitivity()`."""
    return getattr(_local, "calls", None) is not None


def through_scores(scores: Float[Tensor, "*bh m n"], module: nn.Module) -> Float[Tensor, "*bh m n"]:
    """Return the scores unchanged and add the call to the open scope; for any scores before a softmax."""
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

    The output may come from any implementation, because the scores are computed in the backward pass; with `heads_last` its
    heads come after its queries. `options` are mask, bias, scale and so on, as for `squared_score_gradients`.
    """
    if torch.compiler.is_compiling():
        # inside a compiled graph no tensor has a gradient of its own, so the graph ends here and a new one begins
        torch._dynamo.graph_break()
    call = _new_call(module, (*query.shape[:3], key.shape[2]))
    output = output if output.requires_grad else _Differentiable.apply(output, _local.anchor)
    call.attention = ScoreGradients(query, key, value, output, heads_last, **options)
    return output


def _new_call(module: nn.Module, shape: tuple[int, ...]) -> Call:
    b, h, _, n = shape
    call = Call(module, _local.anchor, shape=(b, h, n))
    _local.calls.append(call)
    return call


class _ThroughScores(torch.autograd.Function):
    """Identity on scores; its backward squares their gradient, sums over queries and stores the result in the call."""

    @staticmethod
    def forward(ctx, scores: Tensor, anchor: Tensor, call: Call) -> Tensor:
        ctx.call = call
        return scores.view_as(scores)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        ctx.call.squares = grad.to(torch.promote_types(grad.dtype, torch.float32)).square().sum(dim=-2)
        return grad, None, None


class _Differentiable(torch.autograd.Function):
    """Identity whose result has a gradient, because the anchor has one."""

    @staticmethod
    def forward(ctx, x: Tensor, anchor: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return None, None
