"""How strongly a number at the end of a model depends on the scores of every attention call.

    with score_sensitivity() as calls:
        d = target(model(x))                       # one number per example
    torch.autograd.grad(d.sum(), calls[0].anchor, allow_unused=True)
    squares = [call.squares for call in calls]     # None where d does not depend on the call

Every Bayesian module that runs inside the scope adds a `Call`. Its output passes through an identity with a second input,
the anchor, a zero that all calls of the scope share and that belongs to no parameter. In the backward pass the identity
writes Σ_i (∂d/∂Φ_ij)² into its call: one value per example, head and key. So the forward pass is the model's own to the
last bit, one backward pass through the activations gives all layers, and parameters need no gradient. One entry per call:
ALBERT runs one module twelve times.

Nodes of a graph mix, so their squares cannot be added up on the way. There every call has an anchor that is added to the
scores of the edges: its gradient is theirs, one number at a time; or it has a direction, and the number's tangent along
it is asked for.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from bayesattn.ops.attention.score_gradients import kept_log_sum_exp, squared_score_gradients
from bayesattn.ops.segment.edges import Edges

_local = threading.local()


@dataclass(eq=False)
class Call:
    """One attention call inside `score_sensitivity()`.

    Attributes:
        module: Who made it.
        anchor: What a backward pass differentiates by; on edges it is part of the scores, and its gradient is ∂d/∂Φ_e.
        edges: The edges, where it is on some.
        shape: Examples, heads and keys, where it is not on edges.
        squares: Σ_i (∂d/∂Φ_ij)² of the last backward pass that came through; None before.
    """

    module: nn.Module
    anchor: Float[Tensor, ""] | Float[Tensor, "e h"]
    edges: Edges | None = None
    shape: tuple[int, ...] = ()
    squares: Float[Tensor, "b h n"] | None = None


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


def is_open() -> bool:
    """Whether this thread is inside `score_sensitivity()`."""
    return getattr(_local, "calls", None) is not None


def through_scores(scores: Float[Tensor, "*bh m n"], module: nn.Module) -> Float[Tensor, "*bh m n"]:
    """Return the scores as they are, and add the call to the open scope. For scores of any kind, before the softmax."""
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
    output: Float[Tensor, "b h m dv"],
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    value: Float[Tensor, "b hk n dv"],
    module: nn.Module,
    **options: Any,
) -> Float[Tensor, "b h m dv"]:
    """Return the output of a dot-product attention as it is, and add the call to the open scope.

    Args:
        output: Computed by whoever computes it: the scores are only needed in the backward pass, and formed there.
        query: Queries.
        key: Keys.
        value: Values.
        module: Who made the call.
        options: Mask, bias, scale and so on, as for `squared_score_gradients`.
    """
    tensors = (query.detach(), key.detach(), value.detach())
    call = _new_call(module, (*query.shape[:3], key.shape[2]))
    return _ThroughAttention.apply(output, _local.anchor, *tensors, kept_log_sum_exp(output), call, options)


def _new_call(module: nn.Module, shape: tuple[int, ...]) -> Call:
    b, h, _, n = shape
    call = Call(module, _local.anchor, shape=(b, h, n))
    _local.calls.append(call)
    return call


class _ThroughScores(torch.autograd.Function):
    """Identity on scores; what passes on the way back is squared, summed over queries and given to the call."""

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
    """Identity on an attention output; the call is given what the output's gradient says about the scores."""

    @staticmethod
    def forward(ctx, output, anchor, query, key, value, log_sum_exp: Tensor | None, call: Call, options: dict) -> Tensor:
        # the output is the very tensor that a fused attention keeps for its own backward pass
        ctx.save_for_backward(query, key, value, output, log_sum_exp)
        ctx.call, ctx.options = call, options
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        ctx.call.squares = squared_score_gradients(grad, *ctx.saved_tensors, **ctx.options)
        return grad, None, None, None, None, None, None, None
