"""The noise of an edge: a function of (seed, head, number of the edge) alone.

The draw of edge e and head h is the entry (b = 0, h = 0, i = e, j) of `bayesattn.noise` with

    j = 32 (h div 8) + 8 ((h mod 8) div 2) + h mod 2

So one Philox call with counter (4 (h div 8), e, 0, 0) serves eight heads of an edge: its four words in order, the low half
of each before the high one. Edges keep their original numbers, so sorting and tiling them does not change the draws.
"""

import torch
from jaxtyping import Float, Int, Int16
from torch import Tensor

from bayesattn import noise
from bayesattn.config import AttentionConfig

HEADS_PER_CALL = 8


def edge_halves(seed: noise.Seed, numbers: Int[Tensor, " e"], heads: int) -> Int16[Tensor, "e h8"]:
    """Return the 16-bit integers of each edge and head, shifted by −2^15; heads are padded to a multiple of eight."""
    device = numbers.device
    key = noise.as_seed(seed, 1, device).reshape(1, 1)
    calls = 4 * torch.arange(-(-heads // HEADS_PER_CALL), device=device)
    zero = torch.zeros((1, 1), dtype=torch.int64, device=device)
    words = noise.philox((calls[None, :], numbers[:, None], zero, zero), (key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF))
    halves = torch.stack([half for word in words for half in (word & 0xFFFF, word >> 16)], dim=-1)
    return (halves.flatten(1) - 0x8000).to(torch.int16)


def edge_log_noise(
    seed: noise.Seed | None, numbers: Int[Tensor, " e"], heads: int, config: AttentionConfig, dtype: torch.dtype
) -> Float[Tensor, "e h"]:
    """Return ln E / k or σ_q ε for each edge and head; without a seed, torch's generator draws them."""
    if seed is None:
        shape = (1, 1, numbers.shape[0], heads)
        return noise.log_noise(None, shape, config, device=numbers.device, dtype=dtype).view(shape[2:])
    halves = edge_halves(seed, numbers, heads)
    if config.family == "weibull":
        return noise.to_exponential(halves[:, :heads], dtype).log_().div_(config.weibull_k)
    return noise.to_normal(halves, dtype)[:, :heads].mul(config.sigma_q)
