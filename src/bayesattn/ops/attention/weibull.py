"""Weibull attention with its KL by few kernels: two forward, two or three backward.

What makes a training step at short lengths is the host: every torch operation, autograd node and launch costs it some ten
microseconds. So the most common case, Weibull noise and a KL in which all queries share their keys (no mask, or key
padding), has kernels of its own and one autograd node (`weibull_node.py`). All other calls take `triton.py` and the plain
KL of `kl.py`.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesattn.config import AttentionConfig
from bayesattn.distributions import EULER_GAMMA, log_gamma_1p_inverse
from bayesattn.divergences import log_alpha_shift
from bayesattn.ops.attention import kl_kernels
from bayesattn.ops.attention.kl import LOG_ROW_CAP
from bayesattn.ops.attention.launch import (
    MOST_LAUNCHES,
    Layout,
    Noise,
    blocks_of,
    forward_launch,
    gradient_launches,
    layout,
    one_pass,
    optional_pointers,
    padded,
)
from bayesattn.ops.common.launch import Launch, prepared
from bayesattn.precision import saturate

DIVIDE = {"sum": 0, "row_mean": 1, "mean": 2}
# entries of a tile of keys or queries; many bytes in flight make up for one program a head
TILE = 16384
# up to this length half a tile is enough
SHORT = 512
PREPARE_ROWS = 64


class Divergence(NamedTuple):
    """What the KL takes from the config."""

    weibull_k: float
    gamma_beta: float
    gamma_alpha: float
    alpha_form: str
    score_form: str
    reduction: str

    @classmethod
    def of(cls, config: AttentionConfig) -> "Divergence":
        """Return what the KL takes from a config."""
        forms = (str(config.alpha_form), str(config.score_form), str(config.kl_reduction))
        return cls(config.weibull_k, config.gamma_beta, config.gamma_alpha, *forms)

    def numbers(self, has_prior: bool) -> dict[str, float]:
        """What the kernels of the KL take: α's shift, slope and constant of a key's term, β, its logarithm, the cap."""
        log_beta = math.log(self.gamma_beta)
        scale = {"gamma_alpha": self.gamma_alpha, "gamma_beta": self.gamma_beta}
        return {
            "log_alpha_shift": log_alpha_shift(has_prior, self.alpha_form, **scale),
            "slope": EULER_GAMMA / self.weibull_k + log_gamma_1p_inverse(self.weibull_k) - log_beta,
            "constant": math.log(self.weibull_k) - EULER_GAMMA - 1.0,
            "beta": self.gamma_beta,
            "log_beta": log_beta,
            "log_cap": LOG_ROW_CAP,
            "cap": math.exp(LOG_ROW_CAP),
        }


class Problem(NamedTuple):
    """All that decides about the launches of a call: they are put together once and found again by it."""

    query: Layout
    key: Layout
    value: Layout
    prior: Layout | None
    has_valid: bool
    divergence: Divergence
    noise: Noise
    scale: float

    @property
    def mask(self) -> Layout | None:
        """Layout of the mask of keys, as the kernels of attention read it."""
        b, n = self.query.shape[0], self.key.shape[2]
        return Layout((b, 1, 1, n), (n, n, n, 1), torch.bool) if self.has_valid else None

    @property
    def strides(self) -> tuple[int, ...]:
        """Of ln Ψ over examples and heads, of the mask over examples."""
        return (*((0, 0) if self.prior is None else self.prior.strides[:2]), self.key.shape[2] if self.has_valid else 0)

    @property
    def numbers(self) -> dict[str, float]:
        """What the kernels of the KL take as numbers."""
        return self.divergence.numbers(self.prior is not None)

    @property
    def switches(self) -> dict[str, bool]:
        """Of both kernels of the KL."""
        is_raw = self.divergence.score_form == "raw"
        return {"HAS_PRIOR": self.prior is not None, "HAS_VALID": self.has_valid, "RAW": is_raw}


class Workspace(NamedTuple):
    """Arrays of float32 in one piece of memory: to allocate one each would take the host longer than to fill them.

    Args:
        sizes: Entries of every array, rounded up so that the next one starts at a multiple of sixteen bytes.
        total: Entries of all of them.
    """

    sizes: list[int]
    total: int

    @classmethod
    def of(cls, *sizes: int) -> "Workspace":
        """Return the workspace of arrays with so many entries."""
        rounded = [-(-size // 4) * 4 for size in sizes]
        return cls(rounded, sum(rounded))

    def parts(self, memory: Tensor) -> tuple[Tensor, ...]:
        """Return the arrays, flat."""
        return torch.split_with_sizes(memory, self.sizes)


def kept_arrays(rows: int, m: int, n: int, d: int) -> Workspace:
    """Return what the forward pass keeps: both LSEs, column sums, sums of queries and of keys, the KL's statistics."""
    return Workspace.of(rows * m, rows * m, rows * n, rows * d, rows * d, rows * kl_kernels.NUM_STATS.value)


@functools.lru_cache(maxsize=MOST_LAUNCHES)
def _arrays(problem: Problem) -> tuple[Workspace, Workspace]:
    """Return the arrays that are kept, and those of the backward pass: δ, dLSE, dT, and what all rows of dQ start from."""
    (b, h, m, d), n = problem.query.shape, problem.key.shape[2]
    rows = b * h
    return kept_arrays(rows, m, n, d), Workspace.of(rows * m, rows * m, rows * n, rows * d)


