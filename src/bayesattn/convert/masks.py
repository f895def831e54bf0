"""Attention masks as other libraries pass them, split into what our functions take: a boolean mask and an additive bias."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bayesattn.ops.attention.masking import look_once, split_bias

# where a mask remembers what `key_padding` found
_MEMO = "_bayesattn_is_one_row"


def split_mask(mask: Tensor | None) -> tuple[Bool[Tensor, "..."] | None, Float[Tensor, "..."] | None]:
    """Return (True where a query may attend, what to add to the scores) from a boolean or additive mask.

    Args:
        mask: Boolean (True: attend) or additive, of at most four axes; None allows everything.
    """
    if mask is None or mask.dtype == torch.bool:
        return mask, None
    if not mask.is_floating_point():
        raise ValueError(
            f"the attention mask is {mask.dtype}; allowed: torch.bool (True = attend) or floating-point (additive)"
        )
    return split_bias(mask)


def combine_bias(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Return the sum of two biases of which either may be missing."""
    if first is None or second is None:
        return first if second is None else second
    return first + second


def key_padding(mask: Bool[Tensor, "b h m n"]) -> Bool[Tensor, "b h #m n"]:
    """Return a mask as one row where all its rows are equal: a mask of keys, which costs much less, on a GPU above all.

    Whether they are is looked up once for a mask, not once a layer: on a GPU the host has to wait for the answer. While a
    compiler or a recording of CUDA launches is at work nobody can wait, and the mask stays as it is.
    """
    if mask.shape[2] == 1 or mask.numel() == 0:
        return mask
    if mask.stride(2) == 0:
        return mask[:, :, :1]
    return mask[:, :, :1] if look_once(mask, _MEMO, lambda given: (given == given[:, :, :1]).all()) else mask
