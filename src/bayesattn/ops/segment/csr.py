"""The functions of `plain` for edges sorted by target, on a CPU: sums over rows are products with sparse matrices.

    sum over the edges of a node      S x, S the sparse 0/1 matrix (nodes × edges); its adjoint is the gather, and vice versa
    O = Σ_e W_e V_source(e)           one product with the sparse matrix of all heads, block by block (targets·h × sources·h)
    dW_e = dO_target(e) · V_source(e) the dense product sampled at the non-zeros;  dV = Wᵀ dO, by the edges sorted by source

No array with features is stored per edge, and nothing is scattered. Indices are 32-bit and built once per graph.
`weighted_sum` also runs on a GPU, where it stores features per edge only for the gradient of the weights.
"""

import warnings
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from bayesattn.noise.specification import generator_halves
from bayesattn.ops.once import once_differentiable
from bayesattn.ops.segment.edges import Edges


def _matrix(pointers: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    # the indices come from `Edges`, which checked them
    return torch.sparse_csr_tensor(pointers, columns, values, shape, check_invariants=False)


def _silence_beta_warning() -> None:
    """Make a first CSR tensor with warnings off: torch warns once per process that these are in beta and unchecked."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support")
        warnings.filterwarnings("ignore", "Sparse invariant checks")
        _matrix(torch.zeros(2, dtype=torch.int32), torch.zeros(0, dtype=torch.int32), torch.zeros(0), (1, 1))


_silence_beta_warning()

Side = Literal["source", "target"]


def lift_source(x: Float[Tensor, "n *f"], edges: Edges) -> Float[Tensor, "e *f"]:
    """Return x at the source of each edge."""
    return _Lift.apply(x, edges, "source")


def lift_target(x: Float[Tensor, "r *f"], edges: Edges) -> Float[Tensor, "e *f"]:
    """Return x at the target of each edge."""
    return _Lift.apply(x, edges, "target")


def sum_by_source(x: Float[Tensor, "e *f"], edges: Edges) -> Float[Tensor, "n *f"]:
    """Return the sum of x over the edges of each source; 0 without edges."""
    return _Sum.apply(x, edges, "source")


def sum_by_target(x: Float[Tensor, "e *f"], edges: Edges) -> Float[Tensor, "r *f"]:
    """Return the sum of x over the edges of each target; 0 without edges."""
    return _Sum.apply(x, edges, "target")


def softmax(
    scores: Float[Tensor, "e h"], edges: Edges, log_noise: Float[Tensor, "e h"] | None = None
) -> Float[Tensor, "e h"]:
    """Return the softmax of Φ_e + noise over the edges of each target; the noise is overwritten."""
    return _Softmax.apply(scores, log_noise, edges)


def logsumexp(scores: Float[Tensor, "e h"], edges: Edges) -> Float[Tensor, "r h"]:
    """Return ln Σ exp Φ_e over the edges of each target; 0 without edges."""
    return _LogSumExp.apply(scores, edges)


def weighted_sum(weights: Float[Tensor, "e h"], value: Float[Tensor, "n h d"], edges: Edges) -> Float[Tensor, "r h d"]:
    """Return O_i = Σ_e W_e V_source(e) over the edges of each target i."""
    return _WeightedSum.apply(weights, value, edges)


def dot(query: Float[Tensor, "r h d"], key: Float[Tensor, "n h d"], edges: Edges) -> Float[Tensor, "e h"]:
    """Return q_target(e) · k_source(e) of each edge."""
    wide = torch.promote_types(query.dtype, torch.float32)
    return _Dot.apply(query.to(wide), key.to(wide), edges)


def dropout(weights: Float[Tensor, "e h"], p: float) -> Float[Tensor, "e h"]:
    """Set weights to 0 with probability p, rounded to a multiple of 2^-16, and scale the others to keep the mean.

    torch's dropout takes several times as long, longer than drawing the weights.
    """
    threshold = min(round(p * 2**16), 2**16 - 1)
    e, h = weights.shape
    halves = generator_halves((1, 1, e, h), weights.device).view(e, h)
    keep = (halves >= threshold - 2**15).to(weights.dtype)
    return weights * keep.mul_(1.0 / (1.0 - threshold * 2.0**-16))


class _Lift(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, edges: Edges, side: Side) -> Tensor:
        ctx.edges, ctx.side = edges, side
        return _lift(x, edges, side)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return _sum(grad, ctx.edges, ctx.side), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, edges: Edges, side: Side) -> Tensor:
        ctx.edges, ctx.side = edges, side
        return _sum(x, edges, side)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return _lift(grad, ctx.edges, ctx.side), None, None


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores: Tensor, log_noise: Tensor | None, edges: Edges) -> Tensor:
        weights, _ = _softmax(scores.clone() if log_noise is None else log_noise.add_(scores), edges)
        ctx.edges = edges
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        (weights,) = ctx.saved_tensors
        slope = weights * grad
        mean = _lift(_sum(slope, ctx.edges, "target"), ctx.edges, "target")
        return slope.addcmul_(weights, mean, value=-1.0), None, None


class _LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores: Tensor, edges: Edges) -> Tensor:
        weights, lse = _softmax(scores.clone(), edges)
        ctx.edges = edges
        ctx.save_for_backward(weights)
        return lse

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        (weights,) = ctx.saved_tensors
        return _lift(grad, ctx.edges, "target").mul_(weights), None


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weights: Tensor, value: Tensor, edges: Edges) -> Tensor:
        ctx.edges = edges
        ctx.save_for_backward(weights, value)
        return _to_targets(weights, value, edges)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        weights, value = ctx.saved_tensors
        grad_weights = _dot(grad, value, ctx.edges) if ctx.needs_input_grad[0] else None
        return grad_weights, _to_sources(weights, grad, ctx.edges) if ctx.needs_input_grad[1] else None, None


class _Dot(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, edges: Edges) -> Tensor:
        ctx.edges = edges
        ctx.save_for_backward(query, key)
        return _dot(query, key, edges)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        query, key = ctx.saved_tensors
        return _to_targets(grad, key, ctx.edges), _to_sources(grad, query, ctx.edges), None


def _to_targets(weights: Tensor, value: Tensor, edges: Edges) -> Tensor:
    """Return Σ_e w_e x_source(e) of each target."""
    (n, h, d), r = value.shape, edges.num_targets
    matrix = _matrix(*_blocks(edges, h), weights.T.reshape(-1), (h * r, n * h))
    return (matrix @ value.reshape(n * h, d)).view(h, r, d).transpose(0, 1).contiguous()


def _to_sources(weights: Tensor, x: Tensor, edges: Edges) -> Tensor:
    """Return Σ_e w_e x_target(e) of each source."""
    (r, h, d), n = x.shape, edges.num_sources
    values = weights.index_select(0, edges.by_source).T.reshape(-1)
    matrix = _matrix(*_blocks_by_source(edges, h), values, (h * n, h * r))
    return (matrix @ x.transpose(0, 1).reshape(h * r, d)).view(h, n, d).transpose(0, 1)


def _dot(x: Tensor, value: Tensor, edges: Edges) -> Tensor:
    """Return x_target(e) · v_source(e) of each edge: the dense product at the non-zeros of the weights."""
    (r, h, d), n, e = x.shape, value.shape[0], len(edges)
    if x.is_cuda:
        # two gathers and a sum: cheap compared with the scatter that sparse products replace on a GPU
        return (_lift(x, edges, "target") * _lift(value, edges, "source")).sum(dim=-1)
    pattern = _matrix(*_blocks(edges, h), x.new_zeros(h * e), (h * r, n * h))
    rows, columns = x.transpose(0, 1).reshape(h * r, d), value.reshape(n * h, d).T
    return torch.sparse.sampled_addmm(pattern, rows, columns, beta=0.0).values().view(h, e).T


def _lift(x: Tensor, edges: Edges, side: Side) -> Tensor:
    return x.index_select(0, edges.source if side == "source" else edges.target)


def _sum(x: Tensor, edges: Edges, side: Side) -> Tensor:
    # sums are float32 or better; the sparse products support no narrower type
    wide = torch.promote_types(x.dtype, torch.float32)
    matrix = _sum_matrix(edges, side, wide)
    return (matrix @ x.to(wide).flatten(1)).to(x.dtype).view(matrix.shape[0], *x.shape[1:])


def _softmax(scores: Tensor, edges: Edges) -> tuple[Tensor, Tensor]:
    """Return the softmax, which overwrites the scores, and the log-sum-exp."""
    scores = scores.contiguous()
    largest = torch.sparse.mm(_sum_matrix(edges, "target", scores.dtype), scores, "amax")
    weights = scores.sub_(_lift(largest, edges, "target")).exp_()
    total = _sum(weights, edges, "target")
    # without edges a row's maximum and total are 0 here, and its log-sum-exp is 0, as in every backend
    total = total.masked_fill_(total == 0.0, 1.0)
    return weights.mul_(_lift(total.reciprocal(), edges, "target")), largest.add_(total.log())


def _sum_matrix(edges: Edges, side: Side, dtype: torch.dtype) -> Tensor:
    """Return S with S[node, edge] = 1 where the edge belongs to the node."""

    def build() -> Tensor:
        ones = torch.ones(len(edges), dtype=dtype)
        if side == "source":
            return _matrix(edges.source_pointers, edges.by_source, ones, (edges.num_sources, len(edges)))
        positions = torch.arange(len(edges), dtype=torch.int32)
        return _matrix(edges.target_pointers, positions, ones, (edges.num_targets, len(edges)))

    return edges.memo((side, dtype), build)


def _blocks(edges: Edges, heads: int) -> tuple[Tensor, Tensor]:
    """Return the indices of one matrix of all heads' weights: row (h, target), column (source, h), edges head by head."""

    def build() -> tuple[Tensor, Tensor]:
        head = torch.arange(heads, dtype=torch.int32, device=edges.source.device)
        return _stack_pointers(edges.target_pointers, heads), (
            edges.source.to(torch.int32) * heads + head[:, None]
        ).flatten()

    return edges.memo(("blocks", heads), build)


def _blocks_by_source(edges: Edges, heads: int) -> tuple[Tensor, Tensor]:
    """Return the indices of the transposed weights: row (h, source), column (h, target), edges sorted by source."""

    def build() -> tuple[Tensor, Tensor]:
        first = torch.arange(heads, dtype=torch.int32, device=edges.source.device) * edges.num_targets
        target = edges.target.index_select(0, edges.by_source).to(torch.int32)
        return _stack_pointers(edges.source_pointers, heads), (target + first[:, None]).flatten()

    return edges.memo(("blocks by source", heads), build)


def _stack_pointers(pointers: Tensor, heads: int) -> Tensor:
    first = torch.arange(heads, dtype=torch.int32, device=pointers.device)[:, None] * pointers[-1]
    return torch.cat([(pointers[:-1] + first).flatten(), heads * pointers[-1:]])
