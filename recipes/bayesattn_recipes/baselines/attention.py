"""The rivals in attention of many heads and layers: objects that replace softmax and average in a module.

`nn.MultiheadAttention`, converted models of torch and transformers and the layers of `bayesattn.integrations.pyg` take it as
`weights=` (`bayesattn/nn/custom_weights.py`). There is no fused kernel for any rival.

    bayesianize(model, **attention_options(AttentionChoice("hard-gumbel")))
"""

from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from bayesattn.config import AttentionConfig
from bayesattn.entropy import is_observing_entropy, note_entropy
from bayesattn.functional import EdgeAttention, Edges
from bayesattn.functional.parts import expand_heads
from bayesattn.nn import BayesianModule
from bayesattn.precision import upcast, without_autocast
from bayesattn_recipes.baselines.config import AttentionChoice
from bayesattn_recipes.baselines.gaussian import GaussianContext
from bayesattn_recipes.baselines.module import RivalWeights
from bayesattn_recipes.baselines.rows import DenseRows, EdgeRows, Rows
from bayesattn_recipes.baselines.sampled_kl import SampledKLWeights
from bayesattn_recipes.baselines.weights import build_weights


def attention_options(config: AttentionConfig, *, on_edges: bool = False) -> dict[str, Any]:
    """Return the arguments of attention modules and `bayesianize` for a config: `config` or `weights`.

    Args:
        config: Soft, Bayesian or a rival.
        on_edges: Whether the attention runs on the edges of a graph.

    Raises:
        ValueError: The variant does not exist for attention of many heads and layers, or on edges.
    """
    if not isinstance(config, AttentionChoice):
        return {"config": config}
    config.check_layers(on_edges=on_edges)
    return {"weights": partial(RivalAttention, config)} if config.is_rival else {"config": config}


class RivalAttention(nn.Module):
    """Compute the output from scores and values as a rival of Bayesian attention does.

    KLs are returned, not recorded: the parent module records them under its own name. The parent also sets the dropout of
    the weights, as for Bayesian attention, except that `mc-dropout` has its own rate.

    Args:
        config: One whose `is_rival` is true.
        head_dim: Features of a key and of a value of one head; needed for contextual priors and noisy contexts.
        num_heads: Heads of the keys.
    """

    def __init__(
        self,
        config: AttentionChoice,
        *,
        head_dim: int | None,
        num_heads: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        config.check_layers()
        self.config = config
        self.name, self.has_kl, self.kl_reduction = config.variant, config.has_kl, config.kl_reduction
        self.has_own_dropout = config.variant == "mc-dropout"
        self.runs_on_edges = not config.sampled_kl
        self.weights = self.context_noise = None
        if config.variant == "gaussian-context":
            if head_dim is None:
                raise ValueError(
                    f"head_dim must be the number of features of one head's values for {config.variant}, got None"
                )
            # one network for all heads, like that of a contextual prior; in the dtype of the values it reads
            self.context_noise = GaussianContext(config, head_dim).to(dtype=dtype)
        else:
            self.weights = build_weights(config, key_dim=head_dim, num_heads=num_heads)
        self.to(device=device)

    def settings(self) -> dict[str, Any]:
        """Return the config as plain values."""
        return self.config.to_dict()

    @property
    def is_idle(self) -> bool:
        """Whether the next call is soft attention: nothing is drawn and no KL computed."""
        return self.drawn.is_idle

    @property
    def drawn(self) -> BayesianModule:
        """The part whose output is drawn: the weights, or the context."""
        part: BayesianModule | None = self.weights if self.context_noise is None else self.context_noise
        assert part is not None
        return part

    def forward(
        self,
        scores: Float[Tensor, "b h m n"],
        key: Float[Tensor, "b hk n d"],
        value: Float[Tensor, "b hk n dv"],
        *,
        mask: Bool[Tensor, "..."] | None,
        dropout_p: float,
    ) -> tuple[Float[Tensor, "b h m dv"], Float[Tensor, "b h m n"], Float[Tensor, " b"] | None]:
        """Return output, weights before dropout and, if it is recorded, the KL of each example.

        Args:
            scores: Φ, with any bias added.
            key: Read by a contextual prior.
            value: The values to average; groups of score heads share a key head.
            mask: True where a query may attend, broadcastable to the scores.
            dropout_p: Dropout rate of the weights.
        """
        with without_autocast(scores.device.type):
            scores = upcast(scores)
            rows = DenseRows.of(scores, mask)
            if is_observing_entropy():
                note_entropy(rows.softmax(scores.detach()), rows.mask)
            if isinstance(self.weights, SampledKLWeights):
                # a key counts if any head that shares it may attend to it
                heads = key.shape[1]
                valid = None if rows.mask is None else rows.mask.any(dim=-2).unflatten(1, (heads, -1)).any(dim=2)
                log_prior = self.weights.log_prior(upcast(key), valid)
                log_prior = None if log_prior is None else expand_heads(log_prior, scores.shape[1])
                weights, kl = self.weights.draw(scores, log_prior=log_prior, mask=rows.mask)
                return rows.weigh(F.dropout(weights, dropout_p), value), weights.to(value.dtype), kl
            output, weights, _, kl = self._attend(scores, value, rows, dropout_p)
            return output, weights.to(value.dtype), kl

    def on_edges(
        self,
        scores: Float[Tensor, "e h"],
        value: Float[Tensor, "n h d"],
        edges: Edges,
        ops: ModuleType,
        *,
        dropout_p: float,
    ) -> EdgeAttention:
        """Return the same for the edges of a graph.

        Args:
            scores: Φ of every edge.
            value: Features of the sources.
            edges: The graph.
            ops: `ops.segment.plain`, or `csr`.
            dropout_p: Dropout rate of the weights.
        """
        with without_autocast(scores.device.type):
            output, weights, dropped, kl = self._attend(upcast(scores), value, EdgeRows(edges, ops), dropout_p)
            return EdgeAttention(output, weights, dropped, kl)

    def edge_weights(self, scores: Float[Tensor, "e h"], edges: Edges, ops: ModuleType) -> Float[Tensor, "e h"]:
        """Return the weights of edges alone, before dropout; arguments as for `on_edges`."""
        with without_autocast(scores.device.type):
            return self._weights(upcast(scores), EdgeRows(edges, ops))[0]

    def _attend(
        self, scores: Tensor, value: Tensor, rows: Rows, dropout_p: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        weights, kl = self._weights(scores, rows)
        dropped = weights if self.has_own_dropout or dropout_p == 0.0 else F.dropout(weights, dropout_p)
        output = rows.weigh(dropped, value)
        if self.context_noise is not None and not self.context_noise.is_idle:
            output, entries = self.context_noise.draw(
                output, rows, lambda: rows.weigh(rows.softmax(torch.zeros_like(scores)), value)
            )
            kl = None if entries is None else rows.reduce(entries, self.config.kl_reduction, by_row=True)
        return output, weights, dropped, kl

    def _weights(self, scores: Tensor, rows: Rows) -> tuple[Tensor, Tensor | None]:
        if self.weights is None:
            return rows.softmax(scores), None
        assert isinstance(self.weights, RivalWeights)
        return self.weights.draw(scores, rows)
