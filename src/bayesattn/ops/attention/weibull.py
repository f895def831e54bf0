"""Weibull attention with its KL as one autograd node: two kernels forward, two or three backward.

What makes a training step at short lengths is the host: every torch operation, autograd node and launch costs it some ten
microseconds. So the most common case, Weibull noise and a KL in which all queries share their keys (no mask, or key
padding), has a node of its own. All other calls, and those that torch.compile traces, take the general one of `triton.py`
and the plain KL of `kl.py`.
"""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from bayesattn.config import AttentionConfig
from bayesattn.distributions import EULER_GAMMA, log_gamma_1p_inverse
from bayesattn.ops.attention import kl_kernels
from bayesattn.ops.attention.kl import LOG_ROW_CAP
from bayesattn.ops.attention.launch import aligned, blocks_of, launch_forward, launch_gradients, one_pass, padded
from bayesattn.ops.attention.masking import Allowed
from bayesattn.ops.launch import launch
from bayesattn.ops.precision import saturate

DIVIDE = {"sum": 0, "row_mean": 1, "mean": 2}
# the kernel multiplies four numbers of the size of α, which is Ψ or βΨ
LARGEST_ALPHA = 1e6
# entries of a tile of keys or queries; many bytes in flight make up for one program a head
TILE = 16384
PREPARE_ROWS = 64


def is_one_node(log_prior: Tensor | None, allowed: Allowed, config: AttentionConfig) -> bool:
    """Whether all queries share their keys, nothing is empty, and no compiler is at work (which fuses by itself)."""
    mask = allowed.mask
    return (
        config.family == "weibull"
        and not torch.compiler.is_compiling()
        and not allowed.is_causal
        and (mask is None or mask.shape[1] == mask.shape[2] == 1)
        and (log_prior is None or log_prior.dtype == torch.float32)
        and max(config.gamma_beta, config.gamma_alpha) <= LARGEST_ALPHA
        and min(allowed.shape) > 0
    )


def weibull_attention(
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    value: Float[Tensor, "b hk n dv"],
    log_prior: Float[Tensor, "#b #h 1 n"] | None,
    allowed: Allowed,
    config: AttentionConfig,
    seed: Tensor,
    strength: float,
    scale: float,
    dropout: float,
) -> tuple[Float[Tensor, "b h m dv"], Float[Tensor, " b"]]:
    """Return the output of one sample and the KL of each example."""
    return _WeibullAttention.apply(query, key, value, log_prior, allowed, config, seed, strength, scale, dropout)


def _numbers(config: AttentionConfig, has_prior: bool) -> dict[str, float]:
    """Return what the KL's formula takes from the config, as numbers."""
    log_beta = math.log(config.gamma_beta)
    shift = (log_beta if config.alpha_form == "beta_psi" else 0.0) if has_prior else math.log(config.gamma_alpha)
    return {
        "log_alpha_shift": shift,
        "slope": EULER_GAMMA / config.weibull_k + log_gamma_1p_inverse(config.weibull_k) - log_beta,
        "log_beta": log_beta,
        "log_cap": LOG_ROW_CAP,
    }


