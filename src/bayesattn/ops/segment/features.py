"""GAT's scores from the features of the nodes inside an autograd node, and the gradients back to them.

    Φ_e = leaky_relu(x_source(e) · att_source + x_target(e) · att_target)

Written as torch operations the two products and their gradients are twelve of them, three more where x is also the value
and the key of the prior. Here they are one launch each way and a sum.
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

# programs that add up the gradients of the two vectors, each over its own nodes: two for each multiprocessor of a large GPU
PROGRAMS = 264


def parts(scores: Tensor | PairScores | FeatureScores) -> tuple[Tensor, Tensor | None, float | None, bool]:
    """Return scores as arguments of an autograd node: one tensor or two, the slope, whether they are vectors of features."""
    if isinstance(scores, FeatureScores):
        return scores.att_source, scores.att_target, scores.negative_slope, True
    if isinstance(scores, PairScores):
        return scores.source, scores.target, scores.negative_slope, False
    return scores, None, None, False


def opened(
    first: Tensor, second: Tensor | None, negative_slope: float | None, of_features: bool, value: Tensor, num_edges: int
) -> tuple[Tensor, PairScores | None]:
    """Return the scores of the edges, and the pair they are made of, from their parts.

    Either the first part is the scores; or the scores are empty, for a kernel to write them.
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
    """Return the launch, and the number of rows it writes."""
    sizes = node_blocks(h * d)
    rows = min(blocks_of(n, sizes["BN"]), PROGRAMS)
    grid = (rows, blocks_of(h * d, sizes["BC"]))
    return prepared(feature_kernels.node_grad_kernel, grid, n, h, d, **sizes, HAS_KEY=has_key), rows


def gradients(
    features: Tensor, att_source: Tensor, att_target: Tensor, grad_source: Tensor, grad_target: Tensor, grad: Tensor,
    grad_key: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of both vectors and of the features, from those of a, b and of the other uses of the features.

    Args:
        features: Features of the nodes, contiguous.
        att_source: GAT's vector for sources.
        att_target: For targets.
        grad_source: Gradient of a [nodes, heads].
        grad_target: Gradient of b.
        grad: Gradient of the features as values; written over.
        grad_key: Gradient of the features as keys of the prior, in memory [heads, nodes, features].
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
