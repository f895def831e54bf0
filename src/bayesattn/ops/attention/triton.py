"""Stochastic attention on a GPU: the Triton kernels as torch operators with gradients.

Besides the output, the forward operator returns the sums that the KL needs (`kl.py`): the log-sum-exp and the column sums
Σ_i Φ_ij of the clean scores (Weibull), or Σ_j (Φ_ij − μ_j) and Σ_j (Φ_ij − μ_j)² per row (lognormal). Their gradients flow
back through the same kernels. Memory is O(m + n).
"""

import functools
import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import forward_ad

from bayesattn import noise
from bayesattn.config import AttentionConfig
from bayesattn.ops.attention import backward_kernels, forward_kernels
from bayesattn.ops.attention.backward_kernels import ROW_FOR_EACH
from bayesattn.ops.attention.gram import is_separable, separable_lognormal_kl
from bayesattn.ops.attention.kl import lognormal_kl, lognormal_location, weibull_kl
from bayesattn.ops.attention.launch import (
    MOST_LAUNCHES,
    ROW_MULTIPLE,
    Band,
    Noise,
    aligned,
    finished,
    forward_launch,
    gradient_launches,
    gradient_of,
    grid_of,
    layout,
    like_gradients,
    new_grad_query,
    one_pass,
    optional_pointers,
    padded,
    queries_first,
    row_steps,
    row_stride,
    rows_first,
    whole_rows,
)
from bayesattn.ops.attention.masking import Allowed
from bayesattn.ops.attention.weibull_node import is_one_node, weibull_attention
from bayesattn.ops.common.launch import prepared
from bayesattn.ops.common.operators import operator
from bayesattn.ops.common.tape import Tape
from bayesattn.ops.once import once_differentiable
from bayesattn.ops.prior.nodes import KeyPrior
from bayesattn.precision import without_autocast


def attention(
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    value: Float[Tensor, "b hk n dv"],
    *,
    config: AttentionConfig,
    log_prior: Float[Tensor, "#b #h 1 n"] | KeyPrior | None,
    allowed: Allowed,
    scale: float,
    seed: noise.Seed | None,
    dropout_p: float,
    need_kl: bool,
) -> tuple[Float[Tensor, "b h m dv"], Float[Tensor, " b"] | None]:
    """Return the output O = W V of one sample and, if `need_kl`, the KL per example."""
    dv = value.shape[-1]
    if dv % ROW_MULTIPLE or query.shape[-1] % ROW_MULTIPLE:
        log_prior = log_prior.log_prior() if isinstance(log_prior, KeyPrior) else log_prior
        query, key, value = whole_rows(query, key, value)
    weibull = config.family == "weibull"
    strength = 1.0 / config.weibull_k if weibull else config.sigma_q * math.log2(math.e)
    seed = noise.draw_seed(query.device) if seed is None else noise.as_seed(seed, query.shape[0], query.device)
    if need_kl and is_one_node(log_prior, allowed, config):
        output, kl = weibull_attention(query, key, value, log_prior, allowed, config, seed, strength, scale, dropout_p)
        return _narrowed(output, dv), kl
    if not need_kl:
        options = (weibull, strength, scale, dropout_p, allowed.is_causal, allowed.window, False, False)
        return _narrowed(fused_or_plain(query, key, value, allowed.mask, None, seed, *options)[0], dv), None
    with without_autocast(query.device.type):
        return _with_plain_kl(query, key, value, log_prior, allowed, config, seed, strength, scale, dropout_p, dv)


def _with_plain_kl(
    query, key, value, log_prior, allowed, config, seed, strength, scale, dropout_p, dv
) -> tuple[Tensor, Tensor]:
    """Return output and KL, the KL from the sums that the kernels return (`kl.py`) or from small matrices (`gram.py`)."""
    weibull = config.family == "weibull"
    log_prior = log_prior.log_prior() if isinstance(log_prior, KeyPrior) else log_prior
    mu, by_gram = None, not weibull and is_separable(allowed)
    if not weibull and not by_gram:
        b, h, _, n = allowed.shape
        location = lognormal_location(log_prior, allowed, config)
        # filled in on the device: CUDA-graph capture cannot copy from the host
        mu = location if isinstance(location, Tensor) else query.new_full((1,), location, dtype=torch.float32)
        mu = mu.float().expand(b, h, 1, n).contiguous()
    need_lse = weibull or config.score_form == "log_softmax"
    output, _, lse, columns, first, second, _ = fused_or_plain(
        query, key, value, allowed.mask, mu, seed, weibull, strength, scale, dropout_p, allowed.is_causal, allowed.window,
        need_lse, weibull,
    )  # fmt: skip
    output = _narrowed(output, dv)
    if weibull:
        return output, weibull_kl(columns, lse, log_prior, allowed, config)
    if by_gram:
        rows = lse if need_lse else None
        return output, separable_lognormal_kl(query, key, rows, log_prior, allowed, config, scale, by_kernels=True)
    return output, lognormal_kl(first, second, lse if need_lse else None, allowed, config)


