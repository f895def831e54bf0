"""Attention masks as other libraries pass them, split into what our functions take: a boolean mask and an additive bias."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bayesattn.ops.attention.masking import look_once, split_bias

# attributes of a mask that store the results of `key_padding` and `as_band`, and what `note_making` recorded
_MEMO, _BAND_MEMO, _KEYS, _MAKING = "_bayesattn_is_one_row", "_bayesattn_is_band", "_bayesattn_keys", "_bayesattn_making"


class Making(NamedTuple):
    """How a mask was made, known without reading its values.

    Attributes:
        keys: Keys that exist, (b, 1, 1, n); None is all.
        is_causal: Whether a query has keys up to its own position only; else all queries have the same keys.
        version: Version of the mask when it was made; None inside a compiler, where it cannot change unnoticed.
    """

    keys: Bool[Tensor, "b 1 1 n"] | None
    is_causal: bool
    version: int | None


def note_making(mask: Bool[Tensor, "b 1 m n"], keys: Bool[Tensor, "b n"] | None, is_causal: bool) -> None:
    """Remember on a mask that it is `keys` for every query, below the diagonal if `is_causal`.

    A mask made inside a compiler or CUDA-graph capture, where the host cannot read values, can then still become a mask of
    keys. Everywhere else it saves the host a wait.
    """
    setattr(mask, _MAKING, Making(None if keys is None else keys[:, None, None], is_causal, _version(mask)))


def _making(mask: Tensor, is_causal: bool) -> Making | None:
    """Return how a mask was made, if that is known, still true and of this kind."""
    making = getattr(mask, _MAKING, None)
    return making if making is not None and making.is_causal == is_causal and making.version == _version(mask) else None


def _version(mask: Tensor) -> int | None:
    # inference-mode tensors have none, and cannot change outside of that mode
    return None if torch.compiler.is_compiling() or mask.is_inference() else mask._version


def split_mask(mask: Tensor | None) -> tuple[Bool[Tensor, "..."] | None, Float[Tensor, "..."] | None]:
    """Return (True where a query may attend, what to add to the scores) from a boolean or additive mask.

    Args:
        mask: Boolean (True: attend) or additive, with at most four axes; None allows everything.
    """
    if mask is None or mask.dtype == torch.bool:
        return mask, None
    if not mask.is_floating_point():
        raise ValueError(
            f"the attention mask must be torch.bool (True = attend) or floating-point (additive), got {mask.dtype}"
        )
    return split_bias(mask)


def combine_bias(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Return the sum of two biases; either may be None."""
    if first is None or second is None:
        return first if second is None else second
    return first + second


def key_padding(mask: Bool[Tensor, "b h m n"]) -> Bool[Tensor, "b h #m n"] | None:
    """Return a mask whose rows are all equal as one row: a mask of keys, which costs much less, above all on a GPU.

    Unless `note_making` recorded it, this is checked once per mask, not once per layer, because on a GPU the host has to
    wait for the answer. During compilation or CUDA-graph capture it cannot wait, and the mask is returned unchanged.
    Return None for a mask known to allow everything.
    """
    making = _making(mask, False)
    if making is not None:
        return making.keys
    if mask.shape[2] == 1 or mask.numel() == 0:
        return mask
    if mask.stride(2) == 0:
        return mask[:, :, :1]
    return mask[:, :, :1] if look_once(mask, _MEMO, lambda given: (given == given[:, :, :1]).all()) else mask


def as_band(
    mask: Bool[Tensor, "b h m n"] | None, window: int | None = None
) -> tuple[Bool[Tensor, "b h #m n"] | None, bool, int | None]:
    """Return (mask, is_causal, window) equivalent to a mask; a causal one becomes a mask of keys and two numbers.

    Kernels skip what lies above the diagonal or before a window, and the KL of such a mask needs no sums over entries. As in
    `key_padding`, a mask is checked once, and returned unchanged where the host cannot wait for the answer.

    Args:
        mask: Which entries exist.
        window: Keys per query, if the model specifies it.
    """
    if mask is None or mask.shape[1] != 1 or mask.shape[2] != mask.shape[3] or mask.shape[2] == 1:
        return mask, False, None
    making = _making(mask, True)
    if making is not None and window is None:
        return making.keys, True, None

    def is_band(given: Tensor) -> Tensor:
        triangle = torch.ones(given.shape[2:], dtype=torch.bool, device=given.device).tril()
        keys = given.any(dim=2, keepdim=True)
        setattr(given, _KEYS, keys)
        return (given == (triangle if window is None else triangle.triu(1 - window)) & keys).all()

    # the answer depends on the window
    if not look_once(mask, f"{_BAND_MEMO}_{window}", is_band):
        return mask, False, None
    return getattr(mask, _KEYS), True, window
