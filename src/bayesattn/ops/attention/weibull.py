"""Weibull attention with its KL as one autograd node: two kernels forward, two or three backward.

What makes a training step at short lengths is the host: every torch operation, autograd node and launch costs it some ten
microseconds. So the most common case, Weibull noise and a KL in which all queries share their keys (no mask, or key
padding), has a node of its own. All other calls, and those that torch.compile traces, take the general one of `triton.py`
and the plain KL of `kl.py`.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from bayesattn.config import AttentionConfig
from bayesattn.distributions import EULER_GAMMA, log_gamma_1p_inverse
from bayesattn.ops.attention import kl_kernels
from bayesattn.ops.attention.kl import LOG_ROW_CAP
from bayesattn.ops.attention.launch import (
    MOST_LAUNCHES,
    Layout,
    Noise,
    aligned,
    blocks_of,
    forward_launch,
    gradient_launches,
    layout,
    one_pass,
    optional_pointers,
    padded,
)
from bayesattn.ops.attention.masking import Allowed
from bayesattn.ops.launch import Launch, prepared
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
    noise = Noise(True, strength, dropout, seed.ndim > 0)
    return _WeibullAttention.apply(query, key, value, log_prior, allowed, config, seed, noise, scale)


class _Problem(NamedTuple):
    """All that decides about the launches of a call: they are put together once and found again by it."""

    query: Layout
    key: Layout
    value: Layout
    prior: Layout | None
    has_valid: bool
    config: AttentionConfig
    noise: Noise
    scale: float

    @property
    def mask(self) -> Layout | None:
        """Layout of the mask of keys, as the kernels of attention read it."""
        b, n = self.query.shape[0], self.key.shape[2]
        return Layout((b, 1, 1, n), (n, n, n, 1), torch.bool) if self.has_valid else None

    @property
    def strides(self) -> tuple[int, ...]:
        """Of ln Ψ over examples and heads, of the mask over examples."""
        return (*((0, 0) if self.prior is None else self.prior.strides[:2]), self.key.shape[2] if self.has_valid else 0)

    @property
    def shared(self) -> dict[str, float]:
        """What both kernels of the KL take from the config, as numbers: ln β, α's shift and slope, the cap."""
        config, log_beta = self.config, math.log(self.config.gamma_beta)
        shift = log_beta if config.alpha_form == "beta_psi" else 0.0
        return {
            "log_alpha_shift": math.log(config.gamma_alpha) if self.prior is None else shift,
            "slope": EULER_GAMMA / config.weibull_k + log_gamma_1p_inverse(config.weibull_k) - log_beta,
            "log_beta": log_beta,
            "log_cap": LOG_ROW_CAP,
        }

    @property
    def switches(self) -> dict[str, bool]:
        """Of both kernels of the KL."""
        is_raw = self.config.score_form == "raw"
        return {"HAS_PRIOR": self.prior is not None, "HAS_VALID": self.has_valid, "RAW": is_raw}


