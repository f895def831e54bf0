"""The config that decides a run of the digits recipe."""

from dataclasses import field
from typing import Annotated

from pydantic import Field

from bayesattn_recipes.baselines import AttentionChoice
from bayesattn_recipes.common.config import Count, NotNegative, Positive, Seed, Share, config_class
from bayesattn_recipes.common.experiment import TrainingConfig
from bayesattn_recipes.digits.data import DatasetName


@config_class
class DigitsConfig:
    """Everything that decides a run; with the same values it repeats exactly on the same machine.

    Args:
        dataset: `digits`, or generated `shapes`.
        attention: Soft or Bayesian attention in every layer, or a rival of it (docs/recipes/rivals.md).
        training: Epochs, batch size, KL schedule.
        seed: Initialization, batch order, dropout and attention noise.
        train_size: Training images, 20 to 400.
        width: Features of a token.
        num_heads: Attention heads.
        num_layers: Encoder layers.
        dropout: Dropout rate wherever the stock encoder layer has it, attention weights included.
        learning_rate: Peak of a one-cycle schedule.
        weight_decay: AdamW's.
    """

    dataset: DatasetName = "digits"
    attention: AttentionChoice = field(default_factory=lambda: AttentionChoice("soft"))
    training: TrainingConfig = field(default_factory=lambda: TrainingConfig(epochs=100, batch_size=50))
    seed: Seed = 0
    train_size: Annotated[int, Field(ge=20, le=400)] = 200
    width: Count = 32
    num_heads: Count = 4
    num_layers: Count = 1
    dropout: Share = 0.1
    learning_rate: Positive = 5e-3
    weight_decay: NotNegative = 1e-2

    def __post_init__(self) -> None:
        self.attention.check_layers()
