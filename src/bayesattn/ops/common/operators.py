"""Operators that torch.compile sees instead of the Python inside them."""

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("bayesattn", "FRAGMENT")


def operator(
    name: str,
    function: Callable[..., Any],
    *,
    fake: Callable[..., Any],
    keep: Callable[..., None] | None = None,
    differentiate: Callable[..., Any] | None = None,
) -> torch._ops.OpOverload:
    """Register a function as the operator `bayesattn::name` and return it.

    Like `torch.library.custom_op` for a function that changes no argument, without its check of every result against every
    argument: a compiled model calls operators once per layer, and the check takes the host longer than some of them.

    Args:
        name: Name of the operator.
        function: Computes it; its annotations give the schema. No result may share memory with an argument.
        fake: Returns tensors with shapes, types and strides of the results.
        keep: Saves in its first argument what `differentiate` needs, from inputs and output.
        differentiate: Returns the gradients of all inputs from the context and the gradients of all results.
    """
    _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()), tags=torch.Tag.pt2_compliant_tag)
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"bayesattn::{name}", fake, lib=_LIBRARY)
    if differentiate is not None:
        torch.library.register_autograd(f"bayesattn::{name}", differentiate, setup_context=keep, lib=_LIBRARY)
    return getattr(torch.ops.bayesattn, name).default
