"""Dirichlet weights, the relaxed alignment of Deng et al. (2018): reparameterized draws and the KL, both in log space.

    W ~ Dir(α):   ln G_j = ln Gamma(α_j + 1) + ln U_j / α_j,   W = softmax_j(ln G_j)

because Gamma(α) = Gamma(α + 1) U^{1/α} with U uniform. Gamma(α + 1) has torch's implicit gradient (Figurnov et al., 2018),
which is accurate for shapes above 1; the power is differentiated directly. Working with ln G keeps draws of tiny
α, where G underflows and torch.distributions.Dirichlet gives NaN.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.distributions import Gamma

from bayesattn import noise
from bayesattn.functional.parts import masked_softmax

# Deng et al. keep the scores in this range before they take the exponential
LARGEST_SCORE = 10.0


def concentration(scores: Float[Tensor, "*b n"]) -> Float[Tensor, "*b n"]:
    """Return α = exp(scores), the scores kept within ±10."""
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return torch.exp(scores.clamp(-LARGEST_SCORE, LARGEST_SCORE))


def draw(alpha: Float[Tensor, "*b m n"], mask: Bool[Tensor, "*b m n"] | None = None) -> Float[Tensor, "*b m n"]:
    """Return W ~ Dir(α) over the valid keys, with the pathwise gradient in α; 0 at the others."""
    larger = Gamma(alpha + 1.0, torch.ones_like(alpha), validate_args=False).rsample()
    # −ln U is exponential
    exponential = noise.exponential(None, (1, 1, 1, alpha.numel()), device=alpha.device, dtype=alpha.dtype)
    return masked_softmax(torch.log(larger) - exponential.view(alpha.shape) / alpha, mask)


def mean(alpha: Float[Tensor, "*b n"], mask: Bool[Tensor, "*b n"] | None = None) -> Float[Tensor, "*b n"]:
    """Return α / Σα over the valid keys; rows without any are 0."""
    alpha = alpha if mask is None else alpha.masked_fill(~mask, 0.0)
    total = alpha.sum(dim=-1, keepdim=True)
    return alpha / torch.where(total > 0.0, total, 1.0)


def kl(
    alpha_q: Float[Tensor, "*b n"], alpha_p: Float[Tensor, "*b n"], mask: Bool[Tensor, "*b n"] | None = None
) -> Float[Tensor, "*b"]:
    """Return KL(Dir(α) ‖ Dir(β)) over the valid keys.

    ln Γ(α₀) − ln Γ(β₀) + Σ_j [ln Γ(β_j) − ln Γ(α_j) + (α_j − β_j)(ψ(α_j) − ψ(α₀))],   α₀ = Σα
    """
    if mask is not None:
        # a closed key gets the same concentration in both: its terms cancel, up to the factor of the sums
        alpha_q, alpha_p = alpha_q.masked_fill(~mask, 1.0), alpha_p.masked_fill(~mask, 1.0)
    valid = torch.ones_like(alpha_q) if mask is None else mask.to(alpha_q.dtype)
    # a row without keys: any positive total, its terms are 0
    total_q, total_p = ((alpha * valid).sum(dim=-1) for alpha in (alpha_q, alpha_p))
    has_key = total_q > 0.0
    total_q, total_p = torch.where(has_key, total_q, 1.0), torch.where(has_key, total_p, 1.0)
    slope = torch.digamma(alpha_q) - torch.digamma(total_q).unsqueeze(-1)
    entries = torch.lgamma(alpha_p) - torch.lgamma(alpha_q) + (alpha_q - alpha_p) * slope
    return torch.lgamma(total_q) - torch.lgamma(total_p) + (entries * valid).sum(dim=-1)
