"""Additive (Bahdanau) attention as captioning and translation use it: one query per decoding step."""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from bayesattn.config import AttentionConfig
from bayesattn.nn.custom_weights import AttentionWeights, WeightsFactory, build_weights
from bayesattn.nn.module import checked_config
from bayesattn.nn.weights import BayesianWeights


class AdditiveAttention(nn.Module):
    """Attend with scores Φ = vᵀ tanh(W_q q + W_k k + b) and sampled weights.

    The key side does not change from step to step: project it once with `prepare`, then call the module at every step.
    Each call records its own KL, as the paper counts it.

    Args:
        query_dim: Features of a query.
        key_dim: Features of a key.
        hidden_dim: Width of the tanh layer.
        config: Variant, noise and prior. The contextual prior reads the keys.
        weights: Instead of a config, an object that replaces softmax and average (`nn/custom_weights.py`).
        bias: Whether the tanh layer has a bias.

    Example:
        >>> attention = AdditiveAttention(6, 8, 10, config=AttentionConfig("BAM-WC"))
        >>> query, key = torch.randn(2, 1, 6), torch.randn(2, 5, 8)  # one decoding step over five encoder states
        >>> context, weights = attention(query, key)
        >>> context.shape, weights.shape
        (torch.Size([2, 1, 8]), torch.Size([2, 1, 5]))
    """

    def __init__(
        self,
        query_dim: int,
        key_dim: int,
        hidden_dim: int,
        *,
        config: AttentionConfig | None = None,
        weights: AttentionWeights | WeightsFactory | None = None,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        options = {"device": device, "dtype": dtype}
        self.query_proj = nn.Linear(query_dim, hidden_dim, bias=False, **options)
        self.key_proj = nn.Linear(key_dim, hidden_dim, bias=bias, **options)
        self.score_proj = nn.Linear(hidden_dim, 1, bias=False, **options)
        self.weights = BayesianWeights(checked_config(config, weights), key_dim=key_dim, **options)
        self.bayes_weights: Any = build_weights(weights, head_dim=key_dim, num_heads=1, **options)

    def prepare(
        self, key: Float[Tensor, "b n dk"], mask: Bool[Tensor, "b n"] | None = None
    ) -> tuple[Float[Tensor, "b n d"], Float[Tensor, "b 1 1 n"] | None]:
        """Return the projected keys and, inside `record_kl()`, ln Ψ, which all steps share."""
        return self.key_proj(key), self.weights.log_prior(key, None if mask is None else mask[:, None])

    def scores(self, query: Float[Tensor, "b m dq"], keys: Float[Tensor, "b n d"]) -> Float[Tensor, "b m n"]:
        """Return Φ = vᵀ tanh(W_q q + W_k k + b) from keys that `prepare` has projected."""
        return self.score_proj(torch.tanh(self.query_proj(query).unsqueeze(2) + keys.unsqueeze(1))).squeeze(-1)

    def forward(
        self,
        query: Float[Tensor, "b m dq"],
        key: Float[Tensor, "b n dk"],
        value: Float[Tensor, "b n dv"] | None = None,
        *,
        mask: Bool[Tensor, "b n"] | None = None,
        prepared: tuple[Tensor, Tensor | None] | None = None,
    ) -> tuple[Float[Tensor, "b m dv"], Float[Tensor, "b m n"]]:
        """Return the context of each query and the weights.

        Args:
            query: Decoder states; one step has m = 1.
            key: Encoder states or image regions.
            value: What is averaged; the keys if None.
            mask: True for keys that exist.
            prepared: Result of `prepare(key, mask)`.
        """
        keys, log_prior = self.prepare(key, mask) if prepared is None else prepared
        return self.attend(self.scores(query, keys), key, value, mask=mask, log_prior=log_prior)

    def attend(
        self,
        scores: Float[Tensor, "b m n"],
        key: Float[Tensor, "b n dk"],
        value: Float[Tensor, "b n dv"] | None = None,
        *,
        mask: Bool[Tensor, "b n"] | None = None,
        log_prior: Float[Tensor, "b 1 1 n"] | None = None,
    ) -> tuple[Float[Tensor, "b m dv"], Float[Tensor, "b m n"]]:
        """Return context and weights from given scores; `log_prior` is that of `prepare`."""
        value = key if value is None else value
        if self.bayes_weights is not None:
            given = None if mask is None else mask[:, None, None, :]
            heads = (key.unsqueeze(1), value.unsqueeze(1))
            context, weights, kl = self.bayes_weights(scores.unsqueeze(1), *heads, mask=given, dropout_p=0.0)
            return self.weights.record(context, kl).squeeze(1), weights.squeeze(1)
        weights = self.weights(scores, mask=None if mask is None else mask[:, None, :], log_prior=log_prior)
        return weights @ value, weights
