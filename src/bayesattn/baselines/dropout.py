"""MC dropout (Gal and Ghahramani, 2016): soft attention with dropout on its weights, kept on when predicting."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from bayesattn.baselines._base import RivalWeights
from bayesattn.baselines.config import AttentionChoice
from bayesattn.baselines.hard import valid_keys
from bayesattn.ops.attention.masking import masked_softmax


class DropoutWeights(RivalWeights):
    """softmax(Φ) with dropout in training and inside `sampling(model, dropout=True)`, which also wakes all other dropout.

    Args:
        config: Of variant `mc-dropout`; its `attention_dropout` is used.
    """

    def __init__(self, config: AttentionChoice) -> None:
        super().__init__(config, "mc-dropout")

    def forward(
        self, scores: Float[Tensor, "*bh m n"], keys=None, *, mask: Bool[Tensor, "..."] | None = None, prior: None = None
    ) -> Float[Tensor, "*bh m n"]:
        """Return softmax(scores), with dropout where it is on."""
        full = scores.to(torch.promote_types(scores.dtype, torch.float32))
        weights = masked_softmax(full, valid_keys(mask, scores))
        p = self._dropout(self.config.attention_dropout)
        return (F.dropout(weights, p) if p else weights).to(scores.dtype)
