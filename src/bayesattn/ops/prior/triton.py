"""The contextual prior as one autograd node over the kernels."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from bayesattn.ops.attention.launch import aligned, blocks_of, padded
from bayesattn.ops.launch import launch
from bayesattn.ops.prior import kernels

BLOCK_KEYS, BLOCK = 64, 256


def log_prior(
    key: Float[Tensor, "b h n d"],
    weight_in: Float[Tensor, "networks d hidden"],
    bias_in: Float[Tensor, "networks 1 hidden"],
    weight_out: Float[Tensor, "networks hidden 1"],
    bias_out: Float[Tensor, "networks 1 1"],
    valid: Bool[Tensor, "#b #h n"] | None,
) -> Float[Tensor, "b h 1 n"]:
    """Return ln Ψ of every key in float32, as `priors.ContextualPrior` defines it."""
    return _LogPrior.apply(key, weight_in, bias_in, weight_out, bias_out, valid)


def _tiles(d: int, hidden: int) -> dict[str, int]:
    return {"BD": padded(d), "BH": padded(hidden), "BN": BLOCK_KEYS}


def _strides(valid: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if valid is None else valid.stride()[:2]


class _LogPrior(torch.autograd.Function):
    @staticmethod
    def forward(ctx, key, weight_in, bias_in, weight_out, bias_out, valid):
        key = aligned(key)
        (b, h, n, d), (networks, _, hidden) = key.shape, weight_in.shape
        weights = [weight.contiguous() for weight in (weight_in, bias_in, weight_out, bias_out)]
        logits = key.new_empty((b, h, 1, n), dtype=torch.float32)
        out = torch.empty_like(logits)
        valid = None if valid is None else valid.expand(b, h, n)
        if valid is not None and valid.stride(-1) != 1:
            valid = valid.contiguous()
        grid = (blocks_of(n, BLOCK_KEYS), b * h)
        sizes = (h, networks, n, d, hidden)
        launch(kernels.prior_logits_kernel, grid, key, *weights, logits, *key.stride()[:3], *sizes, **_tiles(d, hidden))
        launch(
            kernels.prior_softmax_kernel, (b * h,), logits, logits if valid is None else valid, out, *_strides(valid), h, n,
            HAS_VALID=valid is not None, BLOCK=BLOCK,
        )  # fmt: skip
        ctx.save_for_backward(key, *weights, valid, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        key, weight_in, bias_in, weight_out, bias_out, valid, out = ctx.saved_tensors
        (b, h, n, d), (networks, _, hidden) = key.shape, weight_in.shape
        grad_key = torch.empty((b, h, n, d), dtype=key.dtype, device=key.device) if ctx.needs_input_grad[0] else None
        # one buffer of zeros for all sums; the output bias cancels in the softmax, so its gradient is 0
        sizes = [weight.numel() for weight in (weight_in, bias_in, weight_out, bias_out)]
        sums = torch.zeros(sum(sizes), dtype=torch.float32, device=key.device).split(sizes)
        launch(
            kernels.prior_grad_kernel, (blocks_of(n, BLOCK_KEYS), b * h),
            key, weight_in, bias_in, weight_out, out if valid is None else valid, out, grad,
            key if grad_key is None else grad_key, *sums[:3], *key.stride()[:3], *_strides(valid),
            grad.stride(0), grad.stride(1), grad.stride(3), h, networks, n, d, hidden,
            **_tiles(d, hidden), BLOCK=BLOCK, HAS_VALID=valid is not None, NEED_KEY=grad_key is not None,
        )  # fmt: skip
        weights = (weight_in, bias_in, weight_out, bias_out)
        return grad_key, *(total.view(weight.shape).to(weight.dtype) for total, weight in zip(sums, weights)), None
