"""The operations of attention on edges, by torch's gather and scatter, for any device, order of edges and compiler.

`csr` has the same functions for sorted edges on a CPU, where they are several times faster. `reference` uses either module.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from bayesattn.ops.segment.edges import Edges


def lift_source(x: Float[Tensor, "n *f"], edges: Edges) -> Float[Tensor, "e *f"]:
    """Return x at the source of each edge."""
    return x.index_select(0, edges.source)


def lift_target(x: Float[Tensor, "r *f"], edges: Edges) -> Float[Tensor, "e *f"]:
    """Return x at the target of each edge."""
    return x.index_select(0, edges.target)


def sum_by_source(x: Float[Tensor, "e *f"], edges: Edges) -> Float[Tensor, "n *f"]:
    """Return the sum of x over the edges of each source; 0 without edges."""
    return x.new_zeros(edges.num_sources, *x.shape[1:]).index_add(0, edges.source, x)


def sum_by_target(x: Float[Tensor, "e *f"], edges: Edges) -> Float[Tensor, "r *f"]:
    """Return the sum of x over the edges of each target; 0 without edges."""
    return x.new_zeros(edges.num_targets, *x.shape[1:]).index_add(0, edges.target, x)


def softmax(
    scores: Float[Tensor, "e h"], edges: Edges, log_noise: Float[Tensor, "e h"] | None = None
) -> Float[Tensor, "e h"]:
    """Return the softmax of Φ_e + noise over the edges of each target; callers must expect the noise to be overwritten."""
    scores = scores if log_noise is None else scores + log_noise
    return torch.exp(scores - lift_target(logsumexp(scores, edges), edges))


def logsumexp(scores: Float[Tensor, "e h"], edges: Edges) -> Float[Tensor, "r h"]:
    """Return ln Σ exp Φ_e over the edges of each target; 0 without edges."""
    rows = scores.new_zeros(edges.num_targets, scores.shape[1])
    # the largest score is only a shift: it needs no gradient, and it is 0 in a row without edges
    index = edges.target[:, None].expand_as(scores)
    largest = rows.scatter_reduce(0, index, scores.detach(), "amax", include_self=False)
    total = sum_by_target(torch.exp(scores - lift_target(largest, edges)), edges)
    has_edge = total > 0
    return torch.where(has_edge, largest + torch.log(total.masked_fill(~has_edge, 1.0)), 0.0)


def weighted_sum(weights: Float[Tensor, "e h"], value: Float[Tensor, "n h d"], edges: Edges) -> Float[Tensor, "r h d"]:
    """Return O_i = Σ_e W_e V_source(e) over the edges of each target i."""
    return sum_by_target(weights.unsqueeze(-1) * lift_source(value, edges), edges)


def dot(query: Float[Tensor, "r h d"], key: Float[Tensor, "n h d"], edges: Edges) -> Float[Tensor, "e h"]:
    """Return q_target(e) · k_source(e) of each edge."""
    return (lift_target(query, edges) * lift_source(key, edges)).sum(dim=-1)


def dropout(weights: Float[Tensor, "e h"], p: float) -> Float[Tensor, "e h"]:
    """Set weights to 0 with probability p and scale the others by 1/(1 − p)."""
    return F.dropout(weights, p)
