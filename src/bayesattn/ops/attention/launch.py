"""How the kernels are launched: tile sizes, switches and strides, computed once per layout of the inputs."""

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
# the same for the tiles at the edges of a band, of which there are few; 0 is as many stages as elsewhere
EDGE_STAGES = {"forward": 1, "grad_query": 1, "grad_key": 0}
# registers per thread where the compiler takes a few more than let one more block share a multiprocessor
MOST_REGISTERS = {("forward", 64): 128}
# numbers between the beginnings of two rows: where it is no multiple of this, Triton 3.6 reads keys number by number, and in
# half precision the loop over tiles off the edges then gave wrong outputs on an H200
ROW_MULTIPLE = 16
# rows of queries or keys that are added up together; at most the rows and columns of every backward tile
SUM_BLOCK = 64
# enough for the lengths of a data set
MOST_LAUNCHES = 4096


def blocks(kernel: str, head_dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Return tile sizes, warps and pipeline stages of a kernel."""
    if dtype == torch.float32 or head_dim > 128:
        bm, bn, warps, stages = 64, 32, 4, 1
    else:
        bm, bn, warps, stages = BLOCKS[kernel, 64 if head_dim <= 64 else 128]
    return {"BM": bm, "BN": bn, "num_warps": warps, "num_stages": stages}


def one_pass(head_dim: int) -> bool:
    """Whether the backward pass adds dQ atomically: it draws the noise once, at the cost of the atomics."""
    return head_dim <= 64 and not torch.are_deterministic_algorithms_enabled()


class Layout(NamedTuple):
    """The properties of a tensor that decide how kernels read it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


def layout(x: Tensor | None) -> Any:
    """Return the layout of a tensor, None for None (typed loosely: which of the two it is, the caller knows)."""
    return None if x is None else Layout(x.shape, x.stride(), x.dtype)


class Band(NamedTuple):
    """Which keys a query may attend to by their positions.

    Args:
        is_causal: Query i has keys up to i.
        window: And of those only the last `window`; None is all.
    """

    is_causal: bool
    window: int | None

    @property
    def switches(self) -> dict[str, bool]:
        """The switches that kernels are compiled with."""
        return {"CAUSAL": self.is_causal, "WINDOW": self.window is not None}


class Noise(NamedTuple):
    """What is drawn.

    Args:
        weibull: Family.
        strength: Of the noise, in units of log 2 for the lognormal.
        dropout: On the weights of the output.
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

    Its pointers are query, key, value, those of `optional_pointers`, and the seven outputs.

    Args:
        query: Layout of the queries.
        key: Of the keys.
        value: Of the values.
        mask: Of the mask, if there is one.
        mu: Of the location of the lognormal prior, for the moments.
        noise: What is drawn.
        scale: Of the scores.
        band: Which keys a query may attend to by position.
        need_clean: Whether the clean LSE is needed.
        need_sums: Whether the sums of queries and clean LSEs over blocks of rows are, too.
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

    Args:
        query: As for `forward_launch`, like all that is not named here.
        key: As above.
        value: As above.
        mask: As above.
        mu: As above.
        grad: Layout of dO.
        rows: Distances of two rows of Σ_i q_i, behind the column sums, and of Σ_j dT_j k_j; or how many sums over blocks
            of either a head has.
        noise: As above.
        scale: As above.
        band: As above.
        need_clean: Whether there is a dLSE.
        columns: Whether there is a dT_j, and how Σ_i q_i comes (`backward_kernels.ROW_FOR_EACH`, …).
        in_one_pass: See `one_pass`.
        steps: `row_steps` of the gradients of query, key and value.
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
    """Return what a kernel is compiled for: tile sizes, padded head dimensions, switches and precision."""
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
    """Return constants with those of loops over the whole and over the edge tiles of a band, and a cap on registers."""
    widest, is_full = max(constants["BD"], constants["BDV"]), constants["HAS_MASK"] == FULL_MASK.value
    is_half = constants["PRECISION"] != "ieee" and widest <= 128
    # moments, dropout and a mask of single entries need more registers: a cap would only make them spill
    is_small = is_half and not (is_full or constants["MOMENTS"] or constants["DROPOUT"])
    registers = MOST_REGISTERS.get((kernel, 64 if widest <= 64 else 128)) if is_small else None
    # a mask of single entries makes every tile an edge
    added = {"SUM_BLOCK": SUM_BLOCK, "EDGE_STAGES": 0 if is_full else EDGE_STAGES[kernel]}
    return {**constants, **added, **({} if registers is None else {"maxnreg": registers})}


def padded(size: int) -> int:
    """Return the tile size of a head dimension: a power of two that tensor cores can take."""
    return max(16, 1 << (size - 1).bit_length())


def whole_rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors with zeros behind their features, so that these are a multiple of `ROW_MULTIPLE`."""
    if not any(x.shape[-1] % ROW_MULTIPLE for x in tensors):
        return tensors
    return tuple(F.pad(x, (0, -x.shape[-1] % ROW_MULTIPLE)) for x in tensors)


def aligned(x: Tensor) -> Tensor:
    """Return x with contiguous rows that start at sixteen bytes and `ROW_MULTIPLE`; a copy is as contiguous as x was."""
    return x if x.data_ptr() & 15 == 0 and _has_aligned_rows(x.stride()) else gradient_of(x).copy_(x)


@functools.lru_cache(maxsize=MOST_LAUNCHES)
def _has_aligned_rows(strides: tuple[int, ...]) -> bool:
    return strides[-1] == 1 and not any(stride % ROW_MULTIPLE for stride in strides[:-1])


def blocks_of(length: int, block: int) -> int:
    """Return how many blocks cover a length."""
    return -(-length // block)


def grid_of(length: int, block: int, heads: int) -> tuple[int]:
    """Return the grid of a kernel with a program for every block of every head; see `tiles.block_and_head`."""
    return (blocks_of(length, block) * heads,)


def rows_first(x: Tensor, length: int, features: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return new memory of shape (b, h, length, features) beside x, in which queries or keys come before heads.

    Models split heads off the last axis. So outputs and gradients in this order need no copy on their way back.
    """
    b, h = x.shape[:2]
    strides = (length * h * features, features, h * features, 1)
    return x.new_empty_strided((b, h, length, features), strides, dtype=dtype or x.dtype)


def queries_first(out: Tensor) -> Tensor:
    """Return an output in the order of `rows_first`; a copy only where a compiler has changed it."""
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def gradient_of(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return new memory for the gradient of x in the order of its axes: of another, autograd makes a copy for a leaf."""
    return x.new_empty(x.shape, dtype=dtype) if x.is_contiguous() else rows_first(x, x.shape[2], x.shape[3], dtype)


def row_steps(*gradients: Tensor) -> tuple[int, ...]:
    """Return the distances between rows of gradients, in rows: 1, or as many as there are heads."""
    return tuple(x.stride(2) // x.shape[3] for x in gradients)


def new_grad_query(query: Tensor, in_one_pass: bool) -> Tensor:
    """Return memory for dQ: for atomics it is float32 and head by head, so that the offsets within a head fit 32 bits."""
    b, h, m, d = query.shape
    return query.new_empty((b, h, m, d), dtype=torch.float32) if in_one_pass else gradient_of(query)


def finished(grad_query: Tensor, query: Tensor) -> Tensor:
    """Return dQ in the type of the query; where that takes a copy, also in its order."""
    if grad_query.dtype == query.dtype:
        return grad_query
    wide = saturate(grad_query, query.dtype) if query.dtype == torch.float16 else grad_query
    return gradient_of(query).copy_(wide)


def like_gradients(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return tensors with shapes, types and strides of the gradients, for compilers."""
    grad_query = new_grad_query(query, one_pass(max(query.shape[-1], value.shape[-1])))
    return finished(grad_query, query), gradient_of(key), gradient_of(value)


def row_stride(x: Tensor | None) -> int:
    """Return the stride between rows, or 0 where one row stands for all."""
    return 0 if x is None or x.ndim < 4 or x.shape[2] == 1 else x.shape[3]


def optional_pointers(mask: Tensor | None, mu: Tensor | None, seed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return pointers of mask, μ and seed; kernels offset each before they check the switches, so none may be absent."""
    return seed if mask is None else mask, seed if mu is None else mu, seed


def _optional_strides(mask: Layout | None, mu: Layout | None, shape: tuple[int, int, int, int]) -> tuple[int, ...]:
    """Return the strides of mask (b, h, m, n) and μ (b, h); 0 where they broadcast or are absent."""
    found = (0, 0, 0, 0) if mask is None else expanded_strides(mask, shape)
    return (*found, *((0, 0) if mu is None else expanded_strides(mu, shape)[:2]))


def expanded_strides(x: Layout, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a tensor that is expanded to a shape: 0 where it is broadcast."""
    return tuple(stride if size == full else 0 for size, stride, full in zip(x.shape, x.strides, shape, strict=True))
