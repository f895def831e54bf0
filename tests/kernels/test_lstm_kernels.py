"""The LSTM cell's kernels against the plain formula in float64: both states and the gradient of every input."""

import pytest
import torch
from kernel_device import DEVICE, HAS_GPU, MARKS

from bayesattn.ops.common.launch import LAUNCHES
from bayesattn_recipes.translation.decoder import lstm_cell

pytestmark = MARKS
TOLERANCE = 2e-5 if HAS_GPU else 3e-6


def both(shape, dtype, *, has_given, uses=(True, True)):
    """Return states and gradients, by the kernels and by plain torch in float64; `given` is a step of a longer sequence."""
    b, k, h = shape
    torch.manual_seed(3)
    gates = torch.randn(b, k, 4 * h, device=DEVICE).to(dtype)
    cell = torch.randn(b, k, h, device=DEVICE)
    given = torch.randn(b, 5 * k, 4 * h, device=DEVICE).to(dtype) if has_given else None
    upstream = [torch.randn(b, k, h, device=DEVICE) for _ in range(2)]
    found = []
    for wide in (False, True):
        inputs = [x if x is None else (x.double() if wide else x).clone().requires_grad_() for x in (gates, cell, given)]
        step = None if inputs[2] is None else inputs[2][:, 2 * k : 3 * k]
        before = LAUNCHES["lstm_cell"]
        states = lstm_cell(inputs[0], inputs[1], step)
        assert LAUNCHES["lstm_cell"] == before + (not wide)
        used = [(state * grad.to(state.dtype)).sum() for state, grad, use in zip(states, upstream, uses) if use]
        sum(used).backward()
        found.append([x.detach().double() for x in (*states, *(x.grad for x in inputs if x is not None))])
    return found


@pytest.mark.parametrize("shape", [(3, 1, 7), (5, 1, 192), (2, 3, 65)])
@pytest.mark.parametrize("has_given", [False, True])
def test_equals_the_plain_cell_with_all_gradients(shape, has_given):
    for ours, truth in zip(*both(shape, torch.float32, has_given=has_given), strict=True):
        # float32 rounding of a dozen operations on numbers up to 4, with a GPU's quick exponential and division
        torch.testing.assert_close(ours, truth, rtol=0.0, atol=TOLERANCE)


@pytest.mark.parametrize("uses", [(True, False), (False, True)])
def test_a_state_that_nobody_uses_gets_no_gradient(uses):
    for ours, truth in zip(*both((3, 1, 11), torch.float32, has_given=True, uses=uses), strict=True):
        torch.testing.assert_close(ours, truth, rtol=0.0, atol=TOLERANCE)


def test_bfloat16_gates_keep_a_float32_cell():
    fused, plain = both((4, 1, 33), torch.bfloat16, has_given=True)
    # the cell is computed from the rounded gates in float32
    torch.testing.assert_close(fused[1], plain[1], rtol=0.0, atol=TOLERANCE)
    for ours, truth in zip(fused, plain, strict=True):
        # bfloat16 has 8 bits: hidden state, upstream gradient and gradients of order 1 are rounded to 2^-8 each
        torch.testing.assert_close(ours, truth, rtol=0.0, atol=4 * 2.0**-8)
