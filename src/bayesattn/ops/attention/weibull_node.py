"""Weibull attention with its KL as one autograd node, and as one operator for torch.compile."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from bayesattn.config import AttentionConfig
from bayesattn.ops.attention.launch import (
    Band,
    Layout,
    Noise,
    aligned,
    layout,
    like_gradients,
    queries_first,
    rows_first,
)
from bayesattn.ops.attention.masking import Allowed
from bayesattn.ops.attention.weibull import Divergence, Plan, Problem, kept_arrays, plan_of, run_backward, run_forward
from bayesattn.ops.common.operators import operator
from bayesattn.ops.once import once_differentiable
from bayesattn.ops.prior import launch as prior_launch
from bayesattn.ops.prior.nodes import KeyPrior
from bayesattn.ops.prior.triton import split_like, unflatten

# the KL kernel multiplies four numbers of the size of α (Ψ or βΨ), which must not overflow
LARGEST_ALPHA = 1e6


def is_one_node(log_prior: Tensor | KeyPrior | None, allowed: Allowed, config: AttentionConfig) -> bool:
    """Return whether the node supports a call.

    It needs Weibull noise, a mask that depends only on positions and keys, a float32 prior with α and β up to
    `LARGEST_ALPHA`, and no empty axis.
    """
    mask = allowed.mask
    return (
        config.family == "weibull"
        and (mask is None or mask.shape[1] == mask.shape[2] == 1)
        and (log_prior is None or isinstance(log_prior, KeyPrior) or log_prior.dtype == torch.float32)
        and max(config.gamma_beta, config.gamma_alpha) <= LARGEST_ALPHA
        and min(allowed.shape) > 0
    )


def weibull_attention(
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    value: Float[Tensor, "b hk n dv"],
    log_prior: Float[Tensor, "#b #h 1 n"] | KeyPrior | None,
    allowed: Allowed,
    config: AttentionConfig,
    seed: Tensor,
    strength: float,
    scale: float,
    dropout: float,
) -> tuple[Float[Tensor, "b h m dv"], Float[Tensor, " b"]]:
    """Return the output of one sample and the KL per example."""
    b, _, _, n = allowed.shape
    valid = None if allowed.mask is None else allowed.mask.expand(b, 1, 1, n).contiguous()
    divergence, band = Divergence.of(config), Band(allowed.is_causal, allowed.window)
    if isinstance(log_prior, KeyPrior) and n > prior_launch.MANY_KEYS:
        log_prior = log_prior.log_prior()
    if isinstance(log_prior, KeyPrior):
        prior, weights, need_prior_key = None, log_prior.weights, not log_prior.is_detached
    else:
        prior, weights, need_prior_key = log_prior, _NO_WEIGHTS, False
    if torch.compiler.is_compiling():
        prior = None if prior is None else prior.expand(b, query.shape[1], 1, n).contiguous()
        numbers, forms = [*divergence[:3], strength, scale, dropout], " ".join(divergence[3:])
        inputs = (query, key, value, prior, *weights, need_prior_key, valid, seed)
        out, kl, _ = weibull_forward(*inputs, numbers, forms, *band)
        return out, kl
    kind = Kind(band, divergence, Noise(True, strength, dropout, seed.ndim > 0), scale)
    return run(query, key, value, prior, weights, need_prior_key, valid, seed, kind)


_NO_WEIGHTS = (None,) * 4


class Kind(NamedTuple):
    """The options of a call that are not tensors."""

    band: Band
    divergence: Divergence
    noise: Noise
    scale: float


def run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_prior: Tensor | None,
    weights: Sequence[Tensor | None],
    need_prior_key: bool,
    valid: Tensor | None,
    seed: Tensor,
    kind: Kind,
    plan: Plan | None = None,
) -> tuple[Tensor, Tensor]:
    """Return output and KL of query, key, value and seed as in `weibull_attention`.

    The prior is given as ln Ψ (`log_prior`), as the `weights` of the network that computes it, or not at all; without a
    network, `weights` is four times None. With `need_prior_key` the keys also get a gradient through the network. `valid`
    marks the keys that exist, contiguous [b, 1, 1, n]. A `plan` of an earlier call with the same layouts saves the lookup.
    """
    return _WeibullAttention.apply(query, key, value, log_prior, *weights, need_prior_key, valid, seed, kind, plan)


def plan_for(
    query: Tensor, key: Tensor, value: Tensor, prior: Tensor | None, w_in: Tensor | None, has_valid: bool, kind: Kind
) -> Plan:
    """Return the plan of a call with aligned tensors."""
    of_query, of_key, network = layout(query), layout(key), None
    if w_in is None:
        of_prior = layout(prior)
    else:
        (b, h), n = of_query.shape[:2], of_key.shape[2]
        network, of_prior = (w_in.shape[0], w_in.shape[2]), Layout((b, h, 1, n), (h * n, n, n, 1), torch.float32)
    return plan_of(Problem(of_query, of_key, layout(value), of_prior, has_valid, *kind, network))


class _WeibullAttention(torch.autograd.Function):
    """Autograd node of output and KL; the prior is ln Ψ or the network that computes it."""

    @staticmethod
    def forward(
        ctx: Any, query, key, value, log_prior, w_in, b_in, w_out, b_out, need_prior_key, valid, seed, kind, plan
    ):  # fmt: skip
        given = query, key, value
        query, key, value = aligned(query), aligned(key), aligned(value)
        prior, weights = None, ()
        if w_in is not None:
            weights = _weights(w_in, b_in, w_out, b_out)
        elif log_prior is not None:
            prior = log_prior.expand(*query.shape[:2], 1, key.shape[2])
            prior = prior if prior.stride(-1) == 1 else prior.contiguous()
        if plan is None or query is not given[0] or key is not given[1] or value is not given[2]:
            plan = plan_for(query, key, value, prior, w_in, valid is not None, kind)
        out, kl, kept = run_forward(plan, query, key, value, prior, valid, seed, weights)
        ctx.save_for_backward(query, key, value, prior, valid, seed, out, kept, *weights)
        ctx.plan, ctx.need_prior_key = plan, need_prior_key
        ctx.prior_shape = None if log_prior is None else log_prior.shape
        ctx.set_materialize_grads(False)
        return out, kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad, grad_kl):
        saved = ctx.saved_tensors
        (*inputs, out, kept), weights = saved[:8], saved[8:]
        grad = torch.zeros_like(out) if grad is None else aligned(grad)
        grad_kl = kept.new_zeros(len(out)) if grad_kl is None else grad_kl
        need_key = ctx.need_prior_key and ctx.needs_input_grad[1]
        *grads, grad_prior = run_backward(ctx.plan, grad, grad_kl, inputs, out, kept, weights, need_key)
        to_weights = _NO_WEIGHTS
        if weights and grad_prior is not None:
            grad_prior, to_weights = None, unflatten(grad_prior, weights)
        elif grad_prior is not None and grad_prior.shape != ctx.prior_shape:
            grad_prior = grad_prior.sum_to_size(ctx.prior_shape)
        # none for need_prior_key, valid, seed, kind, plan
        return *grads, grad_prior, *to_weights, *([None] * 5)


def _forward_as_operator(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prior: Tensor | None,
    w_in: Tensor | None,
    b_in: Tensor | None,
    w_out: Tensor | None,
    b_out: Tensor | None,
    need_prior_key: bool,
    valid: Tensor | None,
    seed: Tensor,
    numbers: list[float],
    forms: str,
    is_causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run `run_forward` on inputs as in `run`; `numbers` and `forms` are those of `_kind_of`."""
    query, key, value = aligned(query), aligned(key), aligned(value)
    weights = _weights(w_in, b_in, w_out, b_out)
    kind = _kind_of(numbers, forms, Band(is_causal, window), seed)
    plan = plan_for(query, key, value, prior, w_in, valid is not None, kind)
    return run_forward(plan, query, key, value, prior, valid, seed, weights)


