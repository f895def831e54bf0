"""The contextual prior's kernels as one autograd node."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from bayesattn.ops.attention.launch import Layout, aligned, layout
from bayesattn.ops.common.operators import operator
from bayesattn.ops.once import once_differentiable
from bayesattn.ops.prior import launch as launching
from bayesattn.ops.prior.launch import backward_launch, forward_launches


def log_prior(
    key: Float[Tensor, "b h n d"],
    weight_in: Float[Tensor, "networks d hidden"],
    bias_in: Float[Tensor, "networks 1 hidden"],
    weight_out: Float[Tensor, "networks hidden 1"],
    bias_out: Float[Tensor, "networks 1 1"],
    valid: Bool[Tensor, "#b #h n"] | None,
) -> Float[Tensor, "b h 1 n"]:
    """Return ln Ψ of every key in float32, as defined in `priors.ContextualPrior`."""
    run = log_prior_operator if torch.compiler.is_compiling() else _LogPrior.apply
    return run(key, weight_in, bias_in, weight_out, bias_out, valid)


def log_prior_of_nodes(
    key: Float[Tensor, "n h d"],
    weight_in: Float[Tensor, "networks d hidden"],
    bias_in: Float[Tensor, "networks 1 hidden"],
    weight_out: Float[Tensor, "networks hidden 1"],
    bias_out: Float[Tensor, "networks 1 1"],
    used: Bool[Tensor, "1 1 n"],
) -> Float[Tensor, "n h"]:
    """Return ln Ψ of every node of a graph in float32."""
    return _LogNodePrior.apply(key, weight_in, bias_in, weight_out, bias_out, used)


def _strides(valid: Tensor | None) -> tuple[int, int] | None:
    return None if valid is None else (valid.stride(0), valid.stride(1))


def _forward(key: Tensor, weights: Sequence[Tensor], valid: Tensor | None) -> Tensor:
    """Return ln Ψ, without autograd, from aligned keys, contiguous weights and the result of `_expanded`."""
    (b, h, n, _), (networks, _, hidden) = key.shape, weights[0].shape
    logits = key.new_empty((b, h, 1, n), dtype=torch.float32)
    out = torch.empty_like(logits)
    compute, normalize = forward_launches(layout(key), networks, hidden, _strides(valid))
    compute(key, *weights, logits)
    normalize(logits, logits if valid is None else valid, out)
    return out


def _expanded(valid: Tensor | None, key: Tensor) -> Tensor | None:
    if valid is None:
        return None
    valid = valid.expand(key.shape[:3])
    return valid if valid.stride(-1) == 1 else valid.contiguous()


def _backward(
    grad: Tensor, key: Tensor, weights: Sequence[Tensor], valid: Tensor | None, out: Tensor, need_key: bool
) -> tuple[Tensor | None, Tensor]:
    """Return the gradient of the keys (None if not needed), and those of the network's weights in one flat tensor."""
    networks, _, hidden = weights[0].shape
    grad_key = key.new_empty(key.shape) if need_key else None
    launch, shape = backward_launch(layout(key), networks, hidden, _strides(valid), grad.stride(), need_key)
    sums = out.new_empty(shape)
    totals = out
    if key.shape[2] > launching.MANY_KEYS:
        # a masked key may have a gradient, which must not count
        totals = (grad if valid is None else grad.where(valid.unsqueeze(2), 0.0)).sum(dim=-1)
    launch(
        key, *weights[:3], out if valid is None else valid, out, grad, totals, key if grad_key is None else grad_key, sums
    )
    return grad_key, sums.sum(dim=0)


