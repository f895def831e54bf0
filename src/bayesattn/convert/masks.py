"""Attention masks as other libraries pass them, split into what our functions take: a boolean mask and an additive bias."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

# e^-80 is 2e-35: beside any other key of its row such a weight is nothing in float32. Libraries forbid with −inf, with the
# smallest number of the dtype, or (Swin) with −100 plus a small learnt bias
FORBIDDEN = -80.0


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
    allowed = mask > FORBIDDEN
    return allowed, mask.masked_fill(~allowed, 0.0)


def combine_bias(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Return the sum of two biases of which either may be missing."""
    if first is None or second is None:
        return first if second is None else second
    return first + second
