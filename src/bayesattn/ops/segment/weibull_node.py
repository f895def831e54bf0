"""Weibull attention on edges and its KL as one autograd node, and as one operator for torch.compile."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from bayesattn.config import AttentionConfig
from bayesattn.ops.attention.weibull import Divergence
from bayesattn.ops.attention.weibull_node import LARGEST_ALPHA
from bayesattn.ops.common.operators import operator
from bayesattn.ops.once import once_differentiable
from bayesattn.ops.prior.nodes import NodePrior
from bayesattn.ops.prior.triton import nodes_backward, nodes_forward
from bayesattn.ops.segment import features
from bayesattn.ops.segment.edges import Edges
from bayesattn.ops.segment.pairs import FeatureScores, PairScores
from bayesattn.ops.segment.passes import Indices, indices_of
from bayesattn.ops.segment.reference import PriorScope
from bayesattn.ops.segment.weibull import Graph, plan_of, run_backward, run_forward
from bayesattn.precision import saturate


def is_one_node(log_prior: Tensor | NodePrior | None, prior_scope: PriorScope, config: AttentionConfig) -> bool:
    """Return whether one node can compute the call: Weibull, with a fixed prior or a float32 one per source."""
    if config.family != "weibull" or log_prior is None:
        return config.family == "weibull"
    is_float32 = isinstance(log_prior, NodePrior) or log_prior.dtype == torch.float32
    return prior_scope == "graph" and is_float32 and config.gamma_beta <= LARGEST_ALPHA


def weibull_attention(
    scores: Float[Tensor, "e h"] | PairScores | FeatureScores,
    value: Float[Tensor, "n h d"],
    log_prior: Float[Tensor, "n h"] | NodePrior | None,
    edges: Edges,
    config: AttentionConfig,
    seed: Tensor,
) -> tuple[Float[Tensor, "r h d"], Float[Tensor, " 1"]]:
    """Return the output of one draw and the KL of the graph; in a compiler the scores must be a tensor."""
    graph = edges.memo("graph", lambda: _graph_of(edges))
    divergence = Divergence.of(config)
    if torch.compiler.is_compiling():
        assert isinstance(scores, Tensor)
        log_prior = log_prior.log_prior() if isinstance(log_prior, NodePrior) else log_prior
        forms = " ".join(divergence[3:])
        *tensors, num_targets = graph.indices
        out, kl, *_ = weibull_edges_forward(
            scores, value, log_prior, seed, [*tensors, *graph[1:]], num_targets, list(divergence[:3]), forms
        )
        return out, kl
    if isinstance(log_prior, NodePrior):
        # keys that are also the values are passed once and get one gradient
        is_value = isinstance(scores, FeatureScores) and log_prior.key is value
        prior = (None, None if is_value else log_prior.key, *log_prior[1:])
    else:
        prior = (log_prior, *([None] * 6))
    return _WeibullEdges.apply(*features.parts(scores), value, *prior, seed, graph, divergence)


def _graph_of(edges: Edges) -> Graph:
    return Graph(indices_of(edges), edges.target_pointers, edges.source_pointers, edges.num_rows)


class _WeibullEdges(torch.autograd.Function):
    """Output and KL from scores or their parts, values, and a prior or the network that computes it."""

    @staticmethod
    def forward(
        ctx: Any, first, second, slope: float | None, of_features: bool, value, log_prior, key, w_in, b_in, w_out, b_out,
        used, seed, graph: Graph, divergence: Divergence,
    ):  # fmt: skip
        value = value.contiguous()
        scores, pair = features.opened(first, second, slope, of_features, value, graph.indices.source.shape[0])
        ctx.graph, ctx.slope, ctx.dtype = graph, slope, first.dtype
        ctx.key_is_value = key is None and w_in is not None
        network = ()
        if w_in is not None:
            key, *weights = [x.contiguous() for x in (value if key is None else key, w_in, b_in, w_out, b_out)]
            log_prior = nodes_forward(key, weights, used)
            network = (key, *weights, used, log_prior)
        ctx.plan = plan_of(scores, None if log_prior is None else log_prior.stride(), graph, divergence)
        out, kl, *rest = run_forward(ctx.plan, scores, value, log_prior, seed, graph, pair)
        vectors = (first, second) if of_features else (None, None)
        ctx.save_for_backward(*vectors, scores, value, seed, out, *rest, *network)
        ctx.set_materialize_grads(False)
        # the cast is inside, so that output and KL are results of the same node
        return out.to(value.dtype), kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad, grad_kl):
        att_source, att_target, scores, value, seed, out, *rest = ctx.saved_tensors
        rest, network = rest[:4], rest[4:]
        grad, grad_kl = _or_zeros(grad, grad_kl, out)
        *grads, grad_value, grad_prior = run_backward(
            ctx.plan, grad, grad_kl, scores, value, seed, ctx.graph, out, *rest, ctx.slope
        )
        grad_key, to_network = None, (None,) * 4
        if network:
            key, *weights, used, log_prior = network
            needs_key = ctx.key_is_value or ctx.needs_input_grad[6]
            grad_key, *to_network = nodes_backward(key, weights, used, log_prior, grad_prior, needs_key)
        if att_source is None:
            grads = [None if x is None else saturate(x, ctx.dtype) for x in grads]
        else:
            joined = grad_key if ctx.key_is_value else None
            *grads, grad_value = features.gradients(value, att_source, att_target, *grads, grad_value, joined)
        to_prior = None if network or rest[-1] is None else grad_prior
        to_key = None if ctx.key_is_value or grad_key is None else grad_key.transpose(0, 1)
        return *grads, None, None, grad_value, to_prior, to_key, *to_network, None, None, None, None


def _or_zeros(grad: Tensor | None, grad_kl: Tensor | None, out: Tensor) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(out) if grad is None else grad, out.new_zeros(1) if grad_kl is None else grad_kl


def _forward_as_operator(
    scores: Tensor,
    value: Tensor,
    log_prior: Tensor | None,
    seed: Tensor,
    graph: list[Tensor],
    num_targets: int,
    constants: list[float],
    forms: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run `run_forward` with types that a schema allows; without a prior α is empty."""
    strides = None if log_prior is None else log_prior.stride()
    edges = _graph(graph, num_targets)
    plan = plan_of(scores, strides, edges, _divergence(constants, forms))
    *results, alpha = run_forward(plan, scores.contiguous(), value.contiguous(), log_prior, seed, edges)
    return *results, scores.new_empty(0) if alpha is None else alpha  # type: ignore[return-value]  (six)


