"""How the kernels are launched: tile sizes, switches, strides, and a count of what ran."""

from collections import Counter
from typing import Any

import torch
import triton
from torch import Tensor

from bayesattn.ops.attention.support import INTERPRETED

# how often each kernel was launched, so that a test can prove which one ran
LAUNCHES: Counter[str] = Counter()


# tile rows, tile columns, warps, pipeline stages; measured on an H200 in bfloat16 (benchmarks/)
BLOCKS = {
    ("forward", 64): (64, 64, 4, 3),
    ("forward", 128): (128, 32, 4, 3),
    ("grad_query", 64): (64, 32, 4, 3),
    ("grad_query", 128): (64, 64, 4, 2),
    ("grad_key", 64): (64, 64, 4, 4),
    ("grad_key", 128): (64, 64, 4, 2),
}


def blocks(kernel: str, head_dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Return tile sizes, warps and pipeline stages of a kernel."""
    if dtype == torch.float32 or head_dim > 128:
        bm, bn, warps, stages = 64, 32, 4, 1
    else:
        bm, bn, warps, stages = BLOCKS[kernel, 64 if head_dim <= 64 else 128]
    return {"BM": bm, "BN": bn, "num_warps": warps, "num_stages": stages}


def one_pass(head_dim: int) -> bool:
    """Whether the backward pass adds dQ atomically: it draws the noise once, but pays for the atomics."""
    return head_dim <= 64 and not torch.are_deterministic_algorithms_enabled()


def launch(kernel: Any, grid: tuple[int, ...], *args: object, **constants: object) -> None:
    """Launch a kernel and count it under its name without `_kernel`."""
    LAUNCHES[kernel.fn.__name__.removesuffix("_kernel")] += 1
    kernel[grid](*args, **constants)


def kernel_constants(kernel: str, query: Tensor, value: Tensor, mask: Tensor | None, **switches: bool) -> dict:
    """Return what a kernel is compiled for: tile sizes, padded head dimensions, switches and precision."""
    d, dv = query.shape[-1], value.shape[-1]
    bd, bdv = max(16, triton.next_power_of_2(d)), max(16, triton.next_power_of_2(dv))
    is_float = query.dtype == torch.float32
    return {
        **blocks(kernel, max(d, dv), query.dtype),
        **switches,
        "BD": bd,
        "BDV": bdv,
        "HAS_MASK": mask is not None,
        "EVEN_D": d == bd and dv == bdv,
        "FAST": not is_float and not INTERPRETED,
        "PRECISION": "ieee" if is_float else "tf32",
    }


def aligned(x: Tensor) -> Tensor:
    """Return x with contiguous rows that start at multiples of sixteen bytes."""
    pitches = (stride * x.element_size() % 16 for stride in x.stride()[:-1])
    return x if x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and not any(pitches) else x.contiguous()


def blocks_of(length: int, block: int) -> int:
    """Return how many blocks cover a length."""
    return -(-length // block)


def row_stride(x: Tensor | None) -> int:
    """Return the distance of two rows, or 0 where one row stands for all."""
    return 0 if x is None or x.ndim < 4 or x.shape[2] == 1 else x.shape[3]


def optional_pointers(mask: Tensor | None, mu: Tensor | None, seed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return pointers of mask, μ and seed; kernels offset each before looking at switches, so none may be absent."""
    return seed if mask is None else mask, seed if mu is None else mu, seed


def optional_strides(mask: Tensor | None, mu: Tensor | None, shape: tuple[int, int, int, int]) -> tuple[int, ...]:
    """Return the strides of mask (b, h, m, n) and μ (b, h); 0 where they broadcast or are absent."""
    b, h, _, n = shape
    mask_strides = (0, 0, 0, 0) if mask is None else mask.expand(shape).stride()
    return (*mask_strides, *((0, 0) if mu is None else mu.expand(b, h, 1, n).stride()[:2]))