def fused_or_plain(*inputs: Any) -> tuple[Any, ...]:
    """Return the results of `_forward`, as an operator in a compiler or an autograd node if gradients are enabled."""
    if torch.compiler.is_compiling():
        return attention_forward(*inputs)
    return _FusedAttention.apply(*inputs) if _is_derived() else _forward(*inputs)


def _narrowed(output: Tensor, dv: int) -> Tensor:
    # even a full slice adds an autograd node, and `kl.record` checks whether output and KL come from the same node
    return output if output.shape[-1] == dv else output[..., :dv]


@functools.lru_cache(maxsize=MOST_LAUNCHES)
def _tape(direction: str, kind: tuple) -> Tape:
    """Return the tape of one pass, forward or backward, of one kind of call."""
    return Tape()


def _is_derived() -> bool:
    """Return whether to use the autograd node: it saves tensors for gradients and rejects transforms that ignore no_grad."""
    is_transformed = forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()
    return torch.is_grad_enabled() or is_transformed


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    mu: Tensor | None,
    seed: Tensor,
    weibull: bool,
    strength: float,
    scale: float,
    dropout: float,
    causal: bool,
    window: int | None,
    need_lse: bool,
    need_columns: bool,
) -> tuple[Any, ...]:
    """Return output, noisy LSE (base 2), clean LSE, column sums, two moments and the query sums used for the column sums.

    Results that are not needed are None.
    """
    query, key, value = map(aligned, (query, key, value))
    (b, h, m, d), (hk, n), dv = query.shape, key.shape[1:3], value.shape[-1]
    out = rows_first(query, m, dv)
    lse = query.new_empty((b, h, m), dtype=torch.float32)
    clean, first, second = (
        torch.empty_like(lse) if needed else None for needed in (need_lse, mu is not None, mu is not None)
    )
    if out.numel():
        kind = (*map(layout, (query, key, value, mask, mu)), Noise(weibull, strength, dropout, seed.ndim > 0), scale)
        kind = (*kind, Band(causal, window), need_lse)
        arrays, tape = (query, key, value, mask, mu, seed, out, lse, clean, first, second), _tape("forward", kind)
        if not tape.replay(arrays):
            # unused pointers must still be valid
            written = (lse if x is None else x for x in (clean, first, second))
            with tape.recording(arrays):
                launch = forward_launch(*kind)
                launch(query, key, value, *optional_pointers(mask, mu, seed), out, lse, *written, lse, lse)
    columns, sums = None, None
    if need_columns:
        # Σ_i Φ_ij = scale · k_j · Σ_i q_i, without the scores
        sums = Allowed(mask, causal, (b, h, m, n), window).sum_over_queries(query)
        columns = lse.new_empty((b, h, 1, n))
        if columns.numel():
            launch = prepared(
                forward_kernels.columns_kernel, grid_of(n, 64, b * h), *key.stride()[:3], row_stride(sums), h, h // hk,
                n, d, scale, BN=64, BD=padded(d),
            )  # fmt: skip
            launch(key, sums, columns)
    return out, lse, clean, columns, first, second, sums


