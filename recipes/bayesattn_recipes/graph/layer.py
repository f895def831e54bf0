"""A layer of graph attention as the paper has it (App. B.1), for one run or for many runs side by side.

    h_j = W x_j          e = (j → i)     Φ_e = LeakyReLU(a₁·h_i + b₁ + a₂·h_j + b₂)     o_i = Σ_e W_e h_j + b

Dropout in three places: on the layer's input, for every head anew; on the normalised weights; on the h_j that are averaged,
not on those that scores and prior see. PyG's GATConv has neither the score biases nor dropout per head: hence this one.

A copy is a group of heads that no other copy reads. Every parameter has the heads of all copies on its first axis; copy c
draws from its own generator what a run alone would draw from torch's.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from bayesattn import noise
from bayesattn.config import AttentionConfig
from bayesattn.functional import PriorScope
from bayesattn.nn import BayesianModule
from bayesattn.ops.segment import csr, plain, reference
from bayesattn.ops.segment.edges import Edges
from bayesattn.precision import without_autocast
from bayesattn_recipes.baselines import attention_options
from bayesattn_recipes.graph.features import SparseFeatures
from bayesattn_recipes.graph.inputs import Batch

NEGATIVE_SLOPE = 0.2


@dataclass(frozen=True)
class CopySettings:
    """What one copy may have to itself.

    Attributes:
        attention: Noise and prior; variant, conventions and the prior's network are those of all copies.
        dropout: In all three places.
        kl_weight: Factor of its KL.
    """

    attention: AttentionConfig
    dropout: float
    kl_weight: float = 1.0

    @property
    def threshold(self) -> int:
        """Dropout as a multiple of 2^-16."""
        return round(self.dropout * 2**16)


class GraphAttentionLayer(BayesianModule):
    """Graph attention with score biases and GAT's three dropouts; a rival (docs/baselines.md) runs in one copy alone.

    Args:
        in_dim: Features of a node.
        head_dim: Features of a head.
        num_heads: Heads of one copy.
        config: Soft or Bayesian attention; a contextual prior has one network per head.
        dropout: In all three places.
        num_copies: Networks side by side.
        prior_scope: Over which nodes a contextual prior sums to one: the whole graph, or the neighbours of each node.
        kl_share: Factor of the recorded KL.
    """

    on_edges = True

    def __init__(
        self,
        in_dim: int,
        head_dim: int,
        num_heads: int,
        config: AttentionConfig,
        *,
        dropout: float,
        num_copies: int = 1,
        prior_scope: PriorScope = "graph",
        kl_share: float = 1.0,
    ) -> None:
        super().__init__()
        options = attention_options(config, on_edges=True)
        if "weights" in options and num_copies > 1:
            raise ValueError(f"num_copies is {num_copies}; allowed for {config.variant}: 1")
        if "config" in options and config.prior_kind == "contextual" and not config.prior_per_head:
            raise ValueError("prior_per_head is False; allowed in the graph recipe: True, as in the authors' graph code")
        heads = num_copies * num_heads
        self.num_heads, self.num_copies = num_heads, num_copies
        self.prior_scope: PriorScope = prior_scope
        self.kl_share = kl_share
        # only a switch and a number: `sampling(model, dropout=True)` finds it, and `_drop` draws for each copy
        self.dropout = nn.Dropout(dropout)
        self.weight = nn.Parameter(torch.empty(heads, in_dim, head_dim))
        self.score_source = nn.Parameter(torch.empty(heads, head_dim))
        self.score_target = nn.Parameter(torch.empty(heads, head_dim))
        # only their sum matters; two, because the paper counts two
        self.score_bias = nn.Parameter(torch.zeros(heads, 2))
        self.bias = nn.Parameter(torch.zeros(heads, head_dim))
        # Glorot, head by head
        for parameter, fans in (
            (self.weight, in_dim + head_dim),
            (self.score_source, head_dim + 1),
            (self.score_target, head_dim + 1),
        ):
            nn.init.uniform_(parameter, -math.sqrt(6.0 / fans), math.sqrt(6.0 / fans))
        self.init_bayesian(**options, key_dim=head_dim, num_heads=heads)
        # where each copy, or all of them together, draw from; None is torch's own generator
        self.generators: list[torch.Generator | None] = [None] * num_copies
        # None: all copies are as the arguments say
        self.settings: list[CopySettings] | None = None
        self._of_heads: dict[tuple[str, torch.device], Tensor] = {}

    def forward(
        self, x: SparseFeatures | Float[Tensor, "n c f"], edges: Edges, batch: tuple[Batch, Edges] | None = None
    ) -> Float[Tensor, "r g d"]:
        """Return the heads' outputs at the targets.

        Args:
            x: Features of the sources, the same for all copies if sparse.
            edges: Sorted edges.
            batch: Whose KL counts, and their edges, the first of `edges`; None for all.
        """
        projected = self._project(x)
        scores = self._scores(projected, edges)
        if self.bayes_weights is not None:
            return self._rival(scores, self._drop(projected), edges)
        weights = self._drop(self._weights(scores, edges))
        # on a GPU, too: `plain` would store and scatter a message of all heads' features for every edge
        output = csr.weighted_sum(weights, self._drop(projected), edges) + self.bias
        return self.record(output, self._kl(scores, projected, edges, batch) if self.needs_kl else None)

    def _rival(self, scores: Float[Tensor, "e g"], value: Float[Tensor, "n g d"], edges: Edges) -> Float[Tensor, "r g d"]:
        dropout_p = self.dropout.p if self.dropout.training else 0.0
        options = {"dropout_p": dropout_p, "generator": self.generators[0]}
        result = self.bayes_weights.on_edges(scores, value, edges, self._ops, **options)
        kl = None if result.kl is None else result.kl * self.kl_share
        return self.record(result.output + self.bias, kl)

    def weights(self, x: SparseFeatures | Float[Tensor, "n c f"], edges: Edges) -> Float[Tensor, "e g"]:
        """Return the attention weights alone: a draw while sampling, else the posterior mean."""
        return self._weights(self._scores(self._project(x), edges), edges)

    def log_prior(self, projected: Float[Tensor, "n g d"]) -> Float[Tensor, "n g"] | None:
        """Return ln Ψ of every node: a softmax over all nodes, each of which is a source."""
        if self.bayes_prior is None:
            return None
        return self.bayes_prior(projected.transpose(0, 1).unsqueeze(0))[0, :, 0].transpose(0, 1)

    @property
    def _ops(self) -> ModuleType:
        return csr if self.weight.device.type == "cpu" else plain

    def _project(self, x: SparseFeatures | Tensor) -> Float[Tensor, "n g d"]:
        """Return h of every node, from an input that every head drops anew."""
        if isinstance(x, SparseFeatures):
            values = x.values
            if self.dropout.training and self.dropout.p > 0.0:
                values = self._drop(values.expand(len(self.weight), -1), heads_first=True)
            return x.project(values, self.weight)
        x = x.repeat_interleave(self.num_heads, dim=1) if self.num_heads > 1 else x
        return torch.einsum("ngf,gfd->ngd", self._drop(x), self.weight)

    def _scores(self, projected: Float[Tensor, "n g d"], edges: Edges) -> Float[Tensor, "e g"]:
        of_source = (projected * self.score_source).sum(dim=-1) + self.score_bias[:, 0]
        of_target = (projected[: edges.num_targets] * self.score_target).sum(dim=-1) + self.score_bias[:, 1]
        scores = self._ops.lift_source(of_source, edges) + self._ops.lift_target(of_target, edges)
        return F.leaky_relu(scores, NEGATIVE_SLOPE)

    def _weights(self, scores: Float[Tensor, "e g"], edges: Edges) -> Float[Tensor, "e g"]:
        if self.bayes_weights is not None:
            return self.bayes_weights.edge_weights(scores, edges, self._ops, self.generators[0])
        return self._ops.softmax(scores + self._log_noise(scores) if self.is_sampling else scores, edges)

    def _log_noise(self, scores: Float[Tensor, "e g"]) -> Float[Tensor, "e g"]:
        shape = (1, 1, scores.shape[0], scores.shape[1] // len(self.generators))
        options = {"device": scores.device, "dtype": scores.dtype}
        configs = [self.config] * len(self.generators)
        if self.settings is not None and len(configs) == self.num_copies:
            configs = [settings.attention for settings in self.settings]
        elif self.settings is not None:
            # one draw for copies that differ: noise of size 1, and then each head's own
            configs = [replace(self.config, weibull_k=1.0, sigma_q=1.0)]
        parts = [noise.log_noise(None, shape, c, **options, generator=g)[0, 0] for c, g in zip(configs, self.generators)]
        drawn = torch.cat(parts, dim=1)
        if self.settings is None or len(configs) == self.num_copies:
            return drawn
        is_weibull = self.config.family == "weibull"
        sizes = [1.0 / s.attention.weibull_k if is_weibull else s.attention.sigma_q for s in self.settings]
        return drawn.mul_(self._per_head("noise", sizes, scores))

    def _drop(self, x: Float[Tensor, "a b *d"], *, heads_first: bool = False) -> Float[Tensor, "a b *d"]:
        """Drop entries with probability `dropout`, rounded to a multiple of 2^-16; each copy from its own generator."""
        settings = self.settings or [CopySettings(self.config, self.dropout.p)]
        thresholds = [one.threshold for one in settings]
        if not any(thresholds) or not self.dropout.training:
            return x
        axis = 0 if heads_first else 1
        keep = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        parts = keep.split(keep.shape[axis] // len(self.generators), dim=axis)
        view = [-1 if place == axis else 1 for place in range(x.ndim)]
        is_uniform = len(set(thresholds)) == 1
        for copy, (part, generator) in enumerate(zip(parts, self.generators)):
            # copy by copy, while what one pass wrote is still in the cache
            halves = noise.generator_halves((1, 1, 1, part.numel()), x.device, generator).view(part.shape)
            if is_uniform or len(parts) == self.num_copies:
                part.copy_(halves >= thresholds[0 if is_uniform else copy] - 2**15)
            else:
                part.copy_(halves >= self._per_head("threshold", [float(t - 2**15) for t in thresholds], x).view(view))
        scales = [1.0 / (1.0 - threshold * 2.0**-16) for threshold in thresholds]
        scale = scales[0] if is_uniform else self._per_head("scale", scales, x).view(view)
        # features are constants: their product needs no second array
        return x * keep.mul_(scale) if x.requires_grad else keep.mul_(x).mul_(scale)

    def _per_head(self, name: str, values: list[float], like: Tensor) -> Float[Tensor, " g"]:
        """Return a number per copy as one per head, on the device; made once."""
        key = (name, like.device)
        if key not in self._of_heads:
            self._of_heads[key] = torch.tensor(values, dtype=like.dtype, device=like.device).repeat_interleave(
                self.num_heads
            )
        return self._of_heads[key]

    def _kl(self, scores, projected, edges: Edges, batch: tuple[Batch, Edges] | None) -> Float[Tensor, " 1"]:
        """Return the KL of one copy and one example (the graph, or a node of a batch), averaged over the copies."""
        rows, entries, examples = edges.num_rows, len(edges), 1
        if batch is not None:
            # what the KL of the whole graph is divided by, and then by the nodes that share this estimate of it
            part, edges = batch
            scores = scores[: len(edges)]
            rows, entries, examples = part.whole_nodes, part.whole_edges, part.num_nodes
        count = {"sum": 1, "row_mean": rows, "mean": entries}[str(self.config.kl_reduction)]
        heads = 1 if self.config.kl_reduction == "sum" else self.num_heads
        parts = []
        with without_autocast(scores.device.type):
            log_prior = self.log_prior(projected)
            for config, first, last in self._alike():
                own = slice(first * self.num_heads, last * self.num_heads)
                prior = None if log_prior is None else log_prior[:, own]
                parts.append(reference.kl_by_head(scores[:, own], prior, edges, config, self.prior_scope, self._ops))
            total = torch.cat(parts)
            if self.settings is not None:
                total = total * self._per_head("KL", [one.kl_weight for one in self.settings], total)
            return total.sum().view(1) * self.kl_share / (count * heads * self.num_copies * examples)

    def _alike(self) -> Iterator[tuple[AttentionConfig, int, int]]:
        """Go through the runs of neighbouring copies with the same KL: config, first copy, the one after the last."""
        configs = [self.config] * self.num_copies if self.settings is None else [one.attention for one in self.settings]
        first = 0
        for config, run in itertools.groupby(configs):
            last = first + len(list(run))
            yield config, first, last
            first = last
