"""Facts about a foreign attention module, read from its attributes: sizes of the heads, dropout rate."""

from typing import Any, NamedTuple

import torch
from torch import nn

# libraries name the same thing differently; the first attribute found counts
_HEAD_DIM = ("qk_head_dim", "head_dim", "attention_head_size", "key_value_proj_dim", "head_size", "dim_head")
_QUERY_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", *_QUERY_HEADS)
_WIDTH = ("all_head_size", "embed_dim", "hidden_size", "dim", "d_model", "n_embd")
_DROPOUT = ("attention_dropout", "attn_dropout", "dropout_prob", "dropout_p", "dropout")


class Sizes(NamedTuple):
    """The sizes to build a prior or custom weights with: width of a key, number of heads, device and dtype."""

    head_dim: int | None
    num_heads: int
    device: torch.device | None
    dtype: torch.dtype | None


def sizes(module: nn.Module, head_dim: int | None = None, num_heads: int | None = None) -> Sizes:
    """Return the sizes of a module, read from its attributes where they are not given, and from its first parameter."""
    like = next((p for p in module.parameters() if p.is_floating_point()), None)
    return Sizes(
        key_dim(module) if head_dim is None else head_dim,
        (num_key_heads(module) or 1) if num_heads is None else num_heads,
        None if like is None else like.device,
        None if like is None else like.dtype,
    )


def key_dim(module: nn.Module) -> int | None:
    """Return the number of key features per head; None where no attribute has it."""
    direct = _first(module, _HEAD_DIM)
    if direct is not None:
        return direct
    width, heads = _first(module, _WIDTH), _first(module, _QUERY_HEADS)
    return width // heads if width and heads and width % heads == 0 else None


def num_key_heads(module: nn.Module) -> int | None:
    """Return the number of key heads, from the module or its config; None where neither has it."""
    for owner in (module, getattr(module, "config", None)):
        found = _first(owner, _KEY_HEADS)
        if found is not None:
            return found
    return None


def dropout_rate(module: nn.Module) -> float | None:
    """Return the rate of the dropout on attention weights; None where no attribute has it."""
    for name in _DROPOUT:
        value: Any = getattr(module, name, None)
        value = value.p if isinstance(value, nn.Dropout) else value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    return None


def _first(owner: Any, names: tuple[str, ...]) -> int | None:
    for name in names:
        value = getattr(owner, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
