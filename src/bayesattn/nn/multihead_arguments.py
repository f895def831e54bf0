"""The arguments of `torch.nn.MultiheadAttention`: checked as in torch, with masks in our convention (True: attend)."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from bayesattn.ops.attention.masking import FORBIDDEN, look_once, split_bias


def check_inputs(module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Refuse the shapes that torch's module refuses in eval mode: nothing is broadcast."""
    if query.ndim not in (2, 3):
        raise ValueError(
            f"query must have the axes (length, features), or three axes with a batch, got shape {tuple(query.shape)}"
        )
    batch_axis = 0 if module.batch_first else 1
    for name, given, width in (("query", query, module.embed_dim), ("key", key, module.kdim), ("value", value, module.vdim)):
        is_batch = query.ndim == 2 or given.ndim == 2 or given.shape[batch_axis] == query.shape[batch_axis]
        if given.ndim != query.ndim or given.shape[-1] != width or not is_batch:
            raise ValueError(
                f"{name} must have {query.ndim} axes, {width} features and the batch of query {tuple(query.shape)}, got "
                f"shape {tuple(given.shape)} (batch_first={module.batch_first})"
            )
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(f"value must have shape {tuple(key.shape[:-1])} and features to fit key, got {tuple(value.shape)}")


def check_nested(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
) -> None:
    """Refuse nested input that torch's fused path refuses."""
    is_plain = query is key is value and query.layout == torch.strided and module.batch_first
    if not is_plain or key_padding_mask is not None or attn_mask is not None:
        raise ValueError(
            "nested tensors are supported only as one tensor of layout torch.strided for query, key and value, with "
            "batch_first=True and no mask. Otherwise pad it (to_padded_tensor) and give a key_padding_mask"
        )


def split_masks(
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    query: Float[Tensor, "b m e"],
    num_keys: int,
    *,
    num_heads: int,
    extra_keys: int,
) -> tuple[Bool[Tensor, "#b #h #m n"] | None, Float[Tensor, "#b #h #m n"] | None]:
    """Turn torch's two masks, boolean or additive, into one of ours and an additive bias.

    Args:
        key_padding_mask: One row of keys per example.
        attn_mask: `m n`, or `b*h m n`.
        query: Gives batch size and dtype.
        num_keys: Number of keys that the caller gave.
        num_heads: Number of heads.
        extra_keys: Keys that `add_bias_kv` and `add_zero_attn` append, which every query may attend to.
    """
    mask, bias = None, None
    for name, given in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
        if given is None:
            continue
        _check_mask(name, given, query, num_keys, num_heads)
        if name == "key_padding_mask":
            given = given[:, None, None, :]
        else:
            given = given.unflatten(0, (query.shape[0], num_heads)) if given.ndim == 3 else given[None, None]
        if given.dtype == torch.bool:
            given = F.pad(~given, (0, extra_keys), value=True)
            mask = given if mask is None else mask & given
        else:
            given = F.pad(given, (0, extra_keys))
            bias = given if bias is None else bias + given
    if bias is None:
        return mask, None
    allowed, bias = split_bias(bias)
    return allowed if mask is None else mask & allowed, bias


def _check_mask(name: str, given: Tensor, query: Tensor, num_keys: int, num_heads: int) -> None:
    b, m, _ = query.shape
    shapes = ((b, num_keys),) if name == "key_padding_mask" else ((m, num_keys), (b * num_heads, m, num_keys))
    if tuple(given.shape) not in shapes:
        expected = " or ".join(map(str, shapes))
        raise ValueError(
            f"{name} must have shape {expected} for {b} examples and {num_heads} heads, got {tuple(given.shape)}"
        )
    # as in torch: autocast reconciles any two types
    is_added = given.dtype in (torch.float32, query.dtype) or torch.is_autocast_enabled(query.device.type)
    if given.dtype != torch.bool and not (given.is_floating_point() and is_added):
        raise ValueError(
            f"{name} must be torch.bool (True: do not attend), or additive in torch.float32 or the query's {query.dtype}, "
            f"got {given.dtype}"
        )


def only_forbids(mask: Tensor | None) -> bool:
    """Whether a mask only forbids keys and adds nothing to other scores; False where that cannot be checked."""
    if mask is None or mask.dtype == torch.bool:
        return True
    if mask.requires_grad:
        # a mask that is trained may be all zeros only for now
        return False
    return bool(look_once(mask, "_bayesattn_only_forbids", lambda given: ((given == 0.0) | (given <= FORBIDDEN)).all()))
