"""Rows of scores, each normalized by itself: of a dense matrix, or the edges into the nodes of a graph.

Every rival that changes the weights is written once, in terms of the methods that the two classes here share:

    softmax, log_probs     over the entries of a row
    total                  Σ over the row, for each of its entries
    largest                1 at the largest entry of the row, 0 elsewhere
    by_query               Σ over the row and over heads: one number per query
    weigh                  O = W V
    reduce                 the KL of an example from that of its entries (`kl_reduction`)
    exponential, normal    noise for every entry; `keep`: factors of dropout

Entries that a mask closes have weight 0; a row without any entry is 0 throughout.
"""

import math
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from bayesattn import noise
from bayesattn.functional import Edges
from bayesattn.functional.parts import Allowed, masked_softmax, weighted_values
from bayesattn.noise import keyed
from bayesattn.precision import upcast
from bayesattn_recipes.baselines import categorical


@dataclass(frozen=True, eq=False)
class DenseRows:
    """The last axis of `b h m n` or `b m n` scores.

    Attributes:
        mask: True where a query may attend, with the axes of the scores; None everywhere.
        shape: Shape of the scores.
    """

    mask: Bool[Tensor, "..."] | None
    shape: torch.Size

    @classmethod
    def of(cls, scores: Float[Tensor, "*bh m n"], mask: Bool[Tensor, "..."] | None) -> "DenseRows":
        """Return the rows of some scores, with a mask that broadcasts to them."""
        return cls(None if mask is None else mask.expand(scores.shape), scores.shape)

    def softmax(self, scores: Float[Tensor, "*bh m n"]) -> Float[Tensor, "*bh m n"]:
        """Return exp of the scores over its sum in the row."""
        return masked_softmax(scores, self.mask)

    def log_probs(self, scores: Float[Tensor, "*bh m n"]) -> Float[Tensor, "*bh m n"]:
        """Return the logarithm of `softmax`; −inf where an entry is closed."""
        return categorical.log_probs(scores, self.mask)

    def opened(self, x: Float[Tensor, "*bh m n"]) -> Float[Tensor, "*bh m n"]:
        """Return x with 0 where the mask closes an entry."""
        return x if self.mask is None else x.masked_fill(~self.mask, 0.0)

    def total(self, x: Float[Tensor, "*bh m n"]) -> Float[Tensor, "*bh m 1"]:
        """Return the sum of its row for every entry; closed entries have to be 0."""
        return x.sum(dim=-1, keepdim=True)

    def largest(self, x: Float[Tensor, "*bh m n"]) -> Float[Tensor, "*bh m n"]:
        """Return 1 at the largest entry of every row, 0 elsewhere."""
        return self.opened(torch.zeros_like(x).scatter_(-1, x.argmax(dim=-1, keepdim=True), 1.0))

    def by_query(self, x: Float[Tensor, "*bh m n"]) -> Float[Tensor, "b m"]:
        """Return the sum over a row's entries and over heads, for every query."""
        sums = x.sum(dim=-1)
        return sums.sum(dim=1) if sums.ndim == 3 else sums

    def weigh(self, weights: Float[Tensor, "b h m n"], value: Float[Tensor, "b hk n d"]) -> Float[Tensor, "b h m d"]:
        """Return O = W V."""
        return weighted_values(weights, value)

    @property
    def has_entry(self) -> Bool[Tensor, "..."] | None:
        """Which queries have an entry at all, to broadcast over features; None if all."""
        return None if self.mask is None else self.mask.any(dim=-1, keepdim=True)

    def reduce(self, kl: Float[Tensor, "b *rest"], reduction: str | None, *, by_row: bool = False) -> Float[Tensor, " b"]:
        """Return the KL of each example from that of every entry or, with `by_row`, of every feature of a row."""
        total = kl.flatten(1).sum(dim=1)
        if reduction == "sum":
            return total
        b, m, n = self.shape[0], *self.shape[-2:]
        mask = None if self.mask is None else self.mask.reshape(b, -1, m, n)
        allowed = Allowed(mask, False, (b, math.prod(self.shape[1:-2]), m, n))
        if by_row and reduction == "mean":
            return total / (allowed.count(per_entry=False) * kl.shape[-1])
        return total / allowed.count(per_entry=reduction == "mean")

    def exponential(self, like: Float[Tensor, "b *rest"]) -> Float[Tensor, "b *rest"]:
        """Draw E ~ Exp(1) for the entries of an array; inside `keyed_noise` they belong to the examples."""
        return self._draw(noise.exponential, like)

    def normal(self, like: Float[Tensor, "b *rest"]) -> Float[Tensor, "b *rest"]:
        """Draw ε ~ N(0, 1) in the same way."""
        return self._draw(noise.normal, like)

    def keep(self, like: Float[Tensor, "b *rest"], p: float) -> Float[Tensor, "b *rest"]:
        """Draw the factors of dropout: 0 with probability p, else 1/(1 − p)."""
        return F.dropout(torch.ones_like(like), p)

    def _draw(self, draw, like: Tensor) -> Tensor:
        shape = (like.shape[0], math.prod(like.shape[1:-2]), *like.shape[-2:])
        seed = keyed.next_seeds(like.shape[0], like.device)
        return draw(seed, shape, device=like.device, dtype=like.dtype).view(like.shape)