class _LogPrior(torch.autograd.Function):
    @staticmethod
    def forward(ctx, key, weight_in, bias_in, weight_out, bias_out, valid):
        key, valid = aligned(key), _expanded(valid, key)
        weights = [weight.contiguous() for weight in (weight_in, bias_in, weight_out, bias_out)]
        out = _forward(key, weights, valid)
        ctx.save_for_backward(key, *weights, valid, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        key, *weights, valid, out = ctx.saved_tensors
        grad_key, flat = _backward(grad, key, weights, valid, out, ctx.needs_input_grad[0])
        return grad_key, *unflatten(flat, weights), None


def _forward_as_operator(
    key: Tensor, weight_in: Tensor, bias_in: Tensor, weight_out: Tensor, bias_out: Tensor, valid: Tensor | None
) -> Tensor:
    """Return the result of `_forward` for any strides."""
    weights = [weight.contiguous() for weight in (weight_in, bias_in, weight_out, bias_out)]
    return _forward(aligned(key), weights, _expanded(valid, key))


def _fake_forward(key, weight_in, bias_in, weight_out, bias_out, valid):
    return key.new_empty((*key.shape[:2], 1, key.shape[2]), dtype=torch.float32)


def _backward_as_operator(
    grad: Tensor,
    key: Tensor,
    weight_in: Tensor,
    bias_in: Tensor,
    weight_out: Tensor,
    bias_out: Tensor,
    valid: Tensor | None,
    out: Tensor,
    need_key: bool,
) -> tuple[Tensor, Tensor]:
    """Return the result of `_backward`, with an empty tensor instead of None."""
    weights = [weight.contiguous() for weight in (weight_in, bias_in, weight_out, bias_out)]
    grad_key, flat = _backward(grad, aligned(key), weights, _expanded(valid, key), out, need_key)
    return key.new_empty(0) if grad_key is None else grad_key, flat


def _fake_backward(grad, key, weight_in, bias_in, weight_out, bias_out, valid, out, need_key):
    size = sum(x.numel() for x in (weight_in, bias_in, weight_out, bias_out))
    return key.new_empty(key.shape if need_key else 0), out.new_empty(size)


log_prior_backward = operator("log_prior_backward", _backward_as_operator, fake=_fake_backward)


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs, output)
    ctx.need_key = ctx.needs_input_grad[0]


def _differentiate(ctx, grad):
    *inputs, out = ctx.saved_tensors
    grad_key, flat = log_prior_backward(grad, *inputs, out, ctx.need_key)
    return grad_key if ctx.need_key else None, *split_like(flat, inputs[1:5]), None


log_prior_operator = operator(
    "log_prior", _forward_as_operator, fake=_fake_forward, keep=_keep, differentiate=_differentiate
)


def unflatten(flat: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor]:
    """Split a flat tensor into the gradients of the network's weights."""
    # torch's function for DDP buckets is one call instead of five (a split and four views)
    grads = _unflatten_dense_tensors(flat, weights)
    return grads if weights[0].dtype == flat.dtype else [x.to(y.dtype) for x, y in zip(grads, weights, strict=True)]


def split_like(flat: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor]:
    """Do the same as `unflatten` for a compiler, whose sizes may be symbols."""
    parts = flat.split([weight.numel() for weight in weights])
    return [part.view(weight.shape).to(weight.dtype) for part, weight in zip(parts, weights, strict=True)]


def _nodes_layout(key: Tensor) -> Layout:
    """Return the layout that reads contiguous keys [nodes, heads, features] as one example with heads first."""
    n, h, d = key.shape
    return Layout((1, h, n, d), (n * h * d, d, h * d, 1), key.dtype)


def nodes_forward(key: Tensor, weights: Sequence[Tensor], used: Tensor) -> Tensor:
    """Return ln Ψ [nodes, heads] from contiguous keys and weights, without autograd."""
    n, h, _ = key.shape
    logits = key.new_empty((h, n), dtype=torch.float32)
    out = torch.empty_like(logits)
    networks, _, hidden = weights[0].shape
    compute, normalize = forward_launches(_nodes_layout(key), networks, hidden, (0, 0))
    compute(key, *weights, logits)
    normalize(logits, used, out)
    return out.t()


def nodes_backward(
    key: Tensor, weights: Sequence[Tensor], used: Tensor, out: Tensor, grad: Tensor, need_key: bool
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the keys [heads, nodes, features], None if not needed, and of the weights."""
    (n, h, d), (networks, _, hidden) = key.shape, weights[0].shape
    grad_key = key.new_empty((h, n, d)) if need_key else None
    strides = (0, grad.stride(1), 0, grad.stride(0))
    launch, shape = backward_launch(_nodes_layout(key), networks, hidden, (0, 0), strides, need_key)
    sums = out.new_empty(shape)
    # no mask, because the gradient of a node that is no edge's source is 0
    totals = grad.sum(dim=0) if n > launching.MANY_KEYS else out
    launch(key, *weights[:3], used, out, grad, totals, key if grad_key is None else grad_key, sums)
    return grad_key, *unflatten(sums.sum(dim=0), weights)


class _LogNodePrior(torch.autograd.Function):
    @staticmethod
    def forward(ctx, key, weight_in, bias_in, weight_out, bias_out, used):
        key, *weights = [x.contiguous() for x in (key, weight_in, bias_in, weight_out, bias_out)]
        out = nodes_forward(key, weights, used)
        ctx.save_for_backward(key, *weights, used, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        key, *weights, used, out = ctx.saved_tensors
        grad_key, *grads = nodes_backward(key, weights, used, out, grad, ctx.needs_input_grad[0])
        return None if grad_key is None else grad_key.transpose(0, 1), *grads, None
