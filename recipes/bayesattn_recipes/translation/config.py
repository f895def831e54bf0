"""The config that decides a run of the translation recipe."""

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field

from bayesattn_recipes.baselines import AttentionChoice
from bayesattn_recipes.common.config import Count, Positive, Seed, Share, config_class
from bayesattn_recipes.common.experiment import TrainingConfig


@config_class
class TranslationConfig:
    """Everything that decides a run.

    Args:
        dataset: `multi30k`, `tatoeba` or `iwslt14`.
        attention: Soft, Bayesian, or a rival.
        training: Epochs, KL schedule, clipping, precision; `batch_size` is not used, see `batch_tokens`.
        seed: Initialization, batch order, dropout and attention noise.
        train_size: Training pairs, the first ones; null takes all.
        vocabulary_size: Tokens of the joint byte-pair encoding.
        lowercase: Whether to lower-case all text.
        max_tokens: Training pairs with a longer side are left out, and longer sentences refused.
        batch_tokens: Target (and source) tokens of a batch, padding included.
        pad_to: Above 1, few shapes of batches (`batches.py`); for recorded graphs.
        embedding_dim: Features of a token.
        encoder_dim: Features of each direction of the encoder.
        decoder_dim: Features of a decoder layer.
        attention_dim: Width of the attention's tanh layer.
        num_layers: Layers of encoder and decoder.
        dropout: On embeddings, between layers and before the output.
        learning_rate: Adam's peak rate, reached after `warmup` and falling to 0 along a cosine.
        warmup: Share of the steps in which the learning rate rises.
        decoder_mode: How the decoder's loop runs in training (`graphs.py`).
    """

    dataset: str = "multi30k"
    attention: AttentionChoice = field(default_factory=lambda: AttentionChoice("soft"))
    training: TrainingConfig = field(default_factory=lambda: TrainingConfig(epochs=30, clip_norm=5.0))
    seed: Seed = 0
    train_size: Count | None = None
    vocabulary_size: Annotated[int, Field(ge=5)] = 10_000
    lowercase: bool = False
    max_tokens: Count = 125
    batch_tokens: Count = 4096
    pad_to: Count = 1
    embedding_dim: Count = 512
    encoder_dim: Count = 512
    decoder_dim: Count = 768
    attention_dim: Count = 512
    num_layers: Count = 2
    dropout: Share = 0.3
    learning_rate: Positive = 1e-3
    warmup: Share = 0.05
    decoder_mode: Literal["eager", "compile", "cuda-graph", "auto"] = "eager"