def _weights(*given: Tensor | None) -> tuple[Tensor, ...]:
    """Return the weights of a prior network as the kernels read them; nothing without a network."""
    return tuple(x.contiguous() for x in given if x is not None)


def _kind_of(numbers: Sequence[float], forms: str, band: Band, seed: Tensor) -> Kind:
    """Return the options made of the numbers (k, β, α, strength, scale, dropout) and the three forms of `Divergence`."""
    weibull_k, gamma_beta, gamma_alpha, strength, scale, dropout = numbers
    divergence = Divergence(weibull_k, gamma_beta, gamma_alpha, *forms.split())
    return Kind(band, divergence, Noise(True, strength, dropout, seed.ndim > 0), scale)


def _fake_forward(query, key, value, prior, w_in, *options):
    b, _, m, _ = query.shape
    arrays = kept_arrays(query.shape, key.shape[2], w_in is not None)
    kl, kept = (query.new_empty(size, dtype=torch.float32) for size in (b, arrays.total))
    return rows_first(query, m, value.shape[-1]), kl, kept


def _backward_as_operator(
    grad: Tensor,
    grad_kl: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prior: Tensor | None,
    w_in: Tensor | None,
    b_in: Tensor | None,
    w_out: Tensor | None,
    b_out: Tensor | None,
    need_prior_key: bool,
    valid: Tensor | None,
    seed: Tensor,
    out: Tensor,
    kept: Tensor,
    numbers: list[float],
    forms: str,
    is_causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the result of `run_backward`; the last gradient is empty if nothing needs it."""
    inputs = (aligned(query), aligned(key), aligned(value), prior, valid, seed)
    kind = _kind_of(numbers, forms, Band(is_causal, window), seed)
    plan = plan_for(*inputs[:4], w_in, valid is not None, kind)
    weights = _weights(w_in, b_in, w_out, b_out)
    grad, out = aligned(grad), queries_first(out)
    *grads, grad_prior = run_backward(plan, grad, grad_kl, inputs, out, kept, weights, need_prior_key)
    return *grads, grad_kl.new_empty(0) if grad_prior is None else grad_prior  # type: ignore[return-value]  (four tensors)


def _fake_backward(grad, grad_kl, query, key, value, prior, w_in, b_in, w_out, b_out, *options):
    grads = like_gradients(query, key, value)
    if w_in is not None:
        return *grads, grad_kl.new_empty(sum(x.numel() for x in (w_in, b_in, w_out, b_out)))
    return *grads, grad_kl.new_empty(0 if prior is None else prior.shape)


weibull_backward = operator("weibull_backward", _backward_as_operator, fake=_fake_backward)


def _keep(ctx, inputs, output) -> None:
    *tensors, ctx.need_prior_key, valid, seed, numbers, forms, is_causal, window = inputs
    ctx.options = numbers, forms, is_causal, window
    out, _, kept = output
    ctx.save_for_backward(*tensors, valid, seed, out, kept)
    ctx.mark_non_differentiable(kept)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad, grad_kl, *_):
    *tensors, valid, seed, out, kept = ctx.saved_tensors
    prior, *weights = tensors[3:]
    grad = torch.zeros_like(out) if grad is None else grad
    grad_kl = kept.new_zeros(len(out)) if grad_kl is None else grad_kl
    *grads, last = weibull_backward(grad, grad_kl, *tensors, ctx.need_prior_key, valid, seed, out, kept, *ctx.options)
    to_weights = _NO_WEIGHTS if weights[0] is None else split_like(last, weights)
    # none for need_prior_key, valid, seed, numbers, forms, is_causal, window
    return *grads, None if prior is None else last, *to_weights, *([None] * 7)


weibull_forward = operator(
    "weibull_forward", _forward_as_operator, fake=_fake_forward, keep=_keep, differentiate=_differentiate
)
