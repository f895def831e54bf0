"""Stochastic attention on edges: scores → noise → softmax over each target's edges → weighted sum, and the KL.

With the adjacency matrix as its mask, `ops/attention` computes the same result by the same conventions: float32 or better,
Φ, the four forms of the config, and targets without edges do not count. The formulas are written once, in terms of a few
sums and gathers from `plain` (any device and order of edges) or `csr` (sorted edges on a CPU).
"""

import math
from types import ModuleType
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from bayesattn import noise
from bayesattn.config import AttentionConfig
from bayesattn.divergences import kl_lognormal_lognormal, log_alpha_shift, weibull_gamma_key_term
from bayesattn.ops.attention.kl import capped_exp
from bayesattn.ops.segment import plain
from bayesattn.ops.segment.draws import edge_log_noise
from bayesattn.ops.segment.edges import Edges
from bayesattn.precision import upcast

PriorScope = Literal["graph", "neighborhood"]
PRIOR_SCOPES = get_args(PriorScope)


class EdgeAttention(NamedTuple):
    """The result of attention on edges.

    Attributes:
        output: Features of each target; 0 for a target without edges.
        weights: Weights of the edges; None if a kernel did not store them.
        dropped: The weights after dropout.
        kl: KL of the graph, as one entry; None if it was not requested.

    Example:
        >>> from bayesattn.functional import edge_attention
        >>> edges = Edges.sort(torch.tensor([0, 1]), torch.tensor([0, 0]), 2, 2)
        >>> config = AttentionConfig("soft")
        >>> found = edge_attention(torch.zeros(2, 1), torch.ones(2, 1, 4), edges, config=config, need_weights=True)
        >>> found.weights.flatten(), found.output[:, 0, 0]  # node 1 has no edge
        (tensor([0.5000, 0.5000]), tensor([1., 0.]))
    """

    output: Float[Tensor, "r h d"]
    weights: Float[Tensor, "e h"] | None
    dropped: Float[Tensor, "e h"] | None
    kl: Float[Tensor, " 1"] | None


def attention(
    scores: Float[Tensor, "e h"],
    value: Float[Tensor, "n h d"],
    edges: Edges,
    *,
    config: AttentionConfig,
    log_prior: Float[Tensor, "n #h"] | None,
    prior_scope: PriorScope,
    seed: noise.Seed | None,
    sample: bool,
    need_kl: bool,
    dropout_p: float,
    ops: ModuleType = plain,
) -> EdgeAttention:
    """Return output, weights and KL of one draw or, without `sample`, of the posterior mean."""
    phi = upcast(scores)
    weights = sample_weights(phi, edges, seed, config, ops) if sample else ops.softmax(phi, edges)
    dropped = ops.dropout(weights, dropout_p) if dropout_p > 0.0 else weights
    output = ops.weighted_sum(dropped, upcast(value).to(dropped.dtype), edges).to(value.dtype)
    kl = kl_total(phi, log_prior, edges, config, prior_scope, ops) if need_kl else None
    return EdgeAttention(output, weights, dropped, kl)


def sample_weights(
    scores: Float[Tensor, "e h"], edges: Edges, seed: noise.Seed | None, config: AttentionConfig, ops: ModuleType = plain
) -> Float[Tensor, "e h"]:
    """Draw W, the softmax of Φ + ln E / k or Φ + σ_q ε over the edges of each target."""
    return ops.softmax(scores, edges, edge_log_noise(seed, edges.numbers, scores.shape[1], config, scores.dtype))


def kl_total(
    scores: Float[Tensor, "e h"],
    log_prior: Float[Tensor, "n #h"] | None,
    edges: Edges,
    config: AttentionConfig,
    prior_scope: PriorScope = "graph",
    ops: ModuleType = plain,
) -> Float[Tensor, " 1"]:
    """Return KL(q(S) ‖ p(S)) of the whole graph, reduced as `config.kl_reduction` says; one entry: a graph is one example.

    `scores` is Φ before any normalization. `log_prior` is ln Ψ of each source, normalized over the graph, or None for a
    fixed prior; `prior_scope` says whether to normalize it over the sources of each target instead. `ops` is `plain` or
    `csr`.
    """
    return reduce_kl(kl_by_head(scores, log_prior, edges, config, prior_scope, ops).sum(), edges, scores.shape[1], config)


