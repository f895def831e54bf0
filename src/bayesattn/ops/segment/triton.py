"""Stochastic attention on edges on a GPU: the Triton kernels as torch operators with gradients.

Besides the output, the forward operator returns the inputs of either family's KL: each row's clean log-sum-exp and two
moments over its edges, Σ α and Σ α Φ (Weibull) or Σ (Φ − μ) and Σ (Φ − μ)² (lognormal). Their gradients flow back through
the same backward kernel. No array per edge has features.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from bayesattn import noise
from bayesattn.config import AttentionConfig
from bayesattn.divergences import lognormal_constant, weibull_gamma_key_term
from bayesattn.ops.common.operators import operator
from bayesattn.ops.once import once_differentiable
from bayesattn.ops.prior.nodes import NodePrior
from bayesattn.ops.segment import features, passes, plain, weibull_node
from bayesattn.ops.segment.edges import Edges
from bayesattn.ops.segment.pairs import FeatureScores, PairScores
from bayesattn.ops.segment.passes import CONSTANT, PER_EDGE, PER_SOURCE, Draw, Indices, indices_of
from bayesattn.ops.segment.reference import (
    EdgeAttention,
    PriorScope,
    edge_log_prior,
    log_alpha,
    reduce_kl,
    sample_weights,
    weibull_rows,
    zero_where_unused,
)
from bayesattn.precision import saturate


def attention(
    scores: Float[Tensor, "e h"] | PairScores | FeatureScores,
    value: Float[Tensor, "n h d"],
    edges: Edges,
    *,
    config: AttentionConfig,
    log_prior: Float[Tensor, "n h"] | NodePrior | None,
    prior_scope: PriorScope,
    seed: noise.Seed | None,
    need_kl: bool,
    need_weights: bool,
) -> EdgeAttention:
    """Return output and KL of one draw, and with `need_weights` its weights, which take as long as the reference."""
    if isinstance(scores, FeatureScores) and scores.features is not value:
        scores = scores.pair()
    if not isinstance(scores, Tensor) and (need_weights or torch.compiler.is_compiling()):
        scores = scores.on_edges(edges, plain)
    phi = scores.to(torch.float32) if isinstance(scores, Tensor) else scores
    seed = noise.draw_seed(value.device) if seed is None else noise.as_seed(seed, 1, value.device)
    if need_kl and weibull_node.is_one_node(log_prior, prior_scope, config):
        output, kl = weibull_node.weibull_attention(phi, value, log_prior, edges, config, seed)
    else:
        log_prior = log_prior.log_prior() if isinstance(log_prior, NodePrior) else log_prior
        output, kl = _attention(phi, value, edges, config, log_prior if need_kl else None, prior_scope, seed, need_kl)
    weights = sample_weights(phi, edges, seed, config) if need_weights and isinstance(phi, Tensor) else None
    output = output if output.dtype == value.dtype else output.to(value.dtype)
    return EdgeAttention(output, weights, weights, kl)


def _attention(
    phi: Float[Tensor, "e h"] | PairScores | FeatureScores,
    value: Float[Tensor, "n h d"],
    edges: Edges,
    config: AttentionConfig,
    log_prior: Float[Tensor, "n h"] | None,
    prior_scope: PriorScope,
    seed: Tensor,
    need_kl: bool,
) -> tuple[Float[Tensor, "r h d"], Float[Tensor, " 1"] | None]:
    """Return output and KL; torch operations compute the KL from the kernels' results per row."""
    is_weibull = config.family == "weibull"
    strength = 1.0 / config.weibull_k if is_weibull else config.sigma_q * math.log2(math.e)
    if log_prior is not None:
        log_prior = zero_where_unused(log_prior.to(torch.float32), edges)
        if prior_scope == "neighborhood":
            log_prior = edge_log_prior(log_prior, edges)
    prior, constant = _prior(log_prior, config) if need_kl else (None, 0.0)
    kind = CONSTANT if prior is None else PER_EDGE if prior_scope == "neighborhood" else PER_SOURCE
    need_lse = need_kl and (is_weibull or config.score_form == "log_softmax")
    draw, indices = Draw(is_weibull, strength, constant, kind), indices_of(edges)
    if torch.compiler.is_compiling():
        assert isinstance(phi, Tensor)
        output, _, lse, first, second = edge_attention_forward(phi, value, prior, seed, *indices, *draw, need_lse, need_kl)
    else:
        output, lse, first, second = _FusedEdgeAttention.apply(
            *features.parts(phi), value, prior, seed, indices, draw, need_lse, need_kl
        )
    if not need_kl:
        return output, None
    total = _weibull_total if is_weibull else _lognormal_total
    return output, reduce_kl(total(first, second, lse, log_prior, kind, edges, config), edges, value.shape[1], config)


