"""Weibull attention with its KL by few kernels: two forward, two or three backward.

At short lengths the host is the bottleneck: every torch operation, autograd node and launch costs it some ten microseconds.
With a causal mask it is memory: a cumulative sum of queries is as large as the queries, in float32.
So Weibull noise with a KL under any mask that depends on positions and keys only (none, key padding, causal, a sliding
window, and those together) has kernels of its own and one autograd node (`weibull_node.py`). A mask of single entries takes
`triton.py` and the plain KL of `kl.py`.
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
# entries of a tile of queries, keys or values for which four warps are enough
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
        """Return the KL's settings of a config."""
        forms = (str(config.alpha_form), str(config.score_form), str(config.kl_reduction))
        return cls(config.weibull_k, config.gamma_beta, config.gamma_alpha, *forms)

    def numbers(self, has_prior: bool) -> dict[str, float]:
        """Numbers for the kernels of the KL: α's shift, slope and constant of a key's term, β, its logarithm, the cap."""
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
    """Everything that the launches of a call depend on: they are built once per problem and then looked up."""

    query: Layout
    key: Layout
    value: Layout
    prior: Layout | None
    has_valid: bool
    band: Band
    divergence: Divergence
    noise: Noise
    scale: float
    # of the network that computes ln Ψ on the way: how many there are, and their hidden width
    network: tuple[int, int] | None = None

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
        """The numeric arguments of the KL's kernels."""
        return self.divergence.numbers(self.prior is not None)

    @property
    def constants(self) -> dict[str, int]:
        """Of both kernels of the KL."""
        switches = {"HAS_PRIOR": self.prior is not None, "HAS_VALID": self.has_valid, **self.band.switches}
        widest = padded(max(self.query.shape[-1], self.value.shape[-1]))
        return {
            **switches,
            "RAW": self.divergence.score_form == "raw",
            "BLOCK": SUM_BLOCK,
            "BD": padded(self.query.shape[-1]),
            # on the diagonal a program waits for one tile after the other
            "num_warps": 4 if SUM_BLOCK * widest <= SMALL_TILE and not self.band.is_causal else 8,
        }

    @property
    def blocks(self) -> int:
        """How many programs the kernels of the KL have for a head."""
        return blocks_of(max(self.query.shape[2], self.key.shape[2]), SUM_BLOCK)

    @property
    def precision(self) -> str:
        """Of products of float32."""
        return "ieee" if self.query.dtype == torch.float32 else "tf32"


class Workspace(NamedTuple):
    """Arrays of float32 in one piece of memory: allocating each would take the host longer than filling them takes the GPU.

    Args:
        sizes: Entries of every array, rounded up so that the next one starts at a multiple of sixteen bytes.
        total: Entries of all of them.
    """

    sizes: list[int]
    total: int

    @classmethod
    def of(cls, *sizes: int) -> "Workspace":
        """Return the workspace of arrays with these numbers of entries."""
        rounded = [-(-size // 4) * 4 for size in sizes]
        return cls(rounded, sum(rounded))

    def parts(self, memory: Tensor) -> tuple[Tensor, ...]:
        """Return the arrays, flat."""
        return torch.split_with_sizes(memory, self.sizes)


def kept_arrays(query: Sequence[int], keys: int, has_network: bool = False) -> Workspace:
    """Return the arrays that the forward pass keeps: both LSEs, P_j, sums of blocks, the KL's weights, and a network's ln Ψ.

    Args:
        query: Shape of the queries.
        keys: How many keys there are.
        has_network: Whether ln Ψ is computed on the way.

    The sums are of queries, of LSEs and numbers of rows, of queries in whole blocks, of keys, and of α.
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
    """Return the arrays that are kept, and those of the backward pass.

    The latter are δ, dLSE, dT, what rows of dQ start from, and a network's d ln Ψ.
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
    """Return the launches of what all gradients need, of those of key and value, and of the query's."""
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
    """A problem with its launches, which are looked up once.

    Attributes:
        forward: Launches of the forward pass.
        backward: Of the backward pass, by strides of its gradients and by whether it runs in one pass.
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
    """Return output, KL, and the memory of `kept_arrays`; with the weights of a network, ln Ψ is computed on the way."""
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
        # the logits are read before P_j is written
        launch_prior(problem.key, problem.network, key, weights, valid, products, prior)
    # an unused pointer still has to be valid
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
    """Return the gradients of query, key, value and ln Ψ, from those of `run_forward`'s output and KL.

    With the weights of a network, the last is the gradient of all of them, one after the other; that of ln Ψ in the keys is
    left out unless `need_prior_key`.
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
