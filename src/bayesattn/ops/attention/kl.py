"""The KL of a whole attention call from sums over its scores instead of its m × n entries (derived in README.md).

Summed over the entries (i, j) that exist, the per-entry divergences of `divergences.py` become

    Weibull    Σ_j m_j c_j  −  Σ_j α_j T_j  +  Σ_i R_i        T_j = Σ_i Φ_ij,  R_i = β Σ_j exp Φ_ij,  m_j queries of key j
    Lognormal  Σ_ij ((Φ_ij − σ_q²/2 − μ_j)/σ_p)²/2  +  constant

With raw scores, R_i = β exp(LSE_i). With Φ = log-softmax, R_i = β, and the LSEs of the rows are subtracted from T_j. So the
Weibull KL needs one number per row and one per key, which any backend that returns the LSE can compute.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bayesattn.config import AttentionConfig
from bayesattn.divergences import log_alpha_shift, lognormal_constant, weibull_gamma_key_term
from bayesattn.ops.attention.masking import Allowed, masked_logsumexp

Mask = Bool[Tensor, "#b #h #m n"] | None

# above this value of ln R_i, R_i = β Σ_j exp(Φ_ij) continues linearly in ln R_i instead of exponentially
LOG_ROW_CAP = 10.0


def kl_from_scores(
    scores: Float[Tensor, "b h m n"],
    log_prior: Float[Tensor, "#b #h 1 n"] | None,
    mask: Mask,
    config: AttentionConfig,
) -> Float[Tensor, " b"]:
    """Return KL(q(S) ‖ p(S)) per example over the unmasked entries, reduced by `config.kl_reduction`.

    Args:
        scores: Φ before any normalization.
        log_prior: ln Ψ of the contextual prior; None for a fixed prior.
        mask: True where an entry exists; None if all do.
        config: Family, prior and conventions.
    """
    b, h, m, n = scores.shape
    allowed = Allowed(mask, False, (b, h, m, n))
    if mask is not None:
        scores = scores.masked_fill(~mask, 0.0)
    needs_lse = config.family == "weibull" or config.score_form == "log_softmax"
    lse = masked_logsumexp(scores, mask) if needs_lse else None
    if config.family == "weibull" and lse is not None:
        return weibull_kl(scores.sum(dim=-2, keepdim=True), lse, log_prior, allowed, config)
    # subtracted per entry, because subtracting from the sums would lose digits
    phi = scores if lse is None else scores - lse.unsqueeze(-1)
    deviation = phi - lognormal_location(log_prior, allowed, config)
    if mask is not None:
        deviation = deviation.masked_fill(~mask, 0.0)
    return lognormal_kl(deviation.sum(dim=-1), deviation.square().sum(dim=-1), None, allowed, config)


def weibull_kl(
    column_sums: Float[Tensor, "b h 1 n"],
    lse: Float[Tensor, "b h m"],
    log_prior: Float[Tensor, "#b #h 1 n"] | None,
    allowed: Allowed,
    config: AttentionConfig,
) -> Float[Tensor, " b"]:
    """Return the Weibull KL per example from the raw scores' column sums T_j and LSE per row.

    The column sums of keys without a query are ignored.
    """
    column_sums = _zero_unless(allowed.has_query(lse.device), column_sums)
    log_a = log_alpha(log_prior, allowed, config, column_sums)
    alpha = torch.exp(log_a)
    key_term = weibull_gamma_key_term(log_a, weibull_k=config.weibull_k, gamma_beta=config.gamma_beta)
    entries = allowed.queries_per_key(lse) * key_term - alpha * column_sums
    if config.score_form == "raw":
        rows = capped_exp(lse + math.log(config.gamma_beta))
    else:
        rows = config.gamma_beta + lse * allowed.sum_over_keys(alpha)
    return _reduce(entries.expand_as(column_sums).flatten(1).sum(dim=-1) + _sum_rows(rows, allowed), allowed, config)


def log_alpha(
    log_prior: Float[Tensor, "#b #h 1 n"] | None, allowed: Allowed, config: AttentionConfig, like: Tensor
) -> Float[Tensor, "#b #h 1 n"]:
    """Return ln α of each key's Gamma prior; contextual keys without a query count as ln Ψ = 0.

    A fixed prior takes dtype and device from `like`.
    """
    shift = log_alpha_shift(
        log_prior is not None, config.alpha_form, gamma_alpha=config.gamma_alpha, gamma_beta=config.gamma_beta
    )
    if log_prior is None:
        return like.new_full((1, 1, 1, allowed.shape[-1]), shift)
    return _zero_unless(allowed.has_query(log_prior.device), log_prior) + shift


def lognormal_location(
    log_prior: Float[Tensor, "#b #h 1 n"] | None, allowed: Allowed, config: AttentionConfig
) -> Float[Tensor, "#b #h 1 n"] | float:
    """Return μ_p per key, or one number for a fixed prior."""
    if log_prior is None:
        return config.mu_p
    log_prior = _zero_unless(allowed.has_query(log_prior.device), log_prior)
    return log_prior if config.mu_form == "log_psi" else torch.exp(log_prior)


def lognormal_kl(
    first: Float[Tensor, "b h m"],
    second: Float[Tensor, "b h m"],
    lse: Float[Tensor, "b h m"] | None,
    allowed: Allowed,
    config: AttentionConfig,
) -> Float[Tensor, " b"]:
    """Return the lognormal KL per example from the row sums first = Σ_j (score − μ_j) and second = Σ_j (score − μ_j)².

    With x_i = σ_q²/2 (+ LSE_i if Φ is the log-softmax), Σ_j (score − μ_j − x_i)² = second − 2 x_i first + n_i x_i².
    """
    shift = 0.5 * config.sigma_q**2 + (0.0 if lse is None else lse)
    keys = allowed.sum_over_keys(first.new_ones((1, 1, 1, allowed.shape[-1])))
    squares = second - 2.0 * shift * first + keys * shift**2
    return _reduce(_sum_rows(_from_squares(squares, keys, config), allowed), allowed, config)


def lognormal_kl_from_squares(
    squares: Float[Tensor, " b"], allowed: Allowed, config: AttentionConfig
) -> Float[Tensor, " b"]:
    """Return the lognormal KL per example from Σ_ij (score − μ_j − x_i)², with x_i as in `lognormal_kl`."""
    keys = allowed.sum_over_keys(squares.new_ones((1, 1, 1, allowed.shape[-1])))
    entries = keys.expand(allowed.shape[:3]).flatten(1).sum(dim=-1)
    return _reduce(_from_squares(squares, entries, config), allowed, config)


def _from_squares(
    squares: Float[Tensor, "*s"], entries: Float[Tensor, "*#s"], config: AttentionConfig
) -> Float[Tensor, "*s"]:
    """Return the lognormal KL of a number of entries from the sum of (score − μ_j − x_i)² over them."""
    constant = lognormal_constant(sigma_q=config.sigma_q, sigma_p=config.sigma_p)
    return 0.5 * squares / config.sigma_p / config.sigma_p + constant * entries


def capped_exp(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """Return exp(x), continued above `LOG_ROW_CAP` by its tangent."""
    line = math.exp(LOG_ROW_CAP) * (1.0 + x - LOG_ROW_CAP)
    return torch.where(x < LOG_ROW_CAP, torch.exp(x.clamp(max=LOG_ROW_CAP)), line)


def _zero_unless(used: Tensor | None, x: Tensor) -> Tensor:
    # a key without a query has ln Ψ = −inf; it is not counted, but 0 · inf would be NaN
    return x if used is None else torch.where(used, x, 0.0)


def _sum_rows(rows: Tensor, allowed: Allowed) -> Tensor:
    has_key = allowed.has_key(rows.device)
    if has_key is not None:
        rows = rows.masked_fill(~has_key, 0.0)
    elif allowed.shape[-1] == 0:
        rows = torch.zeros_like(rows)
    return rows.flatten(1).sum(dim=-1)


def _reduce(kl: Tensor, allowed: Allowed, config: AttentionConfig) -> Tensor:
    return kl if config.kl_reduction == "sum" else kl / allowed.count(per_entry=config.kl_reduction == "mean")