def kl_by_head(
    scores: Float[Tensor, "e h"],
    log_prior: Float[Tensor, "n #h"] | None,
    edges: Edges,
    config: AttentionConfig,
    prior_scope: PriorScope = "graph",
    ops: ModuleType = plain,
) -> Float[Tensor, " h"]:
    """Return the KL of each head, summed over the edges; the arguments are those of `kl_total`."""
    lse = ops.logsumexp(scores, edges)
    phi = scores - ops.lift_target(lse, edges) if config.score_form == "log_softmax" else scores
    if log_prior is not None:
        log_prior = log_prior.to(scores.dtype)
        if prior_scope == "neighborhood":
            log_prior = edge_log_prior(log_prior, edges, ops)
    if config.family == "weibull":
        return _weibull_entries(phi, log_prior, prior_scope, edges, config, ops) + weibull_rows(lse, edges, config)
    location = _location(phi, log_prior, prior_scope, edges, config, ops)
    return kl_lognormal_lognormal(phi, location, sigma_q=config.sigma_q, sigma_p=config.sigma_p).sum(dim=0)


def edge_log_prior(log_prior: Float[Tensor, "n h"], edges: Edges, ops: ModuleType = plain) -> Float[Tensor, "e h"]:
    """Return ln Ψ of each edge, normalized over the edges of its target; the normalization over the graph cancels."""
    lifted = ops.lift_source(log_prior, edges)
    return lifted - ops.lift_target(ops.logsumexp(lifted, edges), edges)


def log_alpha(log_prior: Float[Tensor, "x h"] | None, config: AttentionConfig, like: Tensor) -> Float[Tensor, "#x #h"]:
    """Return ln α of the Gamma prior."""
    has_prior, scale = log_prior is not None, {"gamma_alpha": config.gamma_alpha, "gamma_beta": config.gamma_beta}
    shift = log_alpha_shift(has_prior, config.alpha_form, **scale)
    return like.new_full((1, 1), shift) if log_prior is None else log_prior + shift


def reduce_kl(kl: Float[Tensor, ""], edges: Edges, heads: int, config: AttentionConfig) -> Float[Tensor, " 1"]:
    """Divide the KL of the graph as `config.kl_reduction` says: by 1, or by its number of rows or entries in all heads."""
    if config.kl_reduction == "sum":
        return kl.view(1)
    rows = max(len(edges), 1) if config.kl_reduction == "mean" else edges.num_rows.clamp(min=1)
    return kl.view(1) / (rows * heads)


def _weibull_entries(phi, log_prior, prior_scope, edges: Edges, config: AttentionConfig, ops) -> Tensor:
    """Return Σ_e c_e − α_e Φ_e of each head.

    With one α per source it is Σ_j m_j c_j − α_j T_j, where T_j = Σ Φ over the m_j edges of j.
    """
    constants = {"weibull_k": config.weibull_k, "gamma_beta": config.gamma_beta}
    if log_prior is None:
        log_a = log_alpha(None, config, phi)
        return len(phi) * weibull_gamma_key_term(log_a, **constants)[0] - config.gamma_alpha * phi.sum(dim=0)
    if prior_scope == "neighborhood":
        log_a = log_alpha(log_prior, config, phi)
        return (weibull_gamma_key_term(log_a, **constants) - torch.exp(log_a) * phi).sum(dim=0)
    # a node that is no edge's source has ln Ψ = −inf; it is not counted, but 0 · inf would be NaN
    log_a = log_alpha(zero_where_unused(log_prior, edges), config, phi)
    key_term = edges.out_degree[:, None] * weibull_gamma_key_term(log_a, **constants)
    sums = key_term.expand(-1, phi.shape[1]) - torch.exp(log_a) * ops.sum_by_source(phi, edges)
    return sums.sum(dim=0)


def weibull_rows(lse: Float[Tensor, "r h"], edges: Edges, config: AttentionConfig) -> Float[Tensor, " h"]:
    """Return Σ_i β Σ_e exp Φ_e of each head, from the rows' log-sum-exp; a row's term is β if Φ is the log-softmax."""
    if config.score_form != "raw":
        return (config.gamma_beta * edges.num_rows.to(lse.dtype)).expand(lse.shape[1])
    rows = capped_exp(lse + math.log(config.gamma_beta))
    return rows.masked_fill((edges.degree == 0)[:, None], 0.0).sum(dim=0)


def _location(phi, log_prior, prior_scope, edges: Edges, config: AttentionConfig, ops) -> Tensor:
    """Return μ_p of each edge, or one for all."""
    if log_prior is None:
        return phi.new_full((1, 1), config.mu_p)
    if prior_scope == "graph":
        log_prior = ops.lift_source(zero_where_unused(log_prior, edges), edges)
    return log_prior if config.mu_form == "log_psi" else torch.exp(log_prior)


def zero_where_unused(log_prior: Float[Tensor, "n h"], edges: Edges) -> Float[Tensor, "n h"]:
    """Replace ln Ψ = −inf of nodes that are no edge's source by 0."""
    return torch.where((edges.out_degree > 0)[:, None], log_prior, 0.0)
