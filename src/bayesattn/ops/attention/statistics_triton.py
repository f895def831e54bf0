"""Launch of the statistics kernel: preparation of the inputs, and tile sizes."""

import torch
from torch import Tensor

from bayesattn.ops.attention.launch import aligned, grid_of, padded, whole_rows
from bayesattn.ops.attention.statistics import Rows
from bayesattn.ops.attention.statistics_kernels import statistics_kernel
from bayesattn.ops.attention.support import INTERPRETED
from bayesattn.ops.common.launch import prepared
from bayesattn.ops.common.tiles import FULL_MASK, KEY_MASK

# tile rows, tile columns, warps, pipeline stages: for half precision with up to 64 or 128 features, and for all other inputs
TILES = {64: (128, 64, 4, 3), 128: (128, 64, 8, 3)}
OTHER_TILES = (64, 32, 4, 1)


def launch_statistics(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    is_causal: bool,
    scale: float,
    softcap: float | None,
    positions: Tensor | None,
) -> Rows:
    """Return the statistics per query; arguments as in `row_statistics`, mask and bias with four axes."""
    query, key = whole_rows(query, key)
    query, key = aligned(query), aligned(key.to(query.dtype))
    (b, h, m, d), (hk, n) = query.shape, key.shape[1:3]
    is_half = query.dtype != torch.float32
    bm, bn, warps, stages = TILES[64 if d <= 64 else 128] if is_half and d <= 128 else OTHER_TILES
    entropy = query.new_empty((b, h, m), dtype=torch.float32)
    largest, keys = torch.empty_like(entropy), torch.empty_like(entropy)
    share = None if positions is None else torch.empty_like(entropy)
    has_mask = 0 if mask is None else (KEY_MASK if mask.shape[2] == 1 else FULL_MASK).value
    chosen = None if positions is None else positions.to(query.device).contiguous()
    strides = (
        *query.stride()[:3], *key.stride()[:3], *_strides(mask, (b, h, m, n)), *_strides(bias, (b, h, m, n)),
        0 if chosen is None or chosen.shape[0] == 1 else chosen.stride(0),
    )  # fmt: skip
    launch = prepared(
        statistics_kernel, grid_of(m, bm, b * h), *strides, h, h // hk, m, n, d, float(scale), float(softcap or 1.0),
        BM=bm, BN=bn, BD=padded(d), CAUSAL=is_causal, HAS_MASK=has_mask, HAS_BIAS=bias is not None,
        HAS_POSITIONS=chosen is not None, SOFTCAP=softcap is not None, EVEN_D=d == padded(d),
        FAST=is_half and not INTERPRETED, PRECISION="tf32" if is_half else "ieee", num_warps=warps, num_stages=stages,
    )  # fmt: skip
    # unused pointers must still be valid
    inputs = (entropy if x is None else x for x in (mask, bias, chosen))
    launch(query, key, *inputs, entropy, largest, entropy if share is None else share, keys)
    return Rows(entropy, largest, keys, share)


def _strides(x: Tensor | None, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a tensor expanded to a shape: 0 where it is broadcast or absent."""
    return (0,) * len(shape) if x is None else x.expand(shape).stride()
