"""A small transformer over image patches; its attention is an argument, so soft and Bayesian variants are the same code."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bayesattn.nn import MultiheadAttention, TransformerEncoderLayer
from bayesattn_recipes.baselines import attention_options
from bayesattn_recipes.digits.config import DigitsConfig
from bayesattn_recipes.digits.data import GRID, LOOKS

NUM_PATCHES = GRID**2


class DigitClassifier(nn.Module):
    """Read an image as 16 patches behind a readout token, and classify from that token."""

    def __init__(self, config: DigitsConfig) -> None:
        super().__init__()
        look, width = LOOKS[config.dataset], config.width
        self.patch = look.patch
        self.embed = nn.Linear(look.channels * look.patch**2, width)
        self.readout = nn.Parameter(torch.zeros(width))
        self.position = nn.Parameter(0.1 * torch.randn(1 + NUM_PATCHES, width))
        self.layers = nn.ModuleList(
            TransformerEncoderLayer(
                width,
                config.num_heads,
                2 * width,
                config.dropout,
                batch_first=True,
                norm_first=True,
                **attention_options(config.attention),
            )
            for _ in range(config.num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(look.class_names))

    def forward(self, images: Float[Tensor, "b side side *channels"]) -> Float[Tensor, "b c"]:
        """Return class logits."""
        patches = images.unfold(1, self.patch, self.patch).unfold(2, self.patch, self.patch).flatten(3).flatten(1, 2)
        tokens = torch.cat([self.readout.expand(len(images), 1, -1), self.embed(patches)], dim=1) + self.position
        for layer in self.layers:
            tokens = layer(tokens)
        return self.head(self.norm(tokens[:, 0]))

    @property
    def last_attention(self) -> MultiheadAttention:
        """The attention module of the last layer."""
        attention = self.layers[-1].self_attn
        assert isinstance(attention, MultiheadAttention)
        return attention
