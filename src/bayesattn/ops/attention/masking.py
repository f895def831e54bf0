"""Softmax and log-sum-exp over the allowed keys; a row with none gives 0 and a gradient of 0, never NaN."""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Mask = Bool[Tensor, "*#bh #m n"] | None


def masked_softmax(scores: Float[Tensor, "*bh m n"], mask: Mask) -> Float[Tensor, "*bh m n"]:
    """Return softmax over the allowed keys; rows without any are 0."""
    if mask is None:
        return torch.softmax(scores, dim=-1)
    has_key = mask.any(dim=-1, keepdim=True)
    return torch.softmax(_close(scores, mask, has_key), dim=-1).masked_fill(~has_key, 0.0)


def masked_logsumexp(scores: Float[Tensor, "*bh m n"], mask: Mask) -> Float[Tensor, "*bh m"]:
    """Return ln Σ_j exp Φ_ij over the allowed keys; rows without any are 0."""
    if mask is None:
        return torch.logsumexp(scores, dim=-1)
    has_key = mask.any(dim=-1, keepdim=True)
    return torch.logsumexp(_close(scores, mask, has_key), dim=-1).masked_fill(~has_key.squeeze(-1), 0.0)


def _close(scores: Tensor, mask: Tensor, has_key: Tensor) -> Tensor:
    # rows without a key are filled with 0 rather than −inf: no NaN arises that a later fill would have to hide
    shut = torch.zeros((), dtype=scores.dtype, device=scores.device).masked_fill(has_key, -math.inf)
    return torch.where(mask, scores, shut)