@functools.lru_cache(maxsize=MOST_LAUNCHES)
def _forward_launches(problem: Problem) -> tuple[Launch, Launch]:
    """Return the launches of attention and of its KL."""
    query, key, value, given, scale = problem.query, problem.key, problem.value, problem.divergence, problem.scale
    (b, h, m, d), (hk, n) = query.shape, key.shape[1:3]
    bd = padded(d)
    # a short head has no loop worth filling: less memory a program, more of them at once
    is_short, most = max(m, n) <= SHORT, max(16, TILE // bd)
    attend = forward_launch(query, key, value, problem.mask, None, problem.noise, scale, False, True)
    divergence = prepared(
        kl_kernels.weibull_kl_kernel, (b * h,), *query.strides[:3], *key.strides[:3], *problem.strides, h, h // hk, m, n, d,
        scale, *problem.numbers.values(), **problem.switches,
        PER=DIVIDE[given.reduction], BLOCK=min(most // 2, padded(max(m, n))) if is_short else most, BD=bd,
        # what is in flight fits into the shared memory of smaller GPUs, too
        STAGES=1 if is_short else 3 if query.dtype.itemsize == 2 else 2, num_warps=4 if is_short else 8,
    )  # fmt: skip
    return attend, divergence


@functools.lru_cache(maxsize=MOST_LAUNCHES)
def _backward_launches(
    problem: Problem, grad: Layout, stride_kl: int, in_one_pass: bool
) -> tuple[Launch, Launch, Launch | None]:
    """Return the launches of what all gradients need, of those of key and value, and of the query's."""
    (b, h, m, d), n, dv = problem.query.shape, problem.key.shape[2], problem.value.shape[-1]
    shared = (problem.numbers[name] for name in ("log_alpha_shift", "slope", "log_beta", "log_cap"))
    prepare = prepared(
        kl_kernels.weibull_prepare_kernel, (blocks_of(max(m, n), PREPARE_ROWS), b * h), *grad.strides[:3], stride_kl,
        *problem.strides, h, m, n, d, dv, problem.scale, *shared, **problem.switches, ONE_PASS=in_one_pass,
        BLOCK=PREPARE_ROWS, BD=padded(d), BDV=padded(dv),
    )  # fmt: skip
    gradients = gradient_launches(
        problem.query, problem.key, problem.value, problem.mask, None, grad, (0, 0), problem.noise, problem.scale, False,
        True, True, in_one_pass,
    )  # fmt: skip
    return prepare, *gradients


def run_forward(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor, prior: Tensor | None, valid: Tensor | None, seed: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, KL, and the memory of `kept_arrays`."""
    b, h, m, _ = query.shape
    attend, divergence = _forward_launches(problem)
    arrays, _ = _arrays(problem)
    out = query.new_empty((b, h, m, value.shape[-1]))
    kept, kl = query.new_empty(arrays.total, dtype=torch.float32), query.new_empty((b, h), dtype=torch.float32)
    lse, clean, columns, query_sums, key_sums, stats = arrays.parts(kept)
    # a pointer that no switch reads still has to be one
    attend(query, key, value, *optional_pointers(valid, None, seed), out, lse, clean, lse, lse)
    divergence(
        query, key, clean, clean if prior is None else prior, clean if valid is None else valid, kl, stats, columns,
        query_sums, key_sums,
    )  # fmt: skip
    return out, kl.sum(dim=1), kept


def run_backward(
    problem: Problem, grad: Tensor, grad_kl: Tensor, inputs: Sequence[Any], out: Tensor, kept: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of query, key, value and ln Ψ, from those of `run_forward`'s output and KL."""
    query, key, value, prior, valid, seed = inputs
    arrays, own = _arrays(problem)
    lse, clean, columns, query_sums, key_sums, stats = arrays.parts(kept)
    delta, grad_lse, grad_columns, start = own.parts(kept.new_empty(own.total))
    b, h, m, d = query.shape
    in_one_pass = one_pass(max(d, value.shape[-1]))
    prepare, gradients, last = _backward_launches(problem, layout(grad), grad_kl.stride(0), in_one_pass)
    grad_query = query.new_empty((b, h, m, d), dtype=torch.float32 if in_one_pass else None)
    grad_key, grad_value = key.new_empty(key.shape), value.new_empty(value.shape)
    grad_prior = None if prior is None else kept.new_empty((b, h, 1, key.shape[2]))
    prepare(
        out, grad, grad_kl, columns, clean, clean if prior is None else prior, clean if valid is None else valid, stats,
        key_sums, delta, start, grad_query, grad_columns, grad_lse, columns if grad_prior is None else grad_prior,
    )  # fmt: skip
    read = (query, key, value, *optional_pointers(valid, None, seed), grad, lse, clean, delta, grad_lse, None, None)
    gradients(*read, grad_columns, query_sums, grad_query, grad_key, grad_value, None)
    if last is not None:
        last(*read, start, grad_query)
    return saturate(grad_query, query.dtype), grad_key, grad_value, grad_prior
