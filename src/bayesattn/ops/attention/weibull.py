"""Weibull attention with its KL in few kernels: two forward, two or three backward, besides those of a contextual prior.

Short sequences are limited by the host, where every torch operation, autograd node and launch takes about ten microseconds.
Causal calls are limited by memory: a cumulative sum of queries is as large as the queries, and in float32. So Weibull
attention with a KL has its own kernels and one autograd node (`weibull_node.py`) for masks that depend only on positions and
keys: none, key padding, causal, a sliding window, and combinations. A mask of single entries uses `triton.py` and the plain
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
from bayesattn.ops.attention.backward_kernels import SUMS_OF_BLOCKS
from bayesattn.ops.attention.kl import LOG_ROW_CAP
from bayesattn.ops.attention.launch import (
    MOST_LAUNCHES,
    SUM_BLOCK,
    Band,
    Layout,
    Noise,
    blocks_of,
    finished,
    forward_launch,
    gradient_launches,
    gradient_of,
    grid_of,
    layout,
    new_grad_query,
    one_pass,
    optional_pointers,
    padded,
    row_steps,
    rows_first,
)
from bayesattn.ops.attention.masking import num_entries
from bayesattn.ops.common.launch import Launch, prepared
from bayesattn.ops.common.tape import Tape
from bayesattn.ops.prior.launch import launch_prior, launch_prior_gradient, prior_sums_shape

DIVIDE = {"sum": 0, "row_mean": 1, "mean": 2}
# largest tile of queries, keys or values, in entries, for which four warps are enough
SMALL_TILE = 4096


class Divergence(NamedTuple):
    """The settings of the KL."""

    weibull_k: float
    gamma_beta: float
    gamma_alpha: float
    alpha_form: str
    score_form: str
    reduction: str

    @classmethod
    def of(cls, config: AttentionConfig) -> "Divergence":
        """Return the KL settings of a config."""
        forms = (str(config.alpha_form), str(config.score_form), str(config.kl_reduction))
        return cls(config.weibull_k, config.gamma_beta, config.gamma_alpha, *forms)

    def numbers(self, has_prior: bool) -> dict[str, float]:
        """Return the numeric arguments of the KL kernels, in the order in which `weibull_kl_kernel` takes them."""
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
    """Everything that the launches of a call depend on; they are built once per problem."""

    query: Layout
    key: Layout
    value: Layout
    prior: Layout | None
    has_valid: bool
    band: Band
    divergence: Divergence
    noise: Noise
    scale: float
    # number and hidden width of the networks that compute ln Ψ within the call, if any
    network: tuple[int, int] | None = None

    @property
    def mask(self) -> Layout | None:
        """Layout of the key mask, as the attention kernels read it."""
        b, n = self.query.shape[0], self.key.shape[2]
        return Layout((b, 1, 1, n), (n, n, n, 1), torch.bool) if self.has_valid else None

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of ln Ψ over examples and heads, and of the mask over examples."""
        return (*((0, 0) if self.prior is None else self.prior.strides[:2]), self.key.shape[2] if self.has_valid else 0)

    @property
    def numbers(self) -> dict[str, float]:
        """Numeric arguments of the KL kernels."""
        return self.divergence.numbers(self.prior is not None)

    @property
    def constants(self) -> dict[str, int]:
        """Compile-time constants shared by both KL kernels."""
        switches = {"HAS_PRIOR": self.prior is not None, "HAS_VALID": self.has_valid, **self.band.switches}
        widest = padded(max(self.query.shape[-1], self.value.shape[-1]))
        return {
            **switches,
            "RAW": self.divergence.score_form == "raw",
            "BLOCK": SUM_BLOCK,
            "BD": padded(self.query.shape[-1]),
            # eight warps if causal: a program waits for one edge tile after the other
            "num_warps": 4 if SUM_BLOCK * widest <= SMALL_TILE and not self.band.is_causal else 8,
        }

    @property
    def blocks(self) -> int:
        """Number of programs of the KL kernels per head."""
        return blocks_of(max(self.query.shape[2], self.key.shape[2]), SUM_BLOCK)

    @property
    def precision(self) -> str:
        """Precision of float32 products."""
        return "ieee" if self.query.dtype == torch.float32 else "tf32"


