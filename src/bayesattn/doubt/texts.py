"""Texts for a classifier with a tokenizer: how they are checked and where they are cut."""

from typing import Any

from torch import nn

# the limit where neither tokenizer nor model has one
DEFAULT_LIMIT = 512


def check_texts(name: str, texts: Any) -> None:
    """Raise on a single string, whose characters would each be taken for a text."""
    if isinstance(texts, str):
        shown = repr(texts if len(texts) <= 40 else f"{texts[:40]}…")
        raise ValueError(
            f"{name} must be a list of texts or of pairs of texts, got the string {shown}. For one text give [text]"
        )


def token_limit(model: nn.Module, tokenizer: Any) -> int:
    """Return the most tokens that tokenizer and model allow."""
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    # RoBERTa and its kin count positions from the padding token's, which itself is not used
    offsets = [
        part.padding_idx + 1
        for name, part in model.named_modules()
        if name.endswith("position_embeddings") and isinstance(part, nn.Embedding) and part.padding_idx is not None
    ]
    limits = (tokenizer.model_max_length, positions and positions - max(offsets, default=0))
    # transformers' tokenizers without a limit say 10^30
    return min((limit for limit in limits if limit and limit < 1e20), default=DEFAULT_LIMIT)