class _WeibullAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query, key, value, log_prior, allowed: Allowed, config: AttentionConfig, seed, strength, scale, dropout
    ):
        b, h, m, n = allowed.shape
        query, key, value = aligned(query), aligned(key), aligned(value)
        (hk, d), dv = (key.shape[1], key.shape[3]), value.shape[-1]
        valid = None if allowed.mask is None else allowed.mask.expand(b, 1, 1, n).contiguous()
        prior = None if log_prior is None else log_prior.expand(b, h, 1, n)
        prior = prior if prior is None or prior.stride(-1) == 1 else prior.contiguous()
        out = query.new_empty((b, h, m, dv), dtype=value.dtype)
        lse, clean = query.new_empty((2, b, h, m), dtype=torch.float32).unbind()
        columns, sums = lse.new_empty((b, h, 1, n)), lse.new_empty((2, b, h, 1, d))
        kl, stats = lse.new_empty((b, h)), lse.new_empty((b, h, kl_kernels.NUM_STATS.value))
        launch_forward(
            (query, key, value), valid, None, seed, (out, lse, clean, lse, lse), True, strength, scale, dropout, causal=False
        )
        strides = (*((0, 0) if prior is None else prior.stride()[:2]), 0 if valid is None else n)
        switches = {"HAS_PRIOR": prior is not None, "HAS_VALID": valid is not None, "RAW": config.score_form == "raw"}
        numbers, bd = _numbers(config, prior is not None), padded(d)
        launch(
            # a pointer that no switch reads still has to be one
            kl_kernels.weibull_kl_kernel, (b * h,), query, key, clean, clean if prior is None else prior,
            clean if valid is None else valid, kl, stats, columns, sums[0], sums[1], *query.stride()[:3], *key.stride()[:3],
            *strides, h, h // hk, m, n, d, scale, **numbers, constant=math.log(config.weibull_k) - EULER_GAMMA - 1.0,
            beta=config.gamma_beta, cap=math.exp(LOG_ROW_CAP), **switches, PER=DIVIDE[str(config.kl_reduction)],
            BLOCK=max(16, TILE // bd), BD=bd,
            # what is in flight fits into the shared memory of smaller GPUs, too
            STAGES=3 if query.dtype.itemsize == 2 else 2, num_warps=8,
        )  # fmt: skip
        ctx.save_for_backward(query, key, value, prior, valid, seed, out, lse, clean, columns, stats, sums)
        ctx.numbers, ctx.switches, ctx.strides, ctx.noise = numbers, switches, strides, (strength, scale, dropout)
        ctx.prior_shape = None if log_prior is None else log_prior.shape
        ctx.set_materialize_grads(False)
        return out, kl.sum(dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad, grad_kl):
        query, key, value, prior, valid, seed, out, lse, clean, columns, stats, sums = ctx.saved_tensors
        (b, h, m, d), n, dv = query.shape, key.shape[2], value.shape[-1]
        strength, scale, dropout = ctx.noise
        grad = torch.zeros_like(out) if grad is None else aligned(grad)
        grad_kl = lse.new_zeros(b) if grad_kl is None else grad_kl
        in_one_pass = one_pass(max(d, dv))
        grad_query = query.new_empty((b, h, m, d), dtype=torch.float32 if in_one_pass else None)
        grad_key, grad_value = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (key, value))
        delta, grad_lse = lse.new_empty((2, b, h, m)).unbind()
        grad_columns, start = torch.empty_like(columns), lse.new_empty((b, h, 1, d))
        grad_prior = None if prior is None else torch.empty_like(columns)
        launch(
            kl_kernels.weibull_prepare_kernel, (blocks_of(max(m, n), PREPARE_ROWS), b * h),
            out, grad, grad_kl, columns, clean, clean if prior is None else prior, clean if valid is None else valid, stats,
            sums[1], delta, start, grad_query, grad_columns, grad_lse, columns if grad_prior is None else grad_prior,
            *grad.stride()[:3], grad_kl.stride(0), *ctx.strides, h, m, n, d, dv, scale, **ctx.numbers, **ctx.switches,
            ONE_PASS=in_one_pass, BLOCK=PREPARE_ROWS, BD=padded(d), BDV=padded(dv),
        )  # fmt: skip
        launch_gradients(
            (query, key, value), valid, None, seed, (grad, lse, clean, delta, grad_lse, None, None), grad_columns, sums[0],
            start, (grad_query, grad_key, grad_value, None), True, strength, scale, dropout, False, in_one_pass,
        )  # fmt: skip
        if grad_prior is not None and grad_prior.shape != ctx.prior_shape:
            grad_prior = grad_prior.sum_to_size(ctx.prior_shape)
        return saturate(grad_query, query.dtype), grad_key, grad_value, grad_prior, *([None] * 6)