def _forward_as_operator(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, mu: Tensor | None, seed: Tensor, weibull: bool,
    strength: float, scale: float, dropout: float, causal: bool, window: int | None, need_lse: bool,
    need_columns: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Call `_forward` as an operator for torch.compile; unneeded results are empty. Eager calls skip the dispatch."""
    options = (weibull, strength, scale, dropout, causal, window, need_lse, need_columns)
    results = _forward(query, key, value, mask, mu, seed, *options)
    return tuple(query.new_empty(0, dtype=torch.float32) if x is None else x for x in results)  # type: ignore[return-value]


def _fake_forward(
    query, key, value, mask, mu, seed, weibull, strength, scale, dropout, causal, window, need_lse, need_columns
):
    (b, h, m, _), n = query.shape, key.shape[2]

    def rows(needed: bool) -> Tensor:
        return query.new_empty((b, h, m) if needed else 0, dtype=torch.float32)

    out = rows_first(query, m, value.shape[-1])
    columns = query.new_empty((b, h, 1, n) if need_columns else 0, dtype=torch.float32)
    is_one_row = not causal and (mask is None or mask.shape[2] == 1)
    sums = query.new_empty((b, h, 1 if is_one_row else n, query.shape[-1]) if need_columns else 0, dtype=torch.float32)
    return out, rows(True), rows(need_lse), columns, rows(mu is not None), rows(mu is not None), sums


def _backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    grad_columns: Tensor | None,
    grad_first: Tensor | None,
    grad_second: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    mu: Tensor | None,
    seed: Tensor,
    out: Tensor,
    lse: Tensor,
    clean: Tensor | None,
    sums: Tensor | None,
    weibull: bool,
    strength: float,
    scale: float,
    dropout: float,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value and μ (empty without moments)."""
    query, key, value, grad = map(aligned, (query, key, value, grad))
    (b, h, m, d), n, dv = query.shape, key.shape[2], value.shape[-1]
    in_one_pass = one_pass(max(d, dv))
    start = None
    if grad_columns is not None:
        # dQ_i gains scale · Σ_j dT_j k_j over the keys of query i
        start = Allowed(mask, causal, (b, h, m, n), window).weighted_keys(grad_columns, key)
    grad_query = new_grad_query(query, in_one_pass)
    grad_key, grad_value = gradient_of(key), gradient_of(value)
    grad_mu = lse.new_empty((b, h, 1, n) if mu is not None else 0)
    if not (b and m):
        return finished(grad_query.zero_(), query), grad_key.zero_(), grad_value.zero_(), grad_mu.zero_()
    delta = torch.empty_like(lse)
    out = queries_first(out)
    rows = [None if g is None else g.contiguous() for g in (grad_lse, grad_first, grad_second)]
    grad_columns = None if grad_columns is None else grad_columns.contiguous()
    kind = (
        *map(layout, (query, key, value, mask, mu, grad)), (row_stride(sums), row_stride(start)),
        Noise(weibull, strength, dropout, seed.ndim > 0), scale, Band(causal, window), grad_lse is not None,
        0 if grad_columns is None else ROW_FOR_EACH.value, in_one_pass, row_steps(grad_query, grad_key, grad_value),
    )  # fmt: skip
    arrays = (
        query, key, value, mask, mu, seed, out, lse, clean, sums, grad, *rows, grad_columns, start, delta, grad_query,
        grad_key, grad_value, grad_mu,
    )  # fmt: skip
    tape = _tape("backward", kind)
    if not tape.replay(arrays):
        with tape.recording(arrays):
            launch = prepared(
                backward_kernels.prepare_kernel, grid_of(m, 64, b * h), m, d, dv, h, *grad.stride()[:3], row_stride(start),
                scale, BM=64, BD=padded(d), BDV=padded(dv), COLUMNS=start is not None, ONE_PASS=in_one_pass,
            )  # fmt: skip
            launch(out, grad, delta, start, grad_query)
            first, second = gradient_launches(*kind)
            read = (query, key, value, *optional_pointers(mask, mu, seed), grad, lse, lse if clean is None else clean)
            read = (*read, delta, *rows)
            # unused pointers must still be valid
            columns = lse if grad_columns is None else grad_columns
            first(*read, columns, lse if sums is None else sums, grad_query, grad_key, grad_value, grad_mu)
            if second is not None:
                second(*read, columns, start, grad_query)
    return finished(grad_query, query), grad_key, grad_value, grad_mu


def _fake_backward(
    grad,
    grad_lse,
    grad_columns,
    grad_first,
    grad_second,
    query,
    key,
    value,
    mask,
    mu,
    seed,
    out,
    lse,
    clean,
    sums,
    *_options,
):
    grad_mu = lse.new_empty((*query.shape[:2], 1, key.shape[2]) if mu is not None else 0)
    return *like_gradients(query, key, value), grad_mu


attention_backward = operator("attention_backward", _backward, fake=_fake_backward)


def _setup_context(ctx, inputs, output) -> None:
    query, key, value, mask, mu, seed, *ctx.options, ctx.need_lse, ctx.need_columns = inputs
    out, lse, clean, *_, sums = output
    ctx.save_for_backward(query, key, value, mask, mu, seed, out, lse, clean, sums)
    ctx.mark_non_differentiable(*(x for x in (lse, sums) if x is not None))
    ctx.set_materialize_grads(False)


def _gradients(ctx, backward, grad, grad_lse, grad_columns, grad_first, grad_second) -> tuple[Tensor | None, ...]:
    query, key, value, mask, mu, seed, out, lse, clean, sums = ctx.saved_tensors

    def or_zeros(gradient: Tensor | None, is_used: bool, shape: tuple[int, ...]) -> Tensor | None:
        return (lse.new_zeros(shape) if gradient is None else gradient) if is_used else None

    grad = torch.zeros_like(out) if grad is None else grad
    grad_lse = or_zeros(grad_lse, ctx.need_lse, lse.shape)
    grad_columns = or_zeros(grad_columns, ctx.need_columns, (*lse.shape[:2], 1, key.shape[2]))
    moments = [or_zeros(gradient, mu is not None, lse.shape) for gradient in (grad_first, grad_second)]
    *grads, grad_mu = backward(
        grad, grad_lse, grad_columns, *moments, query, key, value, mask, mu, seed, out, lse, clean, sums, *ctx.options
    )
    return *grads, None, grad_mu if mu is not None else None, *([None] * 9)


def _operator_backward(ctx, grad, _grad_noisy, grad_lse, grad_columns, grad_first, grad_second, _grad_sums):
    return _gradients(ctx, attention_backward, grad, grad_lse, grad_columns, grad_first, grad_second)


attention_forward = operator(
    "attention_forward", _forward_as_operator, fake=_fake_forward, keep=_setup_context, differentiate=_operator_backward
)


class _FusedAttention(torch.autograd.Function):
    """The forward and backward pass of `attention_forward`, without the operator's dispatch."""

    @staticmethod
    def forward(ctx, *inputs):
        output = _forward(*inputs)
        _setup_context(ctx, inputs, output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _grad_noisy, grad_lse, grad_columns, grad_first, grad_second, _grad_sums):
        return _gradients(ctx, _backward, grad, grad_lse, grad_columns, grad_first, grad_second)