def _prior(log_prior: Tensor | None, config: AttentionConfig) -> tuple[Tensor | None, float]:
    """Return α (Weibull) or μ (lognormal) as a tensor, or as a number if it is the same everywhere."""
    if log_prior is None:
        return None, config.gamma_alpha if config.family == "weibull" else config.mu_p
    if config.family == "weibull":
        return torch.exp(log_alpha(log_prior, config, log_prior)), 0.0
    return log_prior if config.mu_form == "log_psi" else torch.exp(log_prior), 0.0


def _weibull_total(first, second, lse, log_prior, kind: int, edges: Edges, config: AttentionConfig) -> Tensor:
    """Return Σ_e c_e − Σ_i (Σ_e α Φ − LSE_i Σ_e α) + Σ_i β Σ_e exp Φ; with raw scores, without LSE_i Σ_e α."""
    log_a = log_alpha(log_prior, config, first)
    key_term = weibull_gamma_key_term(log_a, weibull_k=config.weibull_k, gamma_beta=config.gamma_beta)
    if kind == CONSTANT:
        key_term = key_term * (len(edges) * first.shape[1])
    elif kind == PER_SOURCE:
        key_term = key_term * edges.out_degree[:, None]
    products = second - lse * first if config.score_form == "log_softmax" else second
    return key_term.sum() - products.sum() + weibull_rows(lse, edges, config).sum()


def _lognormal_total(first, second, lse, log_prior, kind: int, edges: Edges, config: AttentionConfig) -> Tensor:
    """Return the lognormal KL of the whole graph before its reduction.

    In each row Σ_e (Φ − μ − x)² = second − 2 x first + degree x², with x = σ_q²/2 (+ LSE if Φ is the log-softmax).
    """
    shift = 0.5 * config.sigma_q**2 + (lse if config.score_form == "log_softmax" else 0.0)
    squares = second - 2.0 * shift * first + edges.degree[:, None] * shift**2
    constant = lognormal_constant(sigma_q=config.sigma_q, sigma_p=config.sigma_p)
    return 0.5 * squares.sum() / config.sigma_p / config.sigma_p + constant * len(edges) * first.shape[1]


