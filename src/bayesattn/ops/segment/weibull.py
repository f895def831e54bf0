"""Weibull attention on edges and its KL in few kernels: three forward, two backward.

On a graph of about ten thousand nodes the host is the bottleneck: each torch operation, gradient and autograd node takes it
longer than the GPU. The common case, a KL whose prior is one number or one number per source, therefore has its own kernels
and one autograd node (`weibull_node.py`). All other cases use the torch operations of `triton.py`.
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from bayesattn.divergences import weibull_gamma_key_term
from bayesattn.ops.attention.launch import MOST_LAUNCHES, blocks_of
from bayesattn.ops.attention.weibull import Divergence
from bayesattn.ops.common.launch import Launch, prepared
from bayesattn.ops.segment import kl_kernels, passes
from bayesattn.ops.segment.pairs import PairScores
from bayesattn.ops.segment.passes import CONSTANT, PER_SOURCE, Divergent, Draw, Indices

# entries of [nodes, heads] per program of the KL's kernels
BLOCK = 1024


class Graph(NamedTuple):
    """Indices of the passes, CSR pointers of targets and sources, and the number of targets with edges."""

    indices: Indices
    target_pointers: Tensor
    source_pointers: Tensor
    num_rows: Tensor


class Problem(NamedTuple):
    """Everything that determines the numbers and launches of a call, which are built once and then looked up."""

    num_sources: int
    num_targets: int
    num_edges: int
    heads: int
    prior_strides: tuple[int, ...] | None
    divergence: Divergence

    @property
    def draw(self) -> Draw:
        """Noise and prior of the passes: α is one number, or one per source."""
        given = self.divergence
        kind = CONSTANT if self.prior_strides is None else PER_SOURCE
        return Draw(True, 1.0 / given.weibull_k, given.gamma_alpha if kind == CONSTANT else 0.0, kind)

    @property
    def divergent(self) -> Divergent:
        """Numbers and switches of the KL for the backward pass."""
        given = self.divergence
        numbers = given.numbers(self.prior_strides is not None)
        # the kernels divide by the number of rows with edges, which is only on the device
        entries = {"sum": 1, "row_mean": self.heads, "mean": max(self.num_edges, 1) * self.heads}[given.reduction]
        return Divergent(
            slope=numbers["slope"],
            log_beta=numbers["log_beta"],
            log_cap=numbers["log_cap"],
            weight=1.0 / entries,
            is_raw=given.score_form == "raw",
            per_row=given.reduction == "row_mean",
        )


class Plan(NamedTuple):
    """Numbers and launches of a problem; these write `num_programs` shares of the KL, `num_alpha` of them for α."""

    draw: Draw
    divergent: Divergent
    alpha: Launch | None
    rows: Launch
    num_alpha: int
    num_programs: int


@functools.lru_cache(maxsize=MOST_LAUNCHES, typed=True)
def _plan(problem: Problem) -> Plan:
    """Build the plan of a problem, with the launches of α and of the rows' KL."""
    given, h, divergent = problem.divergence, problem.heads, problem.divergent
    numbers = given.numbers(problem.prior_strides is not None)
    alpha, num_alpha, key_terms = None, 0, 0.0
    if problem.prior_strides is None:
        log_alpha = torch.full((), math.log(given.gamma_alpha), dtype=torch.float64)
        key_term = weibull_gamma_key_term(log_alpha, weibull_k=given.weibull_k, gamma_beta=given.gamma_beta)
        key_terms = float(key_term) * problem.num_edges * h
    else:
        entries = problem.num_sources * h
        num_alpha = blocks_of(entries, BLOCK)
        alpha = prepared(
            kl_kernels.edge_alpha_kernel, (num_alpha,), *problem.prior_strides, entries, h, divergent.weight,
            *(numbers[name] for name in ("log_alpha_shift", "slope", "constant")), PER_ROW=divergent.per_row, BLOCK=BLOCK,
        )  # fmt: skip
    entries = problem.num_targets * h
    num_rows = blocks_of(entries, BLOCK)
    rows = prepared(
        kl_kernels.edge_kl_kernel, (num_rows,), num_alpha, entries, h, divergent.weight,
        *(numbers[name] for name in ("beta", "log_beta", "log_cap", "cap")), key_terms, RAW=divergent.is_raw,
        PER_ROW=divergent.per_row, BLOCK=BLOCK,
    )  # fmt: skip
    return Plan(problem.draw, divergent, alpha, rows, num_alpha, num_alpha + num_rows)


def plan_of(scores: Tensor, prior_strides: tuple[int, ...] | None, graph: Graph, divergence: Divergence) -> Plan:
    """Return the plan of a call; `prior_strides` are those of ln Ψ, None without one."""
    num_sources, num_targets = graph.source_pointers.shape[0] - 1, graph.target_pointers.shape[0] - 1
    return _plan(Problem(num_sources, num_targets, scores.shape[0], scores.shape[1], prior_strides, divergence))


def run_forward(
    plan: Plan, scores: Tensor, value: Tensor, log_prior: Tensor | None, seed: Tensor, graph: Graph,
    pair: PairScores | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Return output in float32, KL, noisy and clean LSE, Σ α per row, and α per source (None without ln Ψ)."""
    shares = scores.new_empty(plan.num_programs)
    alpha = None if log_prior is None else scores.new_empty(log_prior.shape)
    if plan.alpha is not None and plan.num_alpha:
        plan.alpha(log_prior, graph.source_pointers, graph.num_rows, alpha, shares)
    out, lse, clean, first, second = passes.forward(scores, value, alpha, seed, graph.indices, plan.draw, True, True, pair)
    if plan.num_programs > plan.num_alpha:
        plan.rows(clean, first, second, graph.target_pointers, graph.num_rows, shares)
    return out, shares.sum(dim=0, keepdim=True), lse, clean, first, alpha


def run_backward(
    plan: Plan, grad: Tensor, grad_kl: Tensor, scores: Tensor, value: Tensor, seed: Tensor, graph: Graph,
    out: Tensor, lse: Tensor, clean: Tensor, first: Tensor, alpha: Tensor | None, negative_slope: float | None = None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:  # fmt: skip
    """Return the result of `passes.backward`, with the gradient of ln Ψ, from inputs and outputs of `run_forward`."""
    grad = grad.contiguous()
    delta, grad_lse, pull = passes.prepare(grad, out, plan.divergent, clean, first, grad_kl, graph.num_rows)
    rows = (grad_lse, None, pull)
    return passes.backward(
        grad, delta, rows, lse, clean, scores, value, alpha, seed, graph.indices, plan.draw, plan.divergent, negative_slope
    )
