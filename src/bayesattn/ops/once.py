"""An error for custom backward passes that cannot be differentiated again."""

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import torch

_Context = TypeVar("_Context")
_Grads = ParamSpec("_Grads")
_Result = TypeVar("_Result")


def once_differentiable(
    backward: Callable[Concatenate[_Context, _Grads], _Result],
) -> Callable[Concatenate[_Context, _Grads], _Result]:
    """Refuse `create_graph=True`.

    torch's decorator of this name raises only where the second derivative runs through the marked function alone. Where
    another path leads to the same parameters, `torch.autograd.grad` silently leaves this one out.
    """

    @functools.wraps(backward)
    def wrapper(ctx: _Context, *grads: _Grads.args, **named: _Grads.kwargs) -> _Result:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True: fused attention has first derivatives only. Use backend='reference'; for "
                "nn.MultiheadAttention need_weights=True, for a transformers model attn_implementation='eager'"
            )
        return backward(ctx, *grads, **named)

    return wrapper
