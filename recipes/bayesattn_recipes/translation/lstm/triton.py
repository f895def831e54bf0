"""The LSTM cell as one autograd node over the kernels."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from bayesattn.kernels import prepared
from bayesattn_recipes.translation.lstm import kernels

BLOCK = 512


def lstm_cell(
    gates: Float[Tensor, "b k g"], cell: Float[Tensor, "b k h"], given: Float[Tensor, "b k g"] | None
) -> tuple[Float[Tensor, "b k h"], Float[Tensor, "b k h"]]:
    """Return hidden (as the gates' dtype) and cell state (float32)."""
    return _LSTMCell.apply(gates, cell, given)


def _blocks(count: int) -> tuple[int]:
    return (-(-count // BLOCK),)


def _rows(given: Tensor | None, like: Tensor) -> tuple[Tensor, int]:
    """Return the given gates with unit stride inside a row, and the stride between rows; a stand-in if there are none."""
    if given is None:
        return like, 0
    flat = given.flatten(0, 1)
    flat = flat if flat.stride(-1) == 1 else flat.contiguous()
    return flat, flat.stride(0)


class _LSTMCell(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gates, cell, given):
        gates, cell = gates.contiguous(), cell.contiguous()
        hidden, new_cell = torch.empty_like(cell, dtype=gates.dtype), torch.empty_like(cell)
        flat, stride = _rows(given, gates)
        launch = prepared(
            kernels.lstm_cell_kernel, _blocks(cell.numel()), stride, cell.shape[-1], cell.numel(),
            HAS_GIVEN=given is not None, BLOCK=BLOCK,
        )  # fmt: skip
        launch(gates, flat, cell, hidden, new_cell)
        ctx.save_for_backward(gates, cell, given)
        ctx.set_materialize_grads(False)
        return hidden, new_cell

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_hidden, grad_new_cell):
        gates, cell, given = ctx.saved_tensors
        grad_gates, grad_cell = torch.empty_like(gates), torch.empty_like(cell)
        flat, stride = _rows(given, gates)
        found = [None if grad is None else grad.contiguous() for grad in (grad_hidden, grad_new_cell)]
        launch = prepared(
            kernels.lstm_cell_grad_kernel, _blocks(cell.numel()), stride, cell.shape[-1], cell.numel(),
            HAS_GIVEN=given is not None, HAS_HIDDEN=found[0] is not None, HAS_CELL=found[1] is not None, BLOCK=BLOCK,
        )  # fmt: skip
        launch(gates, flat, cell, *(cell if grad is None else grad for grad in found), grad_gates, grad_cell)
        return grad_gates, grad_cell, None if given is None else grad_gates.to(given.dtype)