@functools.lru_cache(maxsize=MOST_LAUNCHES)
def _forward_launches(problem: _Problem) -> tuple[Launch, Launch]:
    """Return the launches of attention and of its KL."""
    query, key, value, config, scale = problem.query, problem.key, problem.value, problem.config, problem.scale
    (b, h, m, d), (hk, n) = query.shape, key.shape[1:3]
    shared, bd = problem.shared, padded(d)
    attend = forward_launch(query, key, value, problem.mask, None, problem.noise, scale, False, True)
    divergence = prepared(
        kl_kernels.weibull_kl_kernel, (b * h,), *query.strides[:3], *key.strides[:3], *problem.strides, h, h // hk, m, n, d,
        scale, shared["log_alpha_shift"], shared["slope"], math.log(config.weibull_k) - EULER_GAMMA - 1.0, config.gamma_beta,
        shared["log_beta"], shared["log_cap"], math.exp(LOG_ROW_CAP), **problem.switches,
        PER=DIVIDE[str(config.kl_reduction)], BLOCK=max(16, TILE // bd), BD=bd,
        # what is in flight fits into the shared memory of smaller GPUs, too
        STAGES=3 if query.dtype.itemsize == 2 else 2, num_warps=8,
    )  # fmt: skip
    return attend, divergence


@functools.lru_cache(maxsize=MOST_LAUNCHES)
def _backward_launches(
    problem: _Problem, grad: Layout, stride_kl: int, in_one_pass: bool
) -> tuple[Launch, Launch, Launch | None]:
    """Return the launches of what all gradients need, of those of key and value, and of the query's."""
    (b, h, m, d), n, dv = problem.query.shape, problem.key.shape[2], problem.value.shape[-1]
    prepare = prepared(
        kl_kernels.weibull_prepare_kernel, (blocks_of(max(m, n), PREPARE_ROWS), b * h), *grad.strides[:3], stride_kl,
        *problem.strides, h, m, n, d, dv, problem.scale, *problem.shared.values(), **problem.switches, ONE_PASS=in_one_pass,
        BLOCK=PREPARE_ROWS, BD=padded(d), BDV=padded(dv),
    )  # fmt: skip
    gradients = gradient_launches(
        problem.query, problem.key, problem.value, problem.mask, None, grad, (0, 0), problem.noise, problem.scale, False,
        True, True, in_one_pass,
    )  # fmt: skip
    return prepare, *gradients


class _WeibullAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query, key, value, log_prior, allowed: Allowed, config: AttentionConfig, seed, noise, scale):
        b, h, m, n = allowed.shape
        query, key, value = aligned(query), aligned(key), aligned(value)
        d, dv = key.shape[3], value.shape[-1]
        valid = None if allowed.mask is None else allowed.mask.expand(b, 1, 1, n).contiguous()
        prior = None if log_prior is None else log_prior.expand(b, h, 1, n)
        prior = prior if prior is None or prior.stride(-1) == 1 else prior.contiguous()
        layouts = layout(query), layout(key), layout(value), layout(prior)
        problem = _Problem(*layouts, valid is not None, config, noise, scale)
        attend, divergence = _forward_launches(problem)
        out = query.new_empty((b, h, m, dv))
        lse, clean = query.new_empty((2, b, h, m), dtype=torch.float32).unbind()
        columns, query_sums, key_sums = lse.new_empty((b, h, 1, n)), lse.new_empty((b, h, 1, d)), lse.new_empty((b, h, 1, d))
        kl, stats = lse.new_empty((b, h)), lse.new_empty((b, h, kl_kernels.NUM_STATS.value))
        # a pointer that no switch reads still has to be one
        attend(query, key, value, *optional_pointers(valid, None, seed), out, lse, clean, lse, lse)
        divergence(
            query, key, clean, clean if prior is None else prior, clean if valid is None else valid, kl, stats, columns,
            query_sums, key_sums,
        )  # fmt: skip
        ctx.save_for_backward(query, key, value, prior, valid, seed, out, lse, clean, columns, stats, query_sums, key_sums)
        ctx.problem, ctx.prior_shape = problem, None if log_prior is None else log_prior.shape
        ctx.set_materialize_grads(False)
        return out, kl.sum(dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad, grad_kl):
        query, key, value, prior, valid, seed, out, lse, clean, columns, stats, query_sums, key_sums = ctx.saved_tensors
        b, h, m, d = query.shape
        grad = torch.zeros_like(out) if grad is None else aligned(grad)
        grad_kl = lse.new_zeros(b) if grad_kl is None else grad_kl
        in_one_pass = one_pass(max(d, value.shape[-1]))
        prepare, gradients, last = _backward_launches(ctx.problem, layout(grad), grad_kl.stride(0), in_one_pass)
        grad_query = query.new_empty((b, h, m, d), dtype=torch.float32 if in_one_pass else None)
        grad_key, grad_value = key.new_empty(key.shape), value.new_empty(value.shape)
        delta, grad_lse = lse.new_empty((2, b, h, m)).unbind()
        grad_columns, start = torch.empty_like(columns), torch.empty_like(query_sums)
        grad_prior = None if prior is None else torch.empty_like(columns)
        prepare(
            out, grad, grad_kl, columns, clean, clean if prior is None else prior, clean if valid is None else valid, stats,
            key_sums, delta, start, grad_query, grad_columns, grad_lse, columns if grad_prior is None else grad_prior,
        )  # fmt: skip
        read = (query, key, value, *optional_pointers(valid, None, seed), grad, lse, clean, delta, grad_lse, None, None)
        gradients(*read, grad_columns, query_sums, grad_query, grad_key, grad_value, None)
        if last is not None:
            last(*read, start, grad_query)
        if grad_prior is not None and grad_prior.shape != ctx.prior_shape:
            grad_prior = grad_prior.sum_to_size(ctx.prior_shape)
        return saturate(grad_query, query.dtype), grad_key, grad_value, grad_prior, *([None] * 5)
