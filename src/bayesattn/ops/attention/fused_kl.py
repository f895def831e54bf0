"""The Weibull KL on a GPU as one autograd node: a kernel each way instead of some sixty small operations."""

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from bayesattn.config import AttentionConfig
from bayesattn.distributions import EULER_GAMMA, log_gamma_1p_inverse
from bayesattn.ops.attention import kl_kernels
from bayesattn.ops.attention.kl import LOG_ROW_CAP, weibull_kl
from bayesattn.ops.attention.launch import blocks_of, launch
from bayesattn.ops.attention.masking import Allowed

BLOCK = 256
DIVIDE = {"sum": 0, "row_mean": 1, "mean": 2}
# the kernel multiplies four numbers of the size of α; α = βΨ or Ψ, so β bounds it
LARGEST_BETA = 1e6


def attention_kl(
    columns: Float[Tensor, "b h 1 n"],
    lse: Float[Tensor, "b h m"],
    log_prior: Float[Tensor, "#b #h 1 n"] | None,
    allowed: Allowed,
    config: AttentionConfig,
) -> Float[Tensor, " b"]:
    """Return `kl.weibull_kl` of the same arguments, by the kernels where they can."""
    if not is_fusable(columns, log_prior, allowed, config):
        return weibull_kl(columns, lse, log_prior, allowed, config)
    return _WeibullKL.apply(columns, lse, log_prior, allowed, config)


def is_fusable(columns: Tensor, log_prior: Tensor | None, allowed: Allowed, config: AttentionConfig) -> bool:
    """Whether all queries share their keys, nothing is empty, and no compiler is at work (which fuses by itself)."""
    mask = allowed.mask
    return (
        not torch.compiler.is_compiling()
        and not allowed.is_causal
        and (mask is None or mask.shape[1] == mask.shape[2] == 1)
        and (log_prior is None or log_prior.dtype == torch.float32)
        and config.gamma_beta <= LARGEST_BETA
        and config.gamma_alpha <= LARGEST_BETA
        and min(allowed.shape) > 0
    )


class _WeibullKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, columns: Tensor, lse: Tensor, log_prior: Tensor | None, allowed: Allowed, config: AttentionConfig):
        b, h, m, n = allowed.shape
        valid = None if allowed.mask is None else allowed.mask.expand(b, 1, 1, n).contiguous()
        prior = None if log_prior is None else log_prior.expand(b, h, 1, n)
        prior = prior if prior is None or prior.stride(-1) == 1 else prior.contiguous()
        has_beta = log_prior is not None and config.alpha_form == "beta_psi"
        shift = math.log(config.gamma_beta) if has_beta else 0.0 if log_prior is not None else math.log(config.gamma_alpha)
        slope = EULER_GAMMA / config.weibull_k + log_gamma_1p_inverse(config.weibull_k) - math.log(config.gamma_beta)
        strides = (*((0, 0) if prior is None else prior.stride()[:2]), 0 if valid is None else n)
        switches = {"HAS_PRIOR": prior is not None, "HAS_VALID": valid is not None, "RAW": config.score_form == "raw"}
        # a pointer that no switch reads still has to be one
        pointers = (lse if prior is None else prior, lse if valid is None else valid)
        kl, stats = lse.new_empty((b, h)), lse.new_empty((b, h, 3))
        log_beta = math.log(config.gamma_beta)
        launch(
            kl_kernels.weibull_kl_kernel, (b * h,), columns, lse, *pointers, kl, stats, *strides, h, m, n,
            shift, slope, math.log(config.weibull_k) - EULER_GAMMA - 1.0, config.gamma_beta, log_beta,
            LOG_ROW_CAP, math.exp(LOG_ROW_CAP), **switches, PER=DIVIDE[str(config.kl_reduction)], BLOCK=BLOCK,
        )  # fmt: skip
        ctx.save_for_backward(columns, lse, prior, valid, stats)
        ctx.numbers, ctx.switches, ctx.strides = (shift, slope, log_beta, LOG_ROW_CAP), switches, strides
        ctx.prior_shape = None if log_prior is None else log_prior.shape
        return kl.sum(dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        columns, lse, prior, valid, stats = ctx.saved_tensors
        (b, h, m), n = lse.shape, columns.shape[-1]
        grad_columns, grad_lse = torch.empty_like(columns), torch.empty_like(lse)
        grad_prior = None if prior is None else torch.empty_like(columns)
        pointers = (lse if prior is None else prior, lse if valid is None else valid)
        launch(
            kl_kernels.weibull_kl_grad_kernel, (blocks_of(max(m, n), BLOCK), b * h),
            grad, columns, lse, *pointers, stats, grad_columns, grad_lse, columns if grad_prior is None else grad_prior,
            grad.stride(0), *ctx.strides, h, m, n, *ctx.numbers, **ctx.switches, BLOCK=BLOCK,
        )  # fmt: skip
        if grad_prior is not None and grad_prior.shape != ctx.prior_shape:
            grad_prior = grad_prior.sum_to_size(ctx.prior_shape)
        return grad_columns, grad_lse, grad_prior, None, None
