"""Stochastic attention in plain torch: the ground truth that every other backend is compared with.

Four short functions: sample the weights, sum the KL, score the keys, and put the three together. Everything runs
in float32 or better whatever the inputs, masks are boolean (True: attend), and a row with no allowed key has
weights 0, KL 0 and gradient 0. The README beside this file derives the row sums.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from bayesattn import noise
from bayesattn.config import AttentionConfig
from bayesattn.divergences import lognormal_constant, weibull_gamma_key_term

# beyond this the row term β Σ_j exp(Φ_ij) of the Weibull KL goes on linearly in its logarithm instead of exponentially
LOG_ROW_CAP = 10.0


def sample_weights(
    scores: Float[Tensor, "b h m n"],
    mask: Bool[Tensor, "#b #h #m n"] | None,
    seed: noise.Seed | None,
    config: AttentionConfig,
) -> Float[Tensor, "b h m n"]:
    """Draw W = softmax(log S) (Eq. 1 with S in place of exp Φ).

    The terms of log S that a row shares cancel, so W = softmax(Φ + ln E / k) or softmax(Φ + σ_q ε).
    """
    b, h, m, n = scores.shape
    shape, options = (b, h, m, n), {"device": scores.device, "dtype": scores.dtype}
    if config.family == "weibull":
        log_noise = noise.exponential(seed, shape, **options).log_().div_(config.weibull_k)
    else:
        log_noise = noise.normal(seed, shape, **options).mul_(config.sigma_q)
    return masked_softmax(scores + log_noise, mask)


def masked_softmax(scores: Float[Tensor, "b h m n"], mask: Bool[Tensor, "#b #h #m n"] | None) -> Float[Tensor, "b h m n"]:
    """Return softmax over the allowed keys; rows without any are 0."""
    if mask is None:
        return torch.softmax(scores, dim=-1)
    has_key = mask.any(dim=-1, keepdim=True)
    return torch.softmax(_close(scores, mask, has_key), dim=-1).masked_fill(~has_key, 0.0)


def masked_logsumexp(scores: Float[Tensor, "b h m n"], mask: Bool[Tensor, "#b #h #m n"] | None) -> Float[Tensor, "b h m"]:
    """Return ln Σ_j exp Φ_ij over the allowed keys; rows without any are 0."""
    if mask is None:
        return torch.logsumexp(scores, dim=-1)
    has_key = mask.any(dim=-1, keepdim=True)
    return torch.logsumexp(_close(scores, mask, has_key), dim=-1).masked_fill(~has_key.squeeze(-1), 0.0)


def _close(scores: Tensor, mask: Tensor, has_key: Tensor) -> Tensor:
    # rows without a key are filled with 0 rather than −inf: no NaN arises that a later fill would have to hide
    shut = torch.zeros((), dtype=scores.dtype, device=scores.device).masked_fill(has_key, -math.inf)
    return torch.where(mask, scores, shut)


def kl_per_example(
    scores: Float[Tensor, "b h m n"],
    log_prior: Float[Tensor, "#b #h 1 n"] | None,
    mask: Bool[Tensor, "#b #h #m n"] | None,
    config: AttentionConfig,
) -> Float[Tensor, " b"]:
    """Return KL(q(S) ‖ p(S)) of each example, reduced as `config.kl_reduction` says, masked entries excluded.

    Args:
        scores: Φ before any normalisation.
        log_prior: ln Ψ of the contextual prior; None for a fixed one.
        mask: Which entries exist.
        config: Family, prior and conventions.
    """
    _, h, m, n = scores.shape
    per_key: Tensor | int = m
    if mask is not None:
        scores = scores.masked_fill(~mask, 0.0)
        per_key = mask.sum(dim=-2, keepdim=True, dtype=scores.dtype) * (m // mask.shape[-2])
        if log_prior is not None:
            # a key nobody may attend to has ln Ψ = −inf; it counts nowhere, but 0 · inf would be NaN
            log_prior = torch.where(mask.any(dim=-2, keepdim=True), log_prior, 0.0)
    needs_lse = config.family == "weibull" or config.score_form == "log_softmax"
    lse = masked_logsumexp(scores, mask) if needs_lse else None
    total = _weibull_kl if config.family == "weibull" else _lognormal_kl
    kl = total(scores, lse, log_prior, mask, per_key, config)
    if config.kl_reduction == "sum":
        return kl
    per_entry = config.kl_reduction == "mean"
    size = h * m * (n if per_entry else 1)
    if mask is None:
        return kl / max(size, 1)
    valid = mask if per_entry else mask.any(dim=-1)
    count = valid.flatten(1).sum(dim=-1) * (size // max(valid[0].numel(), 1))
    return kl / count.clamp(min=1)


def _weibull_kl(scores, lse, log_prior, mask, per_key, config) -> Tensor:
    """Sum over entries: Σ_j c_j·#queries(j) − Σ_ij α_j Φ_ij + Σ_i β Σ_j exp Φ_ij, the last from the row's LSE."""
    if log_prior is None:
        log_alpha = scores.new_full((1, 1, 1, scores.shape[-1]), math.log(config.gamma_alpha))
    else:
        log_alpha = log_prior + (math.log(config.gamma_beta) if config.alpha_form == "beta_psi" else 0.0)
    alpha = torch.exp(log_alpha)
    key_term = weibull_gamma_key_term(log_alpha, weibull_k=config.weibull_k, gamma_beta=config.gamma_beta)
    entries = per_key * key_term - alpha * scores.sum(dim=-2, keepdim=True)
    if config.score_form == "raw":
        rows = capped_exp(lse + math.log(config.gamma_beta))
    else:
        # Φ = score − LSE: the exponentials of a row sum to one, and −Σ_j α_j Φ_ij gains LSE_i Σ_j α_j
        row_alpha = alpha.sum(dim=-1) if mask is None else (alpha * mask).sum(dim=-1)
        rows = config.gamma_beta + lse * row_alpha
    if mask is not None:
        rows = rows.masked_fill(~mask.any(dim=-1), 0.0)
    return _sum_example(entries, scores) + rows.flatten(1).sum(dim=-1)


