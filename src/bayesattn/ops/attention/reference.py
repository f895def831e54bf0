"""Stochastic attention in plain torch: the ground truth for every other backend.

It computes in float32 or wider. Masks are boolean (True: attend). A row without allowed keys has weights, KL and gradient 0.
Its other parts are `masking.py` and `kl.py`.
"""

import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from bayesattn import noise
from bayesattn.config import AttentionConfig
from bayesattn.ops.attention.kl import kl_from_scores
from bayesattn.ops.attention.masking import Allowed, masked_softmax
from bayesattn.precision import upcast


def sample_weights(
    scores: Float[Tensor, "b h m n"],
    mask: Bool[Tensor, "#b #h #m n"] | None,
    seed: noise.Seed | None,
    config: AttentionConfig,
) -> Float[Tensor, "b h m n"]:
    """Draw W = softmax(log S) (Eq. 1 with S in place of exp Φ).

    Terms of log S that are constant along a row cancel, so W = softmax(Φ + ln E / k) or softmax(Φ + σ_q ε).
    """
    b, h, m, n = scores.shape
    log_noise = noise.log_noise(seed, (b, h, m, n), config, device=scores.device, dtype=scores.dtype)
    return noisy_softmax(scores, log_noise, mask)


def noisy_softmax(
    scores: Float[Tensor, "*bh m n"], log_noise: Float[Tensor, "*#bh #m n"], mask: Bool[Tensor, "*#bh #m n"] | None = None
) -> Float[Tensor, "*bh m n"]:
    """Return the weights softmax(Φ + noise) over the allowed keys (noise: `noise.log_noise`)."""
    return masked_softmax(scores + log_noise, mask)


def dot_product_scores(
    query: Float[Tensor, "b h m d"], key: Float[Tensor, "b hk n d"], *, scale: float, bias: Float[Tensor, "..."] | None
) -> Float[Tensor, "b h m n"]:
    """Return Φ = scale · Q Kᵀ + bias in float32 or wider; groups of query heads may share a key head."""
    scores = (upcast(query) * scale) @ expand_heads(upcast(key), query.shape[1]).transpose(-2, -1)
    return scores if bias is None else scores + upcast(bias)


def expand_heads(x: Float[Tensor, "b hk n d"], num_heads: int) -> Float[Tensor, "b h n d"]:
    """Repeat each key or value head for the query heads that share it."""
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], dim=1)


def attention(
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    value: Float[Tensor, "b hk n dv"],
    *,
    config: AttentionConfig,
    log_prior: Float[Tensor, "#b #h 1 n"] | None,
    allowed: Allowed,
    bias: Float[Tensor, "..."] | None,
    scale: float,
    seed: noise.Seed | None,
    dropout_p: float,
    need_kl: bool,
) -> tuple[Float[Tensor, "b h m dv"], Float[Tensor, " b"] | None]:
    """Return the output O = W V of one sample and, if `need_kl`, the KL per example."""
    scores = dot_product_scores(query, key, scale=scale, bias=bias)
    mask = allowed.dense(query.device)
    weights = sample_weights(scores, mask, seed, config)
    kl = kl_from_scores(scores, log_prior, mask, config) if need_kl else None
    if dropout_p > 0.0:
        weights = drop(weights, dropout_p, seed)
    return weighted_values(weights, value), kl


def drop(weights: Float[Tensor, "b h m n"], p: float, seed: noise.Seed | None) -> Float[Tensor, "b h m n"]:
    """Return the weights after dropout, drawn from the noise seed if there is one."""
    if seed is None:
        return F.dropout(weights, p)
    b, h, m, n = weights.shape
    return weights * noise.dropout_factor(seed, (b, h, m, n), p, device=weights.device, dtype=weights.dtype)


def weighted_values(weights: Float[Tensor, "b h m n"], value: Float[Tensor, "b hk n dv"]) -> Float[Tensor, "b h m dv"]:
    """Return O = W V, computed in the dtype of the weights and cast to that of the values."""
    return (weights @ expand_heads(upcast(value), weights.shape[1]).to(weights.dtype)).to(value.dtype)
