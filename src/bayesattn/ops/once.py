"""A decorator for custom backward passes that have no second derivative."""

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
    """Make a backward pass raise an error under `create_graph=True`.

    torch's decorator of the same name raises only if the second derivative runs through the decorated function alone. If
    another path leads to the same parameters, `torch.autograd.grad` silently omits this one.
    """

    @functools.wraps(backward)
    def wrapper(ctx: _Context, *grads: _Grads.args, **named: _Grads.kwargs) -> _Result:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True: fused attention has first derivatives only. Use backend='reference', or "
                "need_weights=True in nn.MultiheadAttention, or attn_implementation='eager' in a transformers model"
            )
        return backward(ctx, *grads, **named)

    return wrapper
