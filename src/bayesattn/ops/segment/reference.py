"""Stochastic attention on edges in plain torch: scores → noise → softmax over each row's edges, and its KL.

An edge e is one entry of a sparse attention matrix; `index[e]` is its row, the node that attends. With an adjacency
matrix as the mask, `ops/attention` computes the same thing densely, and every convention here is that file's: float32
or better, Φ, the four options of the config, rows without an edge count nowhere.

Noise: the draw of edge e and head h is the entry (b=0, h=0, i=e, j=h) of `bayesattn.noise`, shape (1, 1, edges, heads).
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bayesattn import noise
from bayesattn.config import AttentionConfig
from bayesattn.divergences import kl_lognormal_lognormal, weibull_gamma_key_term
from bayesattn.ops.attention.kl import capped_exp


def sample_weights(
    scores: Float[Tensor, "e h"], index: Int[Tensor, " e"], num_rows: int, seed: noise.Seed | None, config: AttentionConfig
) -> Float[Tensor, "e h"]:
    """Draw W = softmax over the edges of a row of Φ + ln E / k or Φ + σ_q ε."""
    e, h = scores.shape
    log_noise = noise.log_noise(seed, (1, 1, e, h), config, device=scores.device, dtype=scores.dtype)
    return segment_softmax(scores + log_noise.view(e, h), index, num_rows)


def segment_softmax(scores: Float[Tensor, "e h"], index: Int[Tensor, " e"], num_rows: int) -> Float[Tensor, "e h"]:
    """Return exp(Φ_e) over the sum of it on the edges of the same row."""
    return torch.exp(scores - segment_logsumexp(scores, index, num_rows)[index])


def segment_logsumexp(scores: Float[Tensor, "e h"], index: Int[Tensor, " e"], num_rows: int) -> Float[Tensor, "r h"]:
    """Return ln Σ exp Φ_e over the edges of each row; rows without an edge are 0."""
    rows = scores.new_zeros(num_rows, scores.shape[1])
    # the largest score only shifts: no gradient through it, and 0 where a row has no edge
    largest = rows.scatter_reduce(0, index[:, None].expand_as(scores), scores.detach(), "amax", include_self=False)
    total = rows.index_add(0, index, torch.exp(scores - largest[index]))
    has_edge = total > 0
    return torch.where(has_edge, largest + torch.log(total.masked_fill(~has_edge, 1.0)), 0.0)


def kl_total(
    scores: Float[Tensor, "e h"],
    log_prior: Float[Tensor, "e #h"] | None,
    index: Int[Tensor, " e"],
    num_rows: int,
    config: AttentionConfig,
) -> Float[Tensor, " 1"]:
    """Return KL(q(S) ‖ p(S)) of the whole graph, reduced as `config.kl_reduction` says; one entry: a graph is one example.

    Args:
        scores: Φ before any normalisation.
        log_prior: ln Ψ of the contextual prior at the edge's source; None for a fixed one.
        index: Row of each edge.
        num_rows: Number of rows.
        config: Family, prior and conventions.
    """
    lse = segment_logsumexp(scores, index, num_rows)
    if config.family == "weibull":
        kl = _weibull_kl(scores, lse, log_prior, index, num_rows, config)
    else:
        phi = scores - lse[index] if config.score_form == "log_softmax" else scores
        mu_p: Tensor = scores.new_tensor(config.mu_p)
        if log_prior is not None:
            mu_p = log_prior if config.mu_form == "log_psi" else torch.exp(log_prior)
        kl = kl_lognormal_lognormal(phi, mu_p, sigma_q=config.sigma_q, sigma_p=config.sigma_p).sum()
    if config.kl_reduction == "sum":
        return kl.view(1)
    rows = max(scores.shape[0], 1) if config.kl_reduction == "mean" else _rows_with_edges(index, num_rows).clamp(min=1)
    return kl.view(1) / (rows * scores.shape[1])


def _weibull_kl(scores, lse, log_prior, index, num_rows, config) -> Tensor:
    """Sum over edges of c_e − α_e Φ_e, and over rows of β Σ exp Φ, the last from the row's LSE."""
    if log_prior is None:
        log_alpha = scores.new_full((1, 1), math.log(config.gamma_alpha))
    else:
        log_alpha = log_prior + (math.log(config.gamma_beta) if config.alpha_form == "beta_psi" else 0.0)
    phi = scores - lse[index] if config.score_form == "log_softmax" else scores
    key_term = weibull_gamma_key_term(log_alpha, weibull_k=config.weibull_k, gamma_beta=config.gamma_beta)
    entries = key_term - torch.exp(log_alpha) * phi
    if config.score_form == "raw":
        has_edge = scores.new_zeros(num_rows, dtype=torch.bool).index_fill(0, index, True)
        rows = capped_exp(lse + math.log(config.gamma_beta)).masked_fill(~has_edge[:, None], 0.0).sum()
    else:
        # exp Φ sums to one in every row that has an edge
        rows = config.gamma_beta * _rows_with_edges(index, num_rows) * scores.shape[1]
    return entries.sum() + rows


def _rows_with_edges(index: Int[Tensor, " e"], num_rows: int) -> Int[Tensor, ""]:
    return index.new_zeros(num_rows).index_fill(0, index, 1).sum()
