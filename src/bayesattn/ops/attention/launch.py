"""Launches of the kernels: tile sizes, switches and strides, computed once per layout of the inputs."""

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesattn.noise.specification import dropout_numbers
from bayesattn.ops.attention import backward_kernels, forward_kernels
from bayesattn.ops.attention.support import INTERPRETED
from bayesattn.ops.common.launch import Launch, prepared
from bayesattn.ops.common.tiles import FULL_MASK, KEY_MASK
from bayesattn.precision import saturate

# tile rows, tile columns, warps, pipeline stages; measured on an H200 in bfloat16 (benchmarks/)
BLOCKS = {
    ("forward", 64): (64, 64, 4, 3),
    ("forward", 128): (64, 64, 4, 3),
    ("grad_query", 64): (64, 32, 4, 3),
    ("grad_query", 128): (64, 64, 4, 2),
    ("grad_key", 64): (64, 64, 4, 3),
    ("grad_key", 128): (64, 64, 4, 2),
    ("score_columns", 64): (64, 128, 8, 3),
    ("score_columns", 128): (64, 128, 4, 3),
}
# pipeline stages of the loop over edge tiles, of which there are few; 0 is as many as elsewhere
EDGE_STAGES = {"forward": 1, "grad_query": 1, "grad_key": 0}
# cap on registers per thread, where a few fewer let one more block share a multiprocessor
MOST_REGISTERS = {("forward", 64): 128}
# row strides are multiples of this: otherwise Triton 3.6 reads keys number by number, and in half precision the loop over
# tiles away from the edges then gave wrong outputs on an H200
ROW_MULTIPLE = 16
# rows of queries or keys per block sum: it divides the rows of forward tiles, and backward tiles lie within one block
SUM_BLOCK = 64
# cached launches: enough for the lengths of a data set
MOST_LAUNCHES = 4096


