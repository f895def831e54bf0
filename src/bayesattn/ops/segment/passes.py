"""The forward and backward pass over a graph's edges: kernel launches, and merging of rows that were split into runs."""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bayesattn.ops.attention.launch import MOST_LAUNCHES, blocks_of
from bayesattn.ops.common.launch import Launch, prepared
from bayesattn.ops.segment import kernels, kl_kernels
from bayesattn.ops.segment.edges import Edges
from bayesattn.ops.segment.launch import kernel_constants, prepare_blocks, runs, sum_blocks
from bayesattn.ops.segment.pairs import PairScores

# kinds of prior: one number for all, a row per source, a row per edge
CONSTANT, PER_SOURCE, PER_EDGE = 0, 1, 2


class Indices(NamedTuple):
    """32-bit indices of a graph for the kernels; see `Edges` and `launch.runs`."""

    source: Tensor
    target: Tensor
    numbers: Tensor
    by_source: Tensor
    begin: Tensor
    nodes: Tensor
    begin_source: Tensor
    nodes_source: Tensor
    num_targets: int


class Draw(NamedTuple):
    """Family and strength of the noise, and the prior's constant and kind."""

    weibull: bool
    strength: float
    constant: float
    kind: int


def indices_of(edges: Edges) -> Indices:
    """Return the indices, cached for the lifetime of the edges."""

    def build() -> Indices:
        source, target, numbers = (x.to(torch.int32) for x in (edges.source, edges.target, edges.numbers))
        by_target, by_source = runs(edges, "target"), runs(edges, "source")
        return Indices(source, target, numbers, edges.by_source, *by_target, *by_source, edges.num_targets)

    return edges.memo("indices", build)


@functools.lru_cache(maxsize=MOST_LAUNCHES, typed=True)
def _forward_launch(
    num_runs: int, h: int, d: int, dtype: torch.dtype, split: bool, draw: Draw, negative_slope: float | None, need_lse: bool,
    need_moments: bool,
) -> Launch:  # fmt: skip
    switches = {"WEIBULL": draw.weibull, "CLEAN": need_lse, "MOMENTS": need_moments, "KIND": draw.kind, "SPLIT": split}
    switches["PAIR"] = negative_slope is not None
    constants = kernel_constants(h, d, dtype, **switches)
    grid = (num_runs, blocks_of(h, constants["HB"]))
    numbers = (h, d, draw.strength, draw.constant, negative_slope or 0.0)
    return prepared(kernels.edge_forward_kernel, grid, *numbers, **constants)