class Workspace(NamedTuple):
    """Float32 arrays in one allocation: allocating each takes the host longer than filling it takes the GPU.

    Attributes:
        sizes: Entries per array, rounded up so that each array starts at a multiple of sixteen bytes.
        total: Sum of the sizes.
    """

    sizes: list[int]
    total: int

    @classmethod
    def of(cls, *sizes: int) -> "Workspace":
        """Return the workspace of arrays with these sizes."""
        rounded = [-(-size // 4) * 4 for size in sizes]
        return cls(rounded, sum(rounded))

    def parts(self, memory: Tensor) -> tuple[Tensor, ...]:
        """Return the arrays as one-dimensional tensors."""
        return torch.split_with_sizes(memory, self.sizes)


def kept_arrays(query: Sequence[int], keys: int, has_network: bool = False) -> Workspace:
    """Return the workspace that the forward pass keeps for the backward pass.

    It holds noisy LSE, clean LSE, P_j; block sums of queries, of LSEs and numbers of rows, of queries over whole blocks, of
    α_j k_j, and of α_j; the KL's weights; and ln Ψ, if a network computes it. `query` is a shape, `keys` a number.
    """
    b, h, m, d = query
    rows, blocks = b * h, blocks_of(max(m, keys), SUM_BLOCK)
    sums = rows * blocks * d
    return Workspace.of(
        rows * m, rows * m, rows * keys, rows * blocks_of(m, SUM_BLOCK) * d, rows * blocks_of(m, SUM_BLOCK) * 2, sums, sums,
        rows * blocks, rows, rows * keys if has_network else 0,
    )  # fmt: skip


@functools.lru_cache(maxsize=MOST_LAUNCHES)
def _arrays(problem: Problem, in_one_pass: bool) -> tuple[Workspace, Workspace]:
    """Return the workspaces of the forward pass (`kept_arrays`) and of the backward pass.

    The latter holds δ, dLSE, dT, the initial values of dQ, and d ln Ψ, if a network computes ln Ψ.
    """
    (b, h, m, d), n, has_network = problem.query.shape, problem.key.shape[2], problem.network is not None
    rows = b * h
    start = 0 if in_one_pass else problem.blocks * d if problem.band.is_causal else d
    own = Workspace.of(rows * m, rows * m, rows * n, rows * start, rows * n if has_network else 0)
    return kept_arrays(problem.query.shape, n, has_network), own


@functools.lru_cache(maxsize=MOST_LAUNCHES)
def _forward_launches(problem: Problem) -> tuple[Launch, Launch]:
    """Return the launches of attention and of its KL."""
    query, key, value, scale, band = problem.query, problem.key, problem.value, problem.scale, problem.band
    (b, h, m, d), (hk, n) = query.shape, key.shape[1:3]
    attend = forward_launch(query, key, value, problem.mask, None, problem.noise, scale, band, True, True)
    divergence = prepared(
        kl_kernels.weibull_kl_kernel, grid_of(max(m, n), SUM_BLOCK, b * h), *query.strides[:3], *key.strides[:3],
        *problem.strides,
        h, h // hk, m, n, d, band.window or 0, float(num_entries(m, n, *band)), scale, *problem.numbers.values(),
        **problem.constants, PER=DIVIDE[problem.divergence.reduction], PRECISION=problem.precision,
    )  # fmt: skip
    return attend, divergence


@functools.lru_cache(maxsize=MOST_LAUNCHES)
def _backward_launches(
    problem: Problem, grad: Layout, stride_kl: int, in_one_pass: bool, steps: tuple[int, ...]
) -> tuple[Launch, Launch, Launch | None]:
    """Return the launches of `weibull_prepare_kernel`, of dK and dV, and of dQ unless `in_one_pass`."""
    (b, h, m, d), n, dv, band = problem.query.shape, problem.key.shape[2], problem.value.shape[-1], problem.band
    shared = (problem.numbers[name] for name in ("log_alpha_shift", "slope", "log_beta", "log_cap"))
    prepare = prepared(
        kl_kernels.weibull_prepare_kernel, grid_of(max(m, n), SUM_BLOCK, b * h), *grad.strides[:3], stride_kl,
        *problem.strides, h, m, n, d, dv, band.window or 0, problem.scale, *shared, **problem.constants,
        ONE_PASS=in_one_pass, BDV=padded(dv),
    )  # fmt: skip
    gradients = gradient_launches(
        problem.query, problem.key, problem.value, problem.mask, None, grad,
        (problem.blocks, problem.blocks if band.is_causal else 1), problem.noise, problem.scale, band, True,
        SUMS_OF_BLOCKS.value, in_one_pass, steps,
    )  # fmt: skip
    return prepare, *gradients


class Plan:
    """A problem with its recorded launches.

    Attributes:
        forward: Tape of the forward pass.
        backward: Tapes of the backward pass, by gradient strides, `in_one_pass` and `need_prior_key`.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.forward = problem, Tape()
        self.kept = _arrays(problem, True)[0]
        self.backward: dict[tuple, Tape] = {}
        b, h, _, _ = problem.query.shape
        self.kl_shape = (b, h * problem.blocks)
        self.network_sums = (0, 0) if problem.network is None else prior_sums_shape(problem.key, problem.network)


plan_of = functools.lru_cache(maxsize=MOST_LAUNCHES)(Plan)


def run_forward(
    plan: Plan,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prior: Tensor | None,
    valid: Tensor | None,
    seed: Tensor,
    weights: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, KL and the memory of `kept_arrays`; given the weights of a prior network, compute ln Ψ too."""
    out = rows_first(query, query.shape[2], value.shape[-1])
    kept = query.new_empty(plan.kept.total, dtype=torch.float32)
    kl = query.new_empty(plan.kl_shape, dtype=torch.float32)
    arrays = (query, key, value, prior, valid, seed, *weights, out, kl, kept)
    if not plan.forward.replay(arrays):
        with plan.forward.recording(arrays):
            _launch_forward(plan, query, key, value, prior, valid, seed, weights, out, kl, kept)
    return out, kl.sum(dim=1), kept


def _launch_forward(plan, query, key, value, prior, valid, seed, weights, out, kl, kept) -> None:
    problem = plan.problem
    attend, divergence = _forward_launches(problem)
    lse, clean, products, query_sums, row_sums, others, key_sums, alpha_sums, weight, own_prior = plan.kept.parts(kept)
    if problem.network is not None:
        prior = own_prior
        # the logits use the memory of P_j: they are read before P_j is written
        launch_prior(problem.key, problem.network, key, weights, valid, products, prior)
    # unused pointers must still be valid
    attend(query, key, value, *optional_pointers(valid, None, seed), out, lse, clean, lse, lse, query_sums, row_sums)
    divergence(
        query, key, clean, lse, clean if prior is None else prior, clean if valid is None else valid, query_sums, row_sums,
        kl, weight, products, others, key_sums, alpha_sums,
    )  # fmt: skip


def run_backward(
    plan: Plan,
    grad: Tensor,
    grad_kl: Tensor,
    inputs: Sequence[Any],
    out: Tensor,
    kept: Tensor,
    weights: Sequence[Tensor] = (),
    need_prior_key: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of query, key, value and ln Ψ from those of `run_forward`'s output and KL.

    Given the weights of a prior network, the last gradient is that of all weights, concatenated, and the key gradient
    includes the path through ln Ψ only if `need_prior_key`.
    """
    query, key, value, prior, valid, seed = inputs
    in_one_pass = one_pass(max(query.shape[-1], value.shape[-1]))
    way = (grad.stride(), grad_kl.stride(0), in_one_pass, need_prior_key)
    tape = plan.backward.get(way)
    if tape is None:
        tape = plan.backward[way] = Tape()
    own = kept.new_empty(_arrays(plan.problem, in_one_pass)[1].total)
    grad_query, grad_key, grad_value = new_grad_query(query, in_one_pass), gradient_of(key), gradient_of(value)
    grad_prior = None if prior is None else kept.new_empty((*query.shape[:2], 1, key.shape[2]))
    prior_key = key.new_empty(key.shape) if need_prior_key else None
    sums = kept.new_empty(plan.network_sums) if weights else None
    arrays = (
        query, key, value, prior, valid, seed, *weights, out, kept, grad, grad_kl, own, grad_query, grad_key, grad_value,
        grad_prior, prior_key, sums,
    )  # fmt: skip
    if not tape.replay(arrays):
        with tape.recording(arrays):
            _launch_backward(plan, in_one_pass, weights, *arrays[:6], *arrays[6 + len(weights) :])
    if sums is not None:
        grad_prior = sums.sum(dim=0)
    if prior_key is not None:
        grad_key += prior_key
    return finished(grad_query, query), grad_key, grad_value, grad_prior


def _launch_backward(plan: Plan, in_one_pass: bool, weights: Sequence[Tensor], *arrays: Any) -> None:
    query, key, value, prior, valid, seed, out, kept, grad, grad_kl, own, grad_query, grad_key, grad_value, *rest = arrays
    grad_prior, prior_key, sums = rest
    problem = plan.problem
    kept_parts, own_parts = _arrays(problem, in_one_pass)
    lse, clean, products, _, _, others, key_sums, alpha_sums, weight, own_prior = kept_parts.parts(kept)
    delta, grad_lse, grad_columns, start, own_grad_prior = own_parts.parts(own)
    if problem.network is not None:
        prior, grad_prior = own_prior, own_grad_prior
    steps = row_steps(grad_query, grad_key, grad_value)
    prepare, gradients, last = _backward_launches(problem, layout(grad), grad_kl.stride(0), in_one_pass, steps)
    prepare(
        out, grad, grad_kl, products, clean, clean if prior is None else prior, clean if valid is None else valid,
        weight, key_sums, alpha_sums, delta, start, grad_query, grad_columns, grad_lse,
        products if grad_prior is None else grad_prior,
    )  # fmt: skip
    read = (query, key, value, *optional_pointers(valid, None, seed), grad, lse, clean, delta, grad_lse, None, None)
    gradients(*read, grad_columns, others, grad_query, grad_key, grad_value, None)
    if last is not None:
        last(*read, grad_columns, start, grad_query)
    if problem.network is not None:
        launch_prior_gradient(problem.key, problem.network, key, weights, valid, own_prior, own_grad_prior, prior_key, sums)