def blocks(kernel: str, head_dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Return tile sizes, warps and pipeline stages of a kernel."""
    if dtype == torch.float32 or head_dim > 128:
        bm, bn, warps, stages = 64, 32, 4, 1
    else:
        bm, bn, warps, stages = BLOCKS[kernel, 64 if head_dim <= 64 else 128]
    return {"BM": bm, "BN": bn, "num_warps": warps, "num_stages": stages}


def one_pass(head_dim: int) -> bool:
    """Return whether the backward pass adds dQ atomically, which saves drawing the noise twice."""
    return head_dim <= 64 and not torch.are_deterministic_algorithms_enabled()


class Layout(NamedTuple):
    """The properties of a tensor that determine how kernels read it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


def layout(x: Tensor | None) -> Any:
    """Return the layout of a tensor, or None for None (typed as Any, so that callers need no check)."""
    return None if x is None else Layout(x.shape, x.stride(), x.dtype)


class Band(NamedTuple):
    """Which keys a query may attend to by position.

    Attributes:
        is_causal: Whether query i has only keys up to i.
        window: If given, only the last `window` of these keys.
    """

    is_causal: bool
    window: int | None

    @property
    def switches(self) -> dict[str, bool]:
        """Compile-time switches of the kernels."""
        return {"CAUSAL": self.is_causal, "WINDOW": self.window is not None}


class Noise(NamedTuple):
    """What is drawn.

    Attributes:
        weibull: Whether the family is Weibull; otherwise lognormal.
        strength: 1 / k, or σ_q in units of log 2.
        dropout: Dropout probability of the weights of the output.
        per_example: Whether every example has its own seed.
    """

    weibull: bool
    strength: float
    dropout: float
    per_example: bool


@functools.lru_cache(maxsize=MOST_LAUNCHES)
def forward_launch(
    query: Layout,
    key: Layout,
    value: Layout,
    mask: Layout | None,
    mu: Layout | None,
    noise: Noise,
    scale: float,
    band: Band,
    need_clean: bool,
    need_sums: bool = False,
) -> Launch:
    """Return the launch that fills output, noisy LSE and, if needed, clean LSE, two moments and two kinds of sums.

    Its pointers are query, key, value, `optional_pointers` and these seven outputs. The moments need `mu`, the
    location of the lognormal prior; the sums are block sums of queries and of clean LSEs.
    """
    (b, h, m, d), (hk, n), dv = query.shape, key.shape[1:3], value.shape[-1]
    switches = {
        "WEIBULL": noise.weibull,
        "CLEAN": need_clean,
        "MOMENTS": mu is not None,
        "SUMS": need_sums,
        **band.switches,
        "DROPOUT": noise.dropout > 0.0,
    }
    constants = _in_bands("forward", kernel_constants("forward", query, value, mask, **switches))
    strides = (*query.strides[:3], *key.strides[:3], *value.strides[:3], *_optional_strides(mask, mu, (b, h, m, n)))
    return prepared(
        forward_kernels.forward_kernel, grid_of(m, constants["BM"], b * h), *strides, h, h // hk, m, n, d, dv,
        band.window or 0, int(noise.per_example), scale, noise.strength, *dropout_numbers(noise.dropout), **constants,
        EVEN_N=n % constants["BN"] == 0,
    )  # fmt: skip


@functools.lru_cache(maxsize=MOST_LAUNCHES)
def gradient_launches(
    query: Layout,
    key: Layout,
    value: Layout,
    mask: Layout | None,
    mu: Layout | None,
    grad: Layout,
    rows: tuple[int, int],
    noise: Noise,
    scale: float,
    band: Band,
    need_clean: bool,
    columns: int,
    in_one_pass: bool,
    steps: tuple[int, ...],
) -> tuple[Launch, Launch | None]:
    """Return the launches that fill the gradients of key, value and μ, and of the query; in one pass, the first does both.

    `grad` is the layout of dO, `need_clean` is whether there is a dLSE, and `steps` are the `row_steps` of the gradients of
    query, key and value. `columns` is 0 without dT_j, else how Σ_i q_i is stored (`backward_kernels.ROW_FOR_EACH`, …).
    For Σ_i q_i and Σ_j dT_j k_j, `rows` has the stride between rows (0 for one shared row) or the number of block sums per
    head. The other arguments are those of `forward_launch`.
    """
    (b, h, m, d), (hk, n), dv = query.shape, key.shape[1:3], value.shape[-1]
    switches = {
        "WEIBULL": noise.weibull,
        "CLEAN": need_clean,
        "COLUMNS": columns,
        "MOMENTS": mu is not None,
        **band.switches,
        "DROPOUT": noise.dropout > 0.0,
    }
    strides = (
        *query.strides[:3], *key.strides[:3], *value.strides[:3], *grad.strides[:3],
        *_optional_strides(mask, mu, (b, h, m, n)),
    )  # fmt: skip
    drawn = (int(noise.per_example), scale, noise.strength, *dropout_numbers(noise.dropout))
    shared = (h, h // hk, m, n, d, dv, band.window or 0, *drawn)

    def of(kernel: Any, name: str, numbers: tuple[int, ...], **more: int) -> Launch:
        constants = _in_bands(name, kernel_constants(name, query, value, mask, **switches))
        is_checked = band.is_causal or mask is not None or n % constants["BN"] != 0 or m % constants["BM"] != 0
        length, block, heads = (n, constants["BN"], hk) if name == "grad_key" else (m, constants["BM"], h)
        grid = grid_of(length, block, b * heads)
        return prepared(kernel, grid, *strides, *numbers, *shared, **constants, CHECK=is_checked, **more)

    grad_key = of(backward_kernels.grad_key_kernel, "grad_key", (rows[0], *steps[1:]), ONE_PASS=in_one_pass)
    return grad_key, None if in_one_pass else of(backward_kernels.grad_query_kernel, "grad_query", (rows[1], steps[0]))


def kernel_constants(kernel: str, query: Layout, value: Layout, mask: Layout | None, **switches: int) -> dict:
    """Return the compile-time constants of a kernel: tile sizes, padded head dimensions, switches and precision."""
    sizes = (query.shape[-1], value.shape[-1])
    bd, bdv = map(padded, sizes)
    has_mask = 0 if mask is None else (KEY_MASK if mask.shape[2] == 1 else FULL_MASK).value
    is_float = query.dtype == torch.float32
    return {
        **blocks(kernel, max(sizes), query.dtype),
        **switches,
        "BD": bd,
        "BDV": bdv,
        "HAS_MASK": has_mask,
        "EVEN_D": sizes == (bd, bdv),
        "FAST": not is_float and not INTERPRETED,
        "PRECISION": "ieee" if is_float else "tf32",
    }


def _in_bands(kernel: str, constants: dict) -> dict:
    """Add `SUM_BLOCK`, `EDGE_STAGES` and, where it helps, a cap on registers to the constants."""
    widest, is_full = max(constants["BD"], constants["BDV"]), constants["HAS_MASK"] == FULL_MASK.value
    is_half = constants["PRECISION"] != "ieee" and widest <= 128
    # moments, dropout and a mask of single entries need more registers: a cap would only make them spill
    is_small = is_half and not (is_full or constants["MOMENTS"] or constants["DROPOUT"])
    registers = MOST_REGISTERS.get((kernel, 64 if widest <= 64 else 128)) if is_small else None
    # a mask of single entries makes every tile an edge
    added = {"SUM_BLOCK": SUM_BLOCK, "EDGE_STAGES": 0 if is_full else EDGE_STAGES[kernel]}
    return {**constants, **added, **({} if registers is None else {"maxnreg": registers})}


def padded(size: int) -> int:
    """Return the tile size of a head dimension: a power of two, at least 16 for the tensor cores."""
    return max(16, 1 << (size - 1).bit_length())


def whole_rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Pad the features of all tensors with zeros to a multiple of `ROW_MULTIPLE`."""
    if not any(x.shape[-1] % ROW_MULTIPLE for x in tensors):
        return tensors
    return tuple(F.pad(x, (0, -x.shape[-1] % ROW_MULTIPLE)) for x in tensors)


def aligned(x: Tensor) -> Tensor:
    """Return x, or a copy whose rows are contiguous and start at multiples of sixteen bytes and of `ROW_MULTIPLE`."""
    return x if x.data_ptr() & 15 == 0 and _has_aligned_rows(x.stride()) else gradient_of(x).copy_(x)


@functools.lru_cache(maxsize=MOST_LAUNCHES)
def _has_aligned_rows(strides: tuple[int, ...]) -> bool:
    return strides[-1] == 1 and not any(stride % ROW_MULTIPLE for stride in strides[:-1])


def blocks_of(length: int, block: int) -> int:
    """Return the number of blocks that cover a length."""
    return -(-length // block)


def grid_of(length: int, block: int, heads: int) -> tuple[int]:
    """Return the grid with one program per block and head; see `tiles.block_and_head`."""
    return (blocks_of(length, block) * heads,)


def rows_first(x: Tensor, length: int, features: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return new memory of shape (b, h, length, features), stored with queries or keys before heads.

    Models split heads off the last axis, so outputs and gradients in this order are merged back without a copy.
    """
    b, h = x.shape[:2]
    strides = (length * h * features, features, h * features, 1)
    return x.new_empty_strided((b, h, length, features), strides, dtype=dtype or x.dtype)


def queries_first(out: Tensor) -> Tensor:
    """Return an output in the order of `rows_first`, copied only if a compiler has changed the order."""
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def gradient_of(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return new memory, contiguous if x is, else `rows_first`: autograd copies a leaf's gradient that has another order."""
    return x.new_empty(x.shape, dtype=dtype) if x.is_contiguous() else rows_first(x, x.shape[2], x.shape[3], dtype)


def row_steps(*gradients: Tensor) -> tuple[int, ...]:
    """Return the row strides of gradients, counted in rows: 1, or the number of heads."""
    return tuple(x.stride(2) // x.shape[3] for x in gradients)


def new_grad_query(query: Tensor, in_one_pass: bool) -> Tensor:
    """Return memory for dQ; for atomics it is float32 and heads first, so that offsets within a head fit 32 bits."""
    b, h, m, d = query.shape
    return query.new_empty((b, h, m, d), dtype=torch.float32) if in_one_pass else gradient_of(query)


def finished(grad_query: Tensor, query: Tensor) -> Tensor:
    """Return dQ in the dtype of the query; a cast also restores the query's memory order."""
    if grad_query.dtype == query.dtype:
        return grad_query
    wide = saturate(grad_query, query.dtype) if query.dtype == torch.float16 else grad_query
    return gradient_of(query).copy_(wide)


def like_gradients(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return tensors with the shapes, dtypes and strides of the gradients, for torch.compile."""
    grad_query = new_grad_query(query, one_pass(max(query.shape[-1], value.shape[-1])))
    return finished(grad_query, query), gradient_of(key), gradient_of(value)


def row_stride(x: Tensor | None) -> int:
    """Return the stride between rows, or 0 if one row serves all or x is absent."""
    return 0 if x is None or x.ndim < 4 or x.shape[2] == 1 else x.shape[3]


def optional_pointers(mask: Tensor | None, mu: Tensor | None, seed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return mask, μ and seed, the seed in place of absent ones: kernels offset pointers before they check switches."""
    return seed if mask is None else mask, seed if mu is None else mu, seed


def _optional_strides(mask: Layout | None, mu: Layout | None, shape: tuple[int, int, int, int]) -> tuple[int, ...]:
    """Return the strides of mask (b, h, m, n) and μ (b, h); 0 where they are broadcast or absent."""
    found = (0, 0, 0, 0) if mask is None else expanded_strides(mask, shape)
    return (*found, *((0, 0) if mu is None else expanded_strides(mu, shape)[:2]))


def expanded_strides(x: Layout, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a tensor expanded to a shape: 0 where it is broadcast."""
    return tuple(stride if size == full else 0 for size, stride, full in zip(x.shape, x.strides, shape, strict=True))