def _forward(
    scores: Tensor,
    value: Tensor,
    prior: Tensor | None,
    seed: Tensor,
    source: Tensor,
    target: Tensor,
    numbers: Tensor,
    by_source: Tensor,
    begin: Tensor,
    nodes: Tensor,
    begin_source: Tensor,
    nodes_source: Tensor,
    num_targets: int,
    weibull: bool,
    strength: float,
    constant: float,
    kind: int,
    need_lse: bool,
    need_moments: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the result of `passes.forward`."""
    indices = Indices(source, target, numbers, by_source, begin, nodes, begin_source, nodes_source, num_targets)
    draw = Draw(weibull, strength, constant, kind)
    prior = None if prior is None else prior.contiguous()
    return passes.forward(scores.contiguous(), value.contiguous(), prior, seed, indices, draw, need_lse, need_moments)


def _fake_forward(
    scores,
    value,
    prior,
    seed,
    source,
    target,
    numbers,
    by_source,
    begin,
    nodes,
    begin_source,
    nodes_source,
    num_targets,
    *options,
):
    need_lse, need_moments = options[-2:]

    def rows(needed: bool) -> Tensor:
        return scores.new_empty((num_targets, scores.shape[1]) if needed else 0)

    out = value.new_empty((num_targets, *value.shape[1:]), dtype=torch.float32)
    return out, rows(True), rows(need_lse), rows(need_moments), rows(need_moments)


def _backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    grad_first: Tensor | None,
    grad_second: Tensor | None,
    out: Tensor,
    lse: Tensor,
    clean: Tensor,
    scores: Tensor,
    value: Tensor,
    prior: Tensor | None,
    seed: Tensor,
    source: Tensor,
    target: Tensor,
    numbers: Tensor,
    by_source: Tensor,
    begin: Tensor,
    nodes: Tensor,
    begin_source: Tensor,
    nodes_source: Tensor,
    num_targets: int,
    weibull: bool,
    strength: float,
    constant: float,
    kind: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the scores, the values and the prior; the last is empty without a prior."""
    indices = Indices(source, target, numbers, by_source, begin, nodes, begin_source, nodes_source, num_targets)
    draw = Draw(weibull, strength, constant, kind)
    grad, prior = grad.contiguous(), None if prior is None else prior.contiguous()
    delta, *_ = passes.prepare(grad, out)
    rows = [None if x is None else x.contiguous() for x in (grad_lse, grad_first, grad_second)]
    grad_scores, _, *grads = passes.backward(
        grad, delta, rows, lse, clean, scores.contiguous(), value.contiguous(), prior, seed, indices, draw
    )
    return grad_scores, *grads  # type: ignore[return-value]  (three)


def _fake_backward(grad, grad_lse, grad_first, grad_second, out, lse, clean, scores, value, prior, *options):
    grad_prior = scores.new_empty(0) if prior is None else prior.new_empty(prior.shape)
    return scores.new_empty(scores.shape), value.new_empty(value.shape), grad_prior


edge_attention_backward = operator("edge_attention_backward", _backward, fake=_fake_backward)


def _setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.num_targets, weibull, strength, constant, kind, ctx.need_lse, ctx.need_moments = inputs
    ctx.draw = (weibull, strength, constant, kind)
    ctx.save_for_backward(*output[:3], *tensors)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _row_gradients(ctx, lse: Tensor, *gradients: Tensor | None) -> list[Tensor | None]:
    """Return the gradients of the clean LSE and of both moments: None if unused, zeros if autograd has none."""
    used = (ctx.need_lse, ctx.need_moments, ctx.need_moments)
    return [
        (torch.zeros_like(lse) if gradient is None else gradient) if is_used else None
        for gradient, is_used in zip(gradients, used, strict=True)
    ]


def _operator_backward(ctx, grad, _grad_noisy, *gradients):
    saved = ctx.saved_tensors
    out, lse, prior = saved[0], saved[1], saved[5]
    rows = _row_gradients(ctx, lse, *gradients)
    grad = torch.zeros_like(out) if grad is None else grad
    grad_scores, grad_value, grad_prior = edge_attention_backward(grad, *rows, *saved, ctx.num_targets, *ctx.draw)
    return grad_scores, grad_value, None if prior is None else grad_prior, *([None] * 16)


# torch.compile sees one opaque operator; eager calls use the autograd function below, which runs less Python
edge_attention_forward = operator(
    "edge_attention_forward", _forward, fake=_fake_forward, keep=_setup_context, differentiate=_operator_backward
)


class _FusedEdgeAttention(torch.autograd.Function):
    """The same passes without the operator's dispatch; it takes the scores as the result of `features.parts`."""

    @staticmethod
    def forward(ctx, first, second, slope, of_features, value, prior, seed, indices, draw, need_lse, need_moments):
        value, prior = value.contiguous(), None if prior is None else prior.contiguous()
        scores, pair = features.opened(first, second, slope, of_features, value, indices.source.shape[0])
        out, lse, *rows = passes.forward(scores, value, prior, seed, indices, draw, need_lse, need_moments, pair)
        ctx.indices, ctx.passed, ctx.slope, ctx.dtype = indices, draw, slope, first.dtype
        ctx.need_lse, ctx.need_moments = need_lse, need_moments
        vectors = (first, second) if of_features else (None, None)
        ctx.save_for_backward(*vectors, out, lse, rows[0], scores, value, prior, seed)
        ctx.set_materialize_grads(False)
        return out, *rows

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, *gradients):
        att_source, att_target, out, lse, clean, scores, value, prior, seed = ctx.saved_tensors
        rows = [None if x is None else x.contiguous() for x in _row_gradients(ctx, lse, *gradients)]
        grad = torch.zeros_like(out) if grad is None else grad.contiguous()
        delta, *_ = passes.prepare(grad, out)
        *grads, grad_value, grad_prior = passes.backward(
            grad, delta, rows, lse, clean, scores, value, prior, seed, ctx.indices, ctx.passed, None, ctx.slope
        )
        if att_source is None:
            grads = [None if x is None else saturate(x, ctx.dtype) for x in grads]
        else:
            *grads, grad_value = features.gradients(value, att_source, att_target, *grads, grad_value, None)
        return *grads, None, None, grad_value, None if prior is None else grad_prior, *([None] * 5)
