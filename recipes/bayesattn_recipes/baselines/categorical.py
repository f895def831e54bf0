"""Categorical distributions over the valid keys of a row, in log space; a row without keys is 0 everywhere."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bayesattn import noise

Valid = Bool[Tensor, "..."] | None


def log_probs(scores: Float[Tensor, "*b n"], mask: Valid = None) -> Float[Tensor, "*b n"]:
    """Return log-softmax over the valid keys in float32 or better; −inf at the others."""
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if mask is None:
        return torch.log_softmax(scores, dim=-1)
    has_key = mask.any(dim=-1, keepdim=True)
    # rows without a key get finite scores, so that no NaN arises; all their entries are closed afterwards
    filled = scores.masked_fill(~mask, -math.inf).masked_fill(~has_key, 0.0)
    return torch.log_softmax(filled, dim=-1).masked_fill(~mask, -math.inf)


class Parts(NamedTuple):
    """A distribution over keys as a mixture of m others.

    Attributes:
        log_probs: ln of the probability of each part.
        weights: The distribution of each part over the keys.
    """

    log_probs: Float[Tensor, "*b m"]
    weights: Float[Tensor, "*b m n"]


def largest(log_p: Float[Tensor, "*b n"], count: int | None) -> Parts:
    """Return the `count` most probable keys, each a part of its own, and the rest as one more; every key alone if None.

    So m = count + 1, or n if that is less. A part without any probability has log-probability −inf.
    """
    n = log_p.shape[-1]
    if count is None or count + 1 >= n:
        return Parts(log_p, torch.eye(n, device=log_p.device, dtype=log_p.dtype).expand(*log_p.shape, n))
    chosen = log_p.detach().topk(count, dim=-1).indices
    alone = torch.zeros((*chosen.shape, n), device=log_p.device, dtype=log_p.dtype).scatter_(-1, chosen.unsqueeze(-1), 1.0)
    is_open = (log_p.detach() > -math.inf).scatter(-1, chosen, False)
    has_rest = is_open.any(dim=-1, keepdim=True)
    filled = log_p.masked_fill(~is_open, -math.inf).masked_fill(~has_rest, 0.0)
    mass = torch.logsumexp(filled, dim=-1, keepdim=True).masked_fill(~has_rest, -math.inf)
    rest = torch.exp(log_probs(log_p, is_open)).unsqueeze(-2)
    return Parts(torch.cat([log_p.gather(-1, chosen), mass], dim=-1), torch.cat([alone, rest], dim=-2))


def expect(log_p: Float[Tensor, "*b n"], values: Float[Tensor, "*b n"]) -> Float[Tensor, "*b"]:
    """Return Σ_j p_j values_j over the keys with p_j > 0, whatever the values at the others."""
    closed = log_p == -math.inf
    return (torch.exp(log_p) * values.masked_fill(closed, 0.0)).sum(dim=-1)


def kl(log_q: Float[Tensor, "*b n"], log_p: Float[Tensor, "*b n"]) -> Float[Tensor, "*b"]:
    """Return KL(q ‖ p) of two distributions over the same valid keys."""
    closed = log_q == -math.inf
    return expect(log_q, log_q.masked_fill(closed, 0.0) - log_p.masked_fill(closed, 0.0))


def draw(log_p: Float[Tensor, "*b n"]) -> Int[Tensor, "*b"]:
    """Return one key of each row, by the Gumbel-max rule argmax(ln p − ln E); without waiting for the device."""
    exponential = noise.exponential(None, (1, 1, 1, log_p.numel()), device=log_p.device, dtype=log_p.dtype)
    return (log_p.detach() - exponential.view(log_p.shape).log()).argmax(dim=-1)


def one_hot(index: Int[Tensor, "*b"], log_p: Float[Tensor, "*b n"]) -> Float[Tensor, "*b n"]:
    """Return weight 1 at the chosen key; rows without a valid key stay 0."""
    weights = torch.zeros_like(log_p).scatter_(-1, index.unsqueeze(-1), 1.0)
    return weights.masked_fill(log_p == -math.inf, 0.0)