def forward(
    scores: Tensor,
    value: Tensor,
    prior: Tensor | None,
    seed: Tensor,
    indices: Indices,
    draw: Draw,
    need_lse: bool,
    need_moments: bool,
    pair: PairScores | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return output in float32, noisy LSE (base 2), clean LSE and both moments; results that are not needed are empty.

    With a pair, the scores are computed from it and written into `scores`.
    """
    h, d = value.shape[1:]
    begin, nodes, num_targets = indices.begin, indices.nodes, indices.num_targets
    num_runs = begin.shape[0] - 1
    is_split = num_runs != num_targets
    # float32, because δ = O · dO of the backward pass must not inherit a rounding of O to sixteen bits
    out = value.new_empty((num_runs, h, d), dtype=torch.float32)
    lse = scores.new_empty((num_runs, h))
    clean, first, second = (
        torch.empty_like(lse) if needed else lse.new_empty(0) for needed in (need_lse, need_moments, need_moments)
    )
    if out.numel():
        source, target, slope = (scores, scores, None) if pair is None else pair
        launch = _forward_launch(num_runs, h, d, value.dtype, is_split, draw, slope, need_lse, need_moments)
        read = (source, target, value, scores if prior is None else prior, seed, indices.source, indices.numbers, nodes)
        launch(scores, *read, begin, out, lse, clean, first, second)
    if is_split:
        rows = _merge(lse, nodes, num_targets)
        out = _add_runs(out * torch.exp2(lse - rows[nodes]).nan_to_num(nan=0.0)[..., None], nodes, num_targets)
        lse = rows
        if need_lse:
            clean = _merge(clean * math.log2(math.e), nodes, num_targets) * math.log(2.0)
            # 0 for a row without edges, as in every backend; no edge reads it
            clean = torch.where(clean == -math.inf, 0.0, clean)
        if need_moments:
            first, second = (_add_runs(x, nodes, num_targets) for x in (first, second))
    return out, lse, clean, first, second


def _merge(lse: Tensor, nodes: Tensor, num_rows: int) -> Tensor:
    """Return log2 Σ 2^lse over the runs of each node; −inf for a node without edges."""
    index = nodes.long()[:, None].expand_as(lse)
    top = lse.new_full((num_rows, lse.shape[1]), -math.inf).scatter_reduce(0, index, lse, "amax")
    shift = torch.where(top == -math.inf, 0.0, top)
    return shift + torch.log2(_add_runs(torch.exp2(lse - shift[nodes]), nodes, num_rows))


def _add_runs(x: Tensor, nodes: Tensor, num_rows: int) -> Tensor:
    return x if x.shape[0] == num_rows else x.new_zeros(num_rows, *x.shape[1:]).index_add(0, nodes, x)


class Divergent(NamedTuple):
    """Numbers and switches of a KL that the backward kernels differentiate themselves."""

    slope: float
    log_beta: float
    log_cap: float
    weight: float
    is_raw: bool
    per_row: bool


@functools.lru_cache(maxsize=MOST_LAUNCHES, typed=True)
def _prepare_launch(entries: int, d: int, divergent: Divergent | None) -> Launch:
    given = divergent or Divergent(0.0, 0.0, 0.0, 0.0, False, False)
    sizes = prepare_blocks(d)
    numbers = (entries, d, given.weight, given.log_beta, given.log_cap)
    switches = {"WITH_KL": divergent is not None, "RAW": given.is_raw, "PER_ROW": given.per_row}
    grid = (blocks_of(entries, sizes["BLOCK"]),)
    return prepared(kl_kernels.edge_prepare_kernel, grid, *numbers, **switches, **sizes)


def prepare(
    grad: Tensor,
    out: Tensor,
    divergent: Divergent | None = None,
    clean: Tensor | None = None,
    first: Tensor | None = None,
    grad_kl: Tensor | None = None,
    num_rows: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return δ = O · dO of each row; with a KL also the gradient of the clean LSE and `pull`, else placeholders."""
    n, h, d = out.shape
    delta = out.new_empty((n, h))
    # placeholders, because an unused pointer must be valid; without rows no kernel writes `pull`, but the prior's gradient
    # is a multiple of it
    grad_lse, pull = delta, delta
    if divergent is not None:
        grad_lse, pull = torch.empty_like(delta), out.new_empty(1) if n else out.new_zeros(1)
    # here, too, an unused pointer must be valid
    read = [out if x is None else x for x in (clean, first, grad_kl, num_rows)]
    if out.numel():
        _prepare_launch(n * h, d, divergent)(out, grad, *read, delta, grad_lse, pull)
    return delta, grad_lse, pull


@functools.lru_cache(maxsize=MOST_LAUNCHES, typed=True)
def _backward_launch(
    num_runs: int, h: int, d: int, dtype: torch.dtype, draw: Draw, negative_slope: float | None, clean: bool, moments: bool,
    divergent: Divergent | None,
) -> Launch:  # fmt: skip
    is_raw, slope = (False, 0.0) if divergent is None else (divergent.is_raw, divergent.slope)
    switches = {"WEIBULL": draw.weibull, "CLEAN": clean, "MOMENTS": moments, "KIND": draw.kind}
    switches["PAIR"] = negative_slope is not None
    constants = kernel_constants(h, d, dtype, **switches, FUSED=divergent is not None, RAW=is_raw)
    grid = (num_runs, blocks_of(h, constants["HB"]))
    numbers = (h, d, draw.strength, draw.constant, slope, negative_slope or 0.0)
    return prepared(kernels.edge_backward_kernel, grid, *numbers, **constants)


@functools.lru_cache(maxsize=MOST_LAUNCHES)
def _pair_launch(num_source_runs: int, num_runs: int, h: int) -> Launch:
    sizes = sum_blocks(h)
    grid = (num_source_runs + num_runs, blocks_of(h, sizes["HB"]))
    return prepared(kernels.edge_pair_grad_kernel, grid, h, num_source_runs, **sizes)


def backward(
    grad: Tensor,
    delta: Tensor,
    rows: Sequence[Tensor | None],
    lse: Tensor,
    clean: Tensor,
    scores: Tensor,
    value: Tensor,
    prior: Tensor | None,
    seed: Tensor,
    indices: Indices,
    draw: Draw,
    divergent: Divergent | None = None,
    negative_slope: float | None = None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Return two gradients for the scores, one for the values and one for the prior.

    The second is None unless the scores are made of a pair, with `negative_slope`. The last is empty without a prior; with
    `divergent` it is that of ln α. `rows` holds the gradients of the clean LSE and both moments, or with `divergent` the
    first of these, None and `pull`.
    """
    begin, nodes = indices.begin_source, indices.nodes_source
    (n, h, d), num_runs = value.shape, begin.shape[0] - 1
    grad_scores = torch.empty_like(scores)
    grad_value = value.new_empty((num_runs, h, d), dtype=value.dtype if num_runs == n else torch.float32)
    grad_prior = scores.new_empty({CONSTANT: 0, PER_SOURCE: (num_runs, h), PER_EDGE: scores.shape}[draw.kind])
    if grad_value.numel():
        used = (rows[0] is not None, rows[2] is not None)
        launch = _backward_launch(num_runs, h, d, value.dtype, draw, negative_slope, *used, divergent)
        edges = (indices.target, indices.numbers, indices.by_source, nodes, begin)
        read = (scores, value, scores if prior is None else prior, seed, *edges)
        given = [delta if x is None else x for x in rows]
        launch(*read, grad, lse, clean, delta, *given, grad_scores, grad_value, grad_prior)
    if draw.kind == PER_SOURCE:
        grad_prior = _add_runs(grad_prior, nodes, n)
    if num_runs != n:
        grad_value = _add_runs(grad_value, nodes, n).to(value.dtype)
    if negative_slope is None:
        return grad_scores, None, grad_value, grad_prior
    return *_pair_gradients(grad_scores, indices, n), grad_value, grad_prior


def _pair_gradients(grad_scores: Tensor, indices: Indices, num_sources: int) -> tuple[Tensor, Tensor]:
    """Return the edges' gradients summed over each source and over each target."""
    h = grad_scores.shape[1]
    num_source_runs, num_runs = indices.begin_source.shape[0] - 1, indices.begin.shape[0] - 1
    source, target = grad_scores.new_empty((num_source_runs, h)), grad_scores.new_empty((num_runs, h))
    if h and num_source_runs + num_runs:
        launch = _pair_launch(num_source_runs, num_runs, h)
        launch(grad_scores, indices.by_source, indices.begin_source, indices.begin, source, target)
    return _add_runs(source, indices.nodes_source, num_sources), _add_runs(target, indices.nodes, indices.num_targets)