def _lognormal_kl(scores, lse, log_prior, mask, per_key, config) -> Tensor:
    """Sum over entries of ((Φ − σ_q²/2 − μ_p)/σ_p)²/2 plus the constant."""
    mu_p = config.mu_p
    if log_prior is not None:
        mu_p = log_prior if config.mu_form == "log_psi" else torch.exp(log_prior)
    phi = scores if lse is None else scores - lse.unsqueeze(-1)
    half_squares = 0.5 * ((phi - 0.5 * config.sigma_q**2 - mu_p) / config.sigma_p).square()
    if mask is not None:
        half_squares = half_squares.masked_fill(~mask, 0.0)
    constant = lognormal_constant(sigma_q=config.sigma_q, sigma_p=config.sigma_p)
    entries = half_squares.sum(dim=-2, keepdim=True) + constant * per_key
    return _sum_example(entries, scores)


def _sum_example(entries: Tensor, scores: Tensor) -> Tensor:
    b, h, _, n = scores.shape
    return entries.expand(b, h, 1, n).flatten(1).sum(dim=-1)


def capped_exp(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """Return exp(x), continued beyond `LOG_ROW_CAP` as a straight line of the same value and slope."""
    return torch.exp(x.clamp(max=LOG_ROW_CAP)) + math.exp(LOG_ROW_CAP) * (x - LOG_ROW_CAP).clamp(min=0.0)


def dot_product_scores(
    query: Float[Tensor, "b h m d"], key: Float[Tensor, "b hk n d"], *, scale: float, bias: Float[Tensor, "..."] | None
) -> Float[Tensor, "b h m n"]:
    """Return Φ = scale · Q Kᵀ + bias in float32 or better; key heads are shared by groups of query heads."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    scores = (query.to(dtype) * scale) @ expand_heads(key, query.shape[1]).to(dtype).transpose(-2, -1)
    return scores if bias is None else scores + bias


def expand_heads(x: Float[Tensor, "b hk n d"], num_heads: int) -> Float[Tensor, "b h n d"]:
    """Repeat each key or value head for the query heads that share it."""
    return x if x.shape[1] in (1, num_heads) else x.repeat_interleave(num_heads // x.shape[1], dim=1)


def attention(
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    value: Float[Tensor, "b hk n dv"],
    *,
    config: AttentionConfig,
    log_prior: Float[Tensor, "#b #h 1 n"] | None,
    mask: Bool[Tensor, "#b #h #m n"] | None,
    bias: Float[Tensor, "..."] | None,
    scale: float,
    seed: noise.Seed | None,
    dropout_p: float,
    need_kl: bool,
) -> tuple[Float[Tensor, "b h m dv"], Float[Tensor, " b"] | None]:
    """Return the output O = W V of one sample, and the KL of each example if `need_kl`."""
    scores = dot_product_scores(query, key, scale=scale, bias=bias)
    weights = sample_weights(scores, mask, seed, config)
    kl = kl_per_example(scores, log_prior, mask, config) if need_kl else None
    if dropout_p > 0.0:
        weights = F.dropout(weights, dropout_p)
    value = expand_heads(value, query.shape[1])
    return (weights @ value.to(weights.dtype)).to(value.dtype), kl
