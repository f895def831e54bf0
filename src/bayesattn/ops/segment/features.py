"""GAT's scores from node features, inside an autograd node, and their gradients.

    Φ_e = leaky_relu(x_source(e) · att_source + x_target(e) · att_target)

The two products and their gradients would be twelve torch operations, and three more where x is also the value and the
prior's key. Here they are one launch each way and a sum.
"""

import functools

import torch
from torch import Tensor

from bayesattn.ops.attention.launch import MOST_LAUNCHES, blocks_of
from bayesattn.ops.common.launch import Launch, prepared
from bayesattn.ops.segment import feature_kernels
from bayesattn.ops.segment.launch import node_blocks, prepare_blocks
from bayesattn.ops.segment.pairs import FeatureScores, PairScores
from bayesattn.precision import saturate

# programs that add up the gradients of both vectors, each over its share of nodes: two per multiprocessor of a large GPU
PROGRAMS = 264


def parts(scores: Tensor | PairScores | FeatureScores) -> tuple[Tensor, Tensor | None, float | None, bool]:
    """Return scores as arguments of an autograd node: one or two tensors, the slope, and whether those are GAT's vectors."""
    if isinstance(scores, FeatureScores):
        return scores.att_source, scores.att_target, scores.negative_slope, True
    if isinstance(scores, PairScores):
        return scores.source, scores.target, scores.negative_slope, False
    return scores, None, None, False


def opened(
    first: Tensor, second: Tensor | None, negative_slope: float | None, of_features: bool, value: Tensor, num_edges: int
) -> tuple[Tensor, PairScores | None]:
    """Return the scores of the edges, and the pair they are made of, from the result of `parts`.

    Without a pair (None), `first` is the scores. With a pair, the scores are uninitialized, and a kernel writes them.
    """
    if second is None or negative_slope is None:
        return first.contiguous(), None
    if of_features:
        source, target = _products(value, first.contiguous(), second.contiguous())
    else:
        source, target = first.contiguous(), second.contiguous()
    scores = value.new_empty((num_edges, value.shape[1]), dtype=torch.float32)
    return scores, PairScores(source, target, negative_slope)


@functools.lru_cache(maxsize=MOST_LAUNCHES)
def _scores_launch(entries: int, h: int, d: int) -> Launch:
    sizes = prepare_blocks(d)
    grid = (blocks_of(entries, sizes["BLOCK"]),)
    return prepared(feature_kernels.node_scores_kernel, grid, entries, h, d, **sizes)


def _products(features: Tensor, att_source: Tensor, att_target: Tensor) -> tuple[Tensor, Tensor]:
    n, h, d = features.shape
    source = features.new_empty((n, h), dtype=torch.float32)
    target = torch.empty_like(source)
    if n:
        _scores_launch(n * h, h, d)(features, att_source, att_target, source, target)
    return source, target


@functools.lru_cache(maxsize=MOST_LAUNCHES)
def _grad_launch(n: int, h: int, d: int, has_key: bool) -> tuple[Launch, int]:
    """Return the launch for `gradients` and the number of rows that it writes."""
    sizes = node_blocks(h * d)
    rows = min(blocks_of(n, sizes["BN"]), PROGRAMS)
    grid = (rows, blocks_of(h * d, sizes["BC"]))
    return prepared(feature_kernels.node_grad_kernel, grid, n, h, d, **sizes, HAS_KEY=has_key), rows


def gradients(
    features: Tensor, att_source: Tensor, att_target: Tensor, grad_source: Tensor, grad_target: Tensor, grad: Tensor,
    grad_key: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of both vectors and of the features, which must be contiguous.

    `grad_source` and `grad_target` are the gradients of a and b, [nodes, heads]. `grad` is the gradient of the features as
    values, and is overwritten. `grad_key` is their gradient as the prior's keys, in memory [heads, nodes, features].
    """
    n, h, d = features.shape
    if n == 0:
        return torch.zeros_like(att_source), torch.zeros_like(att_target), grad
    launch, rows = _grad_launch(n, h, d, grad_key is not None)
    sums = grad_source.new_empty((rows, 2, *att_source.shape))
    vectors = att_source.contiguous(), att_target.contiguous()
    launch(features, *vectors, grad_source, grad_target, grad if grad_key is None else grad_key, grad, sums)
    to_source, to_target = sums.sum(dim=0).unbind()
    return saturate(to_source, att_source.dtype), saturate(to_target, att_target.dtype), grad
