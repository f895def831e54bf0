"""MCAN (Yu et al., 2019): question and image attend to themselves, then the image to the question. Attention is an argument.

    words → embedding → LSTM → SA × L    self-attention and feed-forward: torch's encoder layer
    regions → linear → SGA × L           self-attention, attention guided by the question, feed-forward: its decoder layer
    both → attentional reduction → sum → norm → one logit per answer, read through a sigmoid

so BAM replaces 3 L attention maps: 18 in both sizes of the paper. The two reductions stay soft, as in the paper.
"""

from typing import Annotated

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor, nn

from bayesattn.config import AttentionConfig
from bayesattn.functional.parts import masked_softmax
from bayesattn.nn import MultiheadAttention, TransformerDecoderLayer, TransformerEncoderLayer
from bayesattn_recipes.baselines import attention_options
from bayesattn_recipes.common.config import Count, Share, config_class
from bayesattn_recipes.vqa.vocabulary import PADDING, Vocabulary


@config_class
class MCANSize:
    """Sizes of the model; the defaults are the paper's small one, `large` doubles width, feed-forward and fused width.

    Args:
        width: Features of a word or region inside the model.
        num_heads: Attention heads.
        num_layers: SA and SGA layers each.
        feedforward_dim: Hidden features of the feed-forward networks.
        word_dim: Features of a word embedding.
        reduction_dim: Hidden features of the attentional reduction.
        fused_dim: Features of the question and image together.
        dropout: Dropout rate everywhere except on attention weights.
        attention_dropout: Dropout rate on attention weights; upstream MCAN has 0.1, the authors' Bayesian runs none.
        grid_cells: Cells of a grid of features, each with a learned vector for its place, which questions about left and
            right need; 0: regions without a place, as in MCAN, whose boxes overlap.
    """

    width: Count = 512
    num_heads: Count = 8
    num_layers: Count = 6
    feedforward_dim: Count = 2048
    word_dim: Count = 300
    reduction_dim: Count = 512
    fused_dim: Count = 1024
    dropout: Share = 0.1
    attention_dropout: Share = 0.0
    grid_cells: Annotated[int, Field(ge=0)] = 0

    def __post_init__(self) -> None:
        if self.width % self.num_heads:
            raise ValueError(f"num_heads must divide width {self.width}, got {self.num_heads!r}")


class AttentionalReduction(nn.Module):
    """One vector from many: softmax over a small network's scores, weighted sum, projection.

    Args:
        size: The model's sizes.
    """

    def __init__(self, size: MCANSize) -> None:
        super().__init__()
        self.hidden = nn.Linear(size.width, size.reduction_dim)
        self.dropout = nn.Dropout(size.dropout)
        self.score = nn.Linear(size.reduction_dim, 1)
        self.merge = nn.Linear(size.width, size.fused_dim)

    def forward(
        self, values: Float[Tensor, "b n d"], mask: Bool[Tensor, "b n"]
    ) -> tuple[Float[Tensor, "b f"], Float[Tensor, "b n"]]:
        """Return the vector and the weights behind it."""
        scores = self.score(self.dropout(torch.relu(self.hidden(values)))).squeeze(-1)
        weights = masked_softmax(scores.float()[:, None], mask[:, None])[:, 0].to(values.dtype)
        return self.merge((weights[:, None] @ values).squeeze(1)), weights


class MCAN(nn.Module):
    """Answer questions about the regions of an image.

    Args:
        attention: Soft or Bayesian attention, for every SA and SGA layer.
        vocabulary: Words and answers; kept in the checkpoint as bytes.
        region_dim: Features of a region.
        size: Sizes.
        feature_scale: Factor applied to the features first; 1 leaves them as they are.
    """

    vocabulary_bytes: Tensor
    feature_scale: Tensor

    def __init__(
        self,
        attention: AttentionConfig,
        vocabulary: Vocabulary,
        *,
        region_dim: int,
        size: MCANSize | None = None,
        feature_scale: float = 1.0,
    ) -> None:
        super().__init__()
        size = MCANSize() if size is None else size
        self.size, self.vocabulary = size, vocabulary
        self.embedding = nn.Embedding(len(vocabulary.words), size.word_dim, padding_idx=PADDING)
        self.lstm = nn.LSTM(size.word_dim, size.width, batch_first=True)
        self.region_proj = nn.Linear(region_dim, size.width)
        self.place = nn.Parameter(0.1 * torch.randn(size.grid_cells, size.width)) if size.grid_cells else None
        options = {"dropout": size.dropout, "batch_first": True, **attention_options(attention)}
        sizes = (size.width, size.num_heads, size.feedforward_dim)
        self.question_layers = nn.ModuleList(TransformerEncoderLayer(*sizes, **options) for _ in range(size.num_layers))
        self.image_layers = nn.ModuleList(TransformerDecoderLayer(*sizes, **options) for _ in range(size.num_layers))
        for module in self.modules():
            if isinstance(module, MultiheadAttention):
                module.dropout = size.attention_dropout
        self.question_reduction = AttentionalReduction(size)
        self.image_reduction = AttentionalReduction(size)
        self.norm = nn.LayerNorm(size.fused_dim)
        self.head = nn.Linear(size.fused_dim, len(vocabulary.answers))
        self.register_buffer("vocabulary_bytes", vocabulary.to_tensor())
        self.register_buffer("feature_scale", torch.tensor(feature_scale))

    def forward(
        self,
        words: Int[Tensor, "b t"],
        word_mask: Bool[Tensor, "b t"],
        regions: Float[Tensor, "b r d"],
        region_mask: Bool[Tensor, "b r"],
    ) -> Float[Tensor, "b c"]:
        """Return one logit per answer.

        Args:
            words: Indices of the vocabulary, padded at the end.
            word_mask: True where there is a word.
            regions: Features; values where `region_mask` is False have no effect.
            region_mask: True where there is a region.
        """
        question, _ = self.lstm(self.embedding(words))
        # padding is cleared as well as masked: as a query, it would carry its noise into the KL
        regions = torch.where(region_mask[..., None], regions, 0.0) * self.feature_scale
        image = self.region_proj(regions)
        if self.place is not None:
            if len(self.place) != regions.shape[1]:
                raise ValueError(f"regions must have grid_cells = {len(self.place)} regions, got {regions.shape[1]}")
            image = image + self.place
        no_word, no_region = ~word_mask, ~region_mask
        for layer in self.question_layers:
            question = layer(question, src_key_padding_mask=no_word)
        for layer in self.image_layers:
            image = layer(image, question, tgt_key_padding_mask=no_region, memory_key_padding_mask=no_word)
        fused = self.question_reduction(question, word_mask)[0] + self.image_reduction(image, region_mask)[0]
        return self.head(self.norm(fused))

    @property
    def region_attention(self) -> MultiheadAttention:
        """The attention of the last layer over the regions: the one whose maps are shown."""
        attention = self.image_layers[-1].self_attn
        assert isinstance(attention, MultiheadAttention)
        return attention
