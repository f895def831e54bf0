"""The LSTM cell of Att2in, with competing candidates (Rennie et al., 2017)."""

import torch
from jaxtyping import Float
from torch import Tensor


def maxout_lstm(
    sums: Float[Tensor, "c five_d"], view: Float[Tensor, "c two_d"], cell: Float[Tensor, "c d"]
) -> tuple[Float[Tensor, "c d"], Float[Tensor, "c d"]]:
    """Return hidden state and cell after one step.

    Args:
        sums: W_x x_t + W_h h_{t−1} + b for input, forget and output gate and the two candidates, in this order.
        view: W_a a_t for the two candidates.
        cell: c_{t−1}.
    """
    width = cell.shape[-1]
    gates, candidates = sums.split([3 * width, 2 * width], dim=-1)
    enter, keep, leave = torch.sigmoid(gates).chunk(3, dim=-1)
    cell = keep * cell + enter * torch.maximum(*(candidates + view).chunk(2, dim=-1))
    return leave * torch.tanh(cell), cell
