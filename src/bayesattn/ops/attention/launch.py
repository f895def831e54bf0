"""How the kernels are launched: tile sizes, switches and strides."""

import functools

import torch
from torch import Tensor

from bayesattn.noise import dropout_numbers
from bayesattn.ops.attention import backward_kernels, forward_kernels
from bayesattn.ops.attention.support import INTERPRETED
from bayesattn.ops.attention.tiles import FULL_MASK, KEY_MASK
from bayesattn.ops.launch import launch

# tile rows, tile columns, warps, pipeline stages; measured on an H200 in bfloat16 (benchmarks/)
BLOCKS = {
    ("forward", 64): (64, 64, 4, 3),
    ("forward", 128): (128, 32, 4, 4),
    ("grad_query", 64): (64, 32, 4, 3),
    ("grad_query", 128): (64, 64, 4, 2),
    ("grad_key", 64): (64, 64, 4, 4),
    ("grad_key", 128): (64, 64, 4, 2),
}


# the switches of Weibull attention with a KL and nothing else
PLAIN_FORWARD = (("WEIBULL", True), ("CLEAN", True), ("MOMENTS", False), ("CAUSAL", False), ("DROPOUT", False))


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


def launch_forward(
    inputs: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    mu: Tensor | None,
    seed: Tensor,
    outputs: tuple[Tensor, ...],
    weibull: bool,
    strength: float,
    scale: float,
    dropout: float,
    causal: bool,
) -> None:
    """Fill output, noisy LSE, clean LSE and two moments; of the last three those with a size.

    Args:
        inputs: Query, key, value.
        mask: Which entries exist, or None.
        mu: Location of the lognormal prior, for the moments.
        seed: Of the noise; one, or one per example.
        outputs: Where they go.
        weibull: Family.
        strength: Of the noise, in units of log 2 for the lognormal.
        scale: Of the scores.
        dropout: On the weights of the output.
        causal: Whether key j is for queries from j on.
    """
    query, key, value = inputs
    (b, h, m, d), (hk, n), dv = query.shape, key.shape[1:3], value.shape[-1]
    switches = {
        "WEIBULL": weibull,
        "CLEAN": outputs[2].numel() > 0,
        "MOMENTS": mu is not None,
        "CAUSAL": causal,
        "DROPOUT": dropout > 0.0,
    }
    constants = kernel_constants("forward", query, value, mask, **switches)
    launch(
        forward_kernels.forward_kernel, (blocks_of(m, constants["BM"]), b * h),
        query, key, value, *optional_pointers(mask, mu, seed), *outputs,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *optional_strides(mask, mu, (b, h, m, n)),
        h, h // hk, m, n, d, dv, seed.ndim, scale, strength, *dropout_numbers(dropout), **constants,
        EVEN_N=n % constants["BN"] == 0,
    )  # fmt: skip


def launch_gradients(
    inputs: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    mu: Tensor | None,
    seed: Tensor,
    rows: tuple[Tensor | None, ...],
    grad_columns: Tensor | None,
    sums: Tensor,
    start: Tensor | None,
    gradients: tuple[Tensor, Tensor, Tensor, Tensor | None],
    weibull: bool,
    strength: float,
    scale: float,
    dropout: float,
    causal: bool,
    in_one_pass: bool,
) -> None:
    """Fill the gradients of query, key, value and μ; in one pass, that of the query already holds its start.

    Args:
        inputs: Query, key, value.
        mask: As in the forward pass, like `mu` and `seed`.
        mu: As above.
        seed: As above.
        rows: dO, noisy LSE, clean LSE, δ, dLSE, dr₁, dr₂; the last three None where there is none.
        grad_columns: dT_j, or None.
        sums: Σ_i q_i behind the column sums.
        start: Σ_j dT_j k_j, for the two-pass backward.
        gradients: Where they go.
        weibull: Family.
        strength: Of the noise.
        scale: Of the scores.
        dropout: On the weights of the output.
        causal: Whether key j is for queries from j on.
        in_one_pass: See `one_pass`.
    """
    query, key, value = inputs
    (b, h, m, d), (hk, n), dv = query.shape, key.shape[1:3], value.shape[-1]
    grad, grad_lse = rows[0], rows[4]
    assert grad is not None
    tensors = (query, key, value, *optional_pointers(mask, mu, seed), *rows)
    strides = (
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *grad.stride()[:3],
        *optional_strides(mask, mu, (b, h, m, n)),
    )  # fmt: skip
    numbers = (h, h // hk, m, n, d, dv, seed.ndim, scale, strength, *dropout_numbers(dropout))
    switches = {
        "WEIBULL": weibull,
        "CLEAN": grad_lse is not None,
        "COLUMNS": grad_columns is not None,
        "MOMENTS": mu is not None,
        "CAUSAL": causal,
        "DROPOUT": dropout > 0.0,
    }

    def checks(constants: dict) -> bool:
        return causal or mask is not None or n % constants["BN"] != 0 or m % constants["BM"] != 0

    grad_query, *grad_others = gradients
    constants = kernel_constants("grad_key", query, value, mask, **switches)
    launch(
        backward_kernels.grad_key_kernel, (blocks_of(n, constants["BN"]), b * hk), *tensors, grad_columns, sums,
        grad_query, *grad_others, *strides, row_stride(sums), *numbers,
        **constants, CHECK=checks(constants), ONE_PASS=in_one_pass,
    )  # fmt: skip
    if not in_one_pass:
        constants = kernel_constants("grad_query", query, value, mask, **switches)
        grid = (blocks_of(m, constants["BM"]), b * h)
        launch(
            backward_kernels.grad_query_kernel, grid, *tensors, start, grad_query, *strides, row_stride(start), *numbers,
            **constants, CHECK=checks(constants),
        )  # fmt: skip


def kernel_constants(kernel: str, query: Tensor, value: Tensor, mask: Tensor | None, **switches: bool) -> dict:
    """Return what a kernel is compiled for: tile sizes, padded head dimensions, switches and precision."""
    sizes = (query.shape[-1], value.shape[-1])
    has_mask = 0 if mask is None else (KEY_MASK if mask.shape[2] == 1 else FULL_MASK).value
    return _kernel_constants(kernel, sizes, query.dtype, has_mask, tuple(switches.items()))


@functools.lru_cache(maxsize=1024)
def _kernel_constants(
    kernel: str, sizes: tuple[int, int], dtype: torch.dtype, has_mask: int, switches: tuple[tuple[str, bool], ...]
) -> dict:
    bd, bdv = map(padded, sizes)
    is_float = dtype == torch.float32
    # with the clean sum the compiler takes 136 registers, and three blocks share a multiprocessor; 128 do, and four fit
    is_tight = (kernel, max(sizes) <= 64, has_mask, is_float) == ("forward", True, 0, False) and switches == PLAIN_FORWARD
    return {
        **blocks(kernel, max(sizes), dtype),
        **dict(switches),
        "BD": bd,
        "BDV": bdv,
        "HAS_MASK": has_mask,
        "EVEN_D": sizes == (bd, bdv),
        "FAST": not is_float and not INTERPRETED,
        "PRECISION": "ieee" if is_float else "tf32",
        **({"maxnreg": 128} if is_tight else {}),
    }


def padded(size: int) -> int:
    """Return the tile size of a head dimension: a power of two that tensor cores can take."""
    return max(16, 1 << (size - 1).bit_length())


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
