"""Triton kernels of the LSTM cell: from gates and cell state to hidden and cell state, and back.

    i, f, o = σ(gates),  g = tanh(gates),  c' = f c + i g,  h = o tanh(c')

The backward kernel computes the gates again from the forward kernel's inputs, so only inputs are kept.
"""

import triton
import triton.language as tl


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _gate(gates, given, place, place_given, inside, HAS_GIVEN: tl.constexpr):
    x = tl.load(gates + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_GIVEN:
        x += tl.load(given + place_given, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def _gates(gates, given, at, given_stride, size, inside, HAS_GIVEN: tl.constexpr):
    """Return i, f, o, g of the entries `at`, and the position of the first gate of each."""
    row, column = at // size, at % size
    place, other = row * 4 * size + column, row * given_stride + column
    i = tl.sigmoid(_gate(gates, given, place, other, inside, HAS_GIVEN))
    f = tl.sigmoid(_gate(gates, given, place + size, other + size, inside, HAS_GIVEN))
    o = tl.sigmoid(_gate(gates, given, place + 2 * size, other + 2 * size, inside, HAS_GIVEN))
    g = _tanh(_gate(gates, given, place + 3 * size, other + 3 * size, inside, HAS_GIVEN))
    return i, f, o, g, place


@triton.jit
def lstm_cell_kernel(
    gates, given, cell, hidden, new_cell, given_stride, size, count, HAS_GIVEN: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write h and c'; entry (row, column) of `count` = rows × size."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    i, f, o, g, _ = _gates(gates, given, at, given_stride, size, inside, HAS_GIVEN)  # type: ignore[misc]
    c = f * tl.load(cell + at, mask=inside, other=0.0) + i * g
    tl.store(new_cell + at, c, mask=inside)
    tl.store(hidden + at, (o * _tanh(c)).to(hidden.dtype.element_ty), mask=inside)


@triton.jit
def lstm_cell_grad_kernel(
    gates, given, cell, grad_hidden, grad_new_cell, grad_gates, grad_cell, given_stride, size, count,
    HAS_GIVEN: tl.constexpr, HAS_HIDDEN: tl.constexpr, HAS_CELL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write the gradients of the gates and of c from those of h and c'."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    i, f, o, g, place = _gates(gates, given, at, given_stride, size, inside, HAS_GIVEN)  # type: ignore[misc]
    before = tl.load(cell + at, mask=inside, other=0.0)
    t = _tanh(f * before + i * g)
    d_hidden = tl.zeros((BLOCK,), dtype=tl.float32)
    if HAS_HIDDEN:
        d_hidden = tl.load(grad_hidden + at, mask=inside, other=0.0).to(tl.float32)
    d_cell = d_hidden * o * (1.0 - t * t)
    if HAS_CELL:
        d_cell += tl.load(grad_new_cell + at, mask=inside, other=0.0)
    kind = grad_gates.dtype.element_ty
    tl.store(grad_gates + place, (d_cell * g * i * (1.0 - i)).to(kind), mask=inside)
    tl.store(grad_gates + place + size, (d_cell * before * f * (1.0 - f)).to(kind), mask=inside)
    tl.store(grad_gates + place + 2 * size, (d_hidden * t * o * (1.0 - o)).to(kind), mask=inside)
    tl.store(grad_gates + place + 3 * size, (d_cell * i * (1.0 - g * g)).to(kind), mask=inside)
    tl.store(grad_cell + at, d_cell * f, mask=inside)
