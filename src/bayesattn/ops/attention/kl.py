"""The KL of a whole attention call, from sums over its scores instead of its m × n entries (README.md has the algebra).

Summed over the entries (i, j) that exist, the per-entry divergences of `divergences.py` become

    Weibull    Σ_j m_j c_j  −  Σ_j α_j T_j  +  Σ_i R_i        T_j = Σ_i Φ_ij,  R_i = β Σ_j exp Φ_ij,  m_j queries of key j
    Lognormal  Σ_ij ((Φ_ij − σ_q²/2 − μ_j)/σ_p)²/2  +  constant

With raw scores R_i = β exp(LSE_i); with Φ = log-softmax R_i = β and T_j loses the LSEs of its rows. So the Weibull KL
needs one number per row and one per key, and any backend that returns the LSE can have it.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bayesattn.config import AttentionConfig
from bayesattn.divergences import lognormal_constant, weibull_gamma_key_term
from bayesattn.ops.attention.masking import masked_logsumexp

Mask = Bool[Tensor, "#b #h #m n"] | None

# beyond this, R_i = β Σ_j exp(Φ_ij) goes on linearly in its logarithm instead of exponentially
LOG_ROW_CAP = 10.0


def kl_from_scores(
    scores: Float[Tensor, "b h m n"],
    log_prior: Float[Tensor, "#b #h 1 n"] | None,
    mask: Mask,
    config: AttentionConfig,
) -> Float[Tensor, " b"]:
    """Return KL(q(S) ‖ p(S)) of each example, reduced as `config.kl_reduction` says, masked entries excluded.

    Args:
        scores: Φ before any normalisation.
        log_prior: ln Ψ of the contextual prior; None for a fixed one.
        mask: Which entries exist.
        config: Family, prior and conventions.
    """
    if mask is not None:
        scores = scores.masked_fill(~mask, 0.0)
    needs_lse = config.family == "weibull" or config.score_form == "log_softmax"
    lse = masked_logsumexp(scores, mask) if needs_lse else None
    if config.family == "weibull":
        return weibull_kl(scores.sum(dim=-2, keepdim=True), lse, log_prior, mask, config)
    return _lognormal_kl(scores, lse, log_prior, mask, config)


def weibull_kl(
    column_sums: Float[Tensor, "b h 1 n"],
    lse: Float[Tensor, "b h m"],
    log_prior: Float[Tensor, "#b #h 1 n"] | None,
    mask: Mask,
    config: AttentionConfig,
) -> Float[Tensor, " b"]:
    """Return the Weibull KL of each example from the raw scores' sum over each key's queries and LSE of each row."""
    m, n = lse.shape[-1], column_sums.shape[-1]
    if log_prior is None:
        log_alpha = column_sums.new_full((1, 1, 1, n), math.log(config.gamma_alpha))
    else:
        log_alpha = _zero_where_unused(log_prior, mask)
        log_alpha = log_alpha + (math.log(config.gamma_beta) if config.alpha_form == "beta_psi" else 0.0)
    alpha = torch.exp(log_alpha)
    key_term = weibull_gamma_key_term(log_alpha, weibull_k=config.weibull_k, gamma_beta=config.gamma_beta)
    entries = _queries_per_key(mask, m, lse.dtype) * key_term - alpha * column_sums
    if config.score_form == "raw":
        rows = capped_exp(lse + math.log(config.gamma_beta))
    else:
        row_alpha = alpha.sum(dim=-1) if mask is None else (alpha * mask).sum(dim=-1)
        rows = config.gamma_beta + lse * row_alpha
    if mask is not None:
        rows = rows.masked_fill(~mask.any(dim=-1), 0.0)
    kl = entries.expand_as(column_sums).flatten(1).sum(dim=-1) + rows.flatten(1).sum(dim=-1)
    return _reduce(kl, (lse.shape[1], m, n), mask, config)


def _lognormal_kl(
    scores: Tensor, lse: Tensor | None, log_prior: Tensor | None, mask: Mask, config: AttentionConfig
) -> Tensor:
    _, h, m, n = scores.shape
    mu_p = config.mu_p
    if log_prior is not None:
        log_prior = _zero_where_unused(log_prior, mask)
        mu_p = log_prior if config.mu_form == "log_psi" else torch.exp(log_prior)
    phi = scores if lse is None else scores - lse.unsqueeze(-1)
    half_squares = 0.5 * ((phi - 0.5 * config.sigma_q**2 - mu_p) / config.sigma_p).square()
    if mask is not None:
        half_squares = half_squares.masked_fill(~mask, 0.0)
    constant = lognormal_constant(sigma_q=config.sigma_q, sigma_p=config.sigma_p)
    entries = half_squares.sum(dim=-2, keepdim=True) + constant * _queries_per_key(mask, m, scores.dtype)
    return _reduce(entries.flatten(1).sum(dim=-1), (h, m, n), mask, config)


def capped_exp(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """Return exp(x), continued beyond `LOG_ROW_CAP` as a straight line of the same value and slope."""
    return torch.exp(x.clamp(max=LOG_ROW_CAP)) + math.exp(LOG_ROW_CAP) * (x - LOG_ROW_CAP).clamp(min=0.0)


def _zero_where_unused(log_prior: Tensor, mask: Mask) -> Tensor:
    # a key nobody may attend to has ln Ψ = −inf; it counts nowhere, but 0 · inf would be NaN
    return log_prior if mask is None else torch.where(mask.any(dim=-2, keepdim=True), log_prior, 0.0)


def _queries_per_key(mask: Mask, m: int, dtype: torch.dtype) -> Tensor | int:
    return m if mask is None else mask.sum(dim=-2, keepdim=True, dtype=dtype) * (m // mask.shape[-2])


def _reduce(kl: Tensor, shape: tuple[int, int, int], mask: Mask, config: AttentionConfig) -> Tensor:
    if config.kl_reduction == "sum":
        return kl
    h, m, n = shape
    per_entry = config.kl_reduction == "mean"
    size = h * m * (n if per_entry else 1)
    if mask is None:
        return kl / max(size, 1)
    valid = mask if per_entry else mask.any(dim=-1)
    # a mask that broadcasts over heads or queries counts once for each
    count = valid.flatten(1).sum(dim=-1) * (size // max(math.prod(valid.shape[1:]), 1))
    return kl / count.clamp(min=1)