@dataclass(frozen=True, eq=False)
class EdgeRows:
    """The edges into each node; scores are `e h`. A graph is one example.

    Attributes:
        edges: The graph.
        ops: `ops.segment.plain`, or `csr` for sorted edges on a CPU.
    """

    edges: Edges
    ops: ModuleType

    def softmax(self, scores: Float[Tensor, "e h"]) -> Float[Tensor, "e h"]:
        """Return exp of the scores over its sum in the row."""
        return self.ops.softmax(scores, self.edges)

    def log_probs(self, scores: Float[Tensor, "e h"]) -> Float[Tensor, "e h"]:
        """Return the logarithm of `softmax`; −inf where an entry is closed."""
        return scores - self.ops.lift_target(self.ops.logsumexp(scores, self.edges), self.edges)

    def opened(self, x: Float[Tensor, "e h"]) -> Float[Tensor, "e h"]:
        """Return x: every edge exists."""
        return x

    def total(self, x: Float[Tensor, "e h"]) -> Float[Tensor, "e h"]:
        """Return the sum of its row for every entry; closed entries have to be 0."""
        return self.ops.lift_target(self.ops.sum_by_target(x, self.edges), self.edges)

    def largest(self, x: Float[Tensor, "e h"]) -> Float[Tensor, "e h"]:
        """Return 1 at the largest entry of every row, 0 elsewhere."""
        index = self.edges.target[:, None].expand_as(x)
        rows = x.new_zeros(self.edges.num_targets, x.shape[1])
        largest = rows.scatter_reduce(0, index, x, "amax", include_self=False).gather(0, index)
        # of equal entries, take the first: 16-bit draws can tie
        place = torch.arange(len(x), device=x.device)[:, None].expand_as(x)
        tied = place.masked_fill(x < largest, len(x))
        first = place.new_full(rows.shape, len(x)).scatter_reduce(0, index, tied, "amin")
        return (place == first.gather(0, index)).to(x.dtype)

    def by_query(self, x: Float[Tensor, "e h"]) -> Float[Tensor, "1 r"]:
        """Return the sum over a row's entries and over heads, for every query."""
        return self.ops.sum_by_target(x, self.edges).sum(dim=1).unsqueeze(0)

    def weigh(self, weights: Float[Tensor, "e h"], value: Float[Tensor, "n h d"]) -> Float[Tensor, "r h d"]:
        """Return O = W V."""
        return self.ops.weighted_sum(weights, upcast(value).to(weights.dtype), self.edges).to(value.dtype)

    @property
    def has_entry(self) -> Bool[Tensor, "r 1 1"]:
        """Which nodes have an edge at all."""
        return (self.edges.degree > 0)[:, None, None]

    def reduce(self, kl: Float[Tensor, "x h *d"], reduction: str | None, *, by_row: bool = False) -> Float[Tensor, " 1"]:
        """Return the KL of the graph; arguments as for `DenseRows.reduce`."""
        total, heads = kl.sum().view(1), kl.shape[1]
        if reduction == "sum":
            return total
        if reduction == "mean" and not by_row:
            return total / (max(len(self.edges), 1) * heads)
        rows = self.edges.num_rows.clamp(min=1) * heads
        return total / (rows * kl.shape[-1] if reduction == "mean" else rows)

    def exponential(self, like: Float[Tensor, "x *rest"]) -> Float[Tensor, "x *rest"]:
        """Draw E ~ Exp(1) for the entries of an array."""
        return self._draw(noise.exponential, like)

    def normal(self, like: Float[Tensor, "x *rest"]) -> Float[Tensor, "x *rest"]:
        """Draw ε ~ N(0, 1) in the same way."""
        return self._draw(noise.normal, like)

    def keep(self, like: Float[Tensor, "x *rest"], p: float) -> Float[Tensor, "x *rest"]:
        """Draw the factors of dropout: 0 with probability p, else 1/(1 − p)."""
        return torch.empty_like(like).bernoulli_(1.0 - p).div_(1.0 - p)

    def _draw(self, draw, like: Tensor) -> Tensor:
        # a graph is one example
        seed = keyed.next_seeds(1, like.device)
        shape = (1, 1, len(like), like[:1].numel())
        return draw(seed, shape, device=like.device, dtype=like.dtype).view(like.shape)


Rows = DenseRows | EdgeRows