def _graph(tensors: list[Tensor], num_targets: int) -> Graph:
    """Return the graph made of these tensors, in the order of `weibull_attention`."""
    return Graph(Indices(*tensors[:-3], num_targets=num_targets), *tensors[-3:])


def _divergence(constants: list[float], forms: str) -> Divergence:
    weibull_k, gamma_beta, gamma_alpha = constants
    return Divergence(weibull_k, gamma_beta, gamma_alpha, *forms.split())


def _fake_forward(scores, value, log_prior, seed, graph, num_targets, *divergence):
    rows = (num_targets, scores.shape[1])
    results = [scores.new_empty(size) for size in ((1,), rows, rows, rows, 0 if log_prior is None else log_prior.shape)]
    return value.new_empty((*rows, value.shape[2]), dtype=torch.float32), *results


def _backward_as_operator(
    grad: Tensor,
    grad_kl: Tensor,
    scores: Tensor,
    value: Tensor,
    alpha: Tensor | None,
    seed: Tensor,
    graph: list[Tensor],
    num_targets: int,
    results: list[Tensor],
    constants: list[float],
    forms: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run `run_backward` with types that a schema allows; without a prior its gradient is empty."""
    strides = None if alpha is None else alpha.stride()
    edges = _graph(graph, num_targets)
    plan = plan_of(scores, strides, edges, _divergence(constants, forms))
    out, lse, clean, first = results
    grad_scores, _, *grads = run_backward(
        plan, grad, grad_kl, scores.contiguous(), value.contiguous(), seed, edges, out, lse, clean, first, alpha
    )
    return grad_scores, *grads  # type: ignore[return-value]  (three)


def _fake_backward(grad, grad_kl, scores, value, alpha, *options):
    grad_prior = scores.new_empty(0 if alpha is None else alpha.shape)
    return scores.new_empty(scores.shape), value.new_empty(value.shape), grad_prior


weibull_edges_backward = operator("weibull_edges_backward", _backward_as_operator, fake=_fake_backward)


def _keep(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
    scores, value, log_prior, seed, graph, ctx.num_targets, *ctx.divergence = inputs
    out, _, lse, clean, first, alpha = output
    ctx.has_prior = log_prior is not None
    ctx.save_for_backward(out, lse, clean, first, alpha, scores, value, seed, *graph)
    ctx.mark_non_differentiable(lse, clean, first, alpha)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad, grad_kl, *_):
    out, lse, clean, first, alpha, scores, value, seed, *graph = ctx.saved_tensors
    grad, grad_kl = _or_zeros(grad, grad_kl, out)
    alpha, results = alpha if ctx.has_prior else None, [out, lse, clean, first]
    *grads, grad_prior = weibull_edges_backward(
        grad, grad_kl, scores, value, alpha, seed, graph, ctx.num_targets, results, *ctx.divergence
    )
    # seed, graph, number of targets, constants, forms
    return *grads, grad_prior if ctx.has_prior else None, None, [None] * len(graph), None, None, None


weibull_edges_forward = operator(
    "weibull_edges_forward", _forward_as_operator, fake=_fake_forward, keep=_keep, differentiate=_differentiate
)
