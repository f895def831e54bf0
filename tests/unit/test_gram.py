"""The lognormal KL from d × d matrices: sum of squares and gradients against the m × n array in float64, and rounding."""

import pytest
import torch

from bayesattn.ops.attention.gram import is_separable, sum_of_squares
from bayesattn.ops.attention.masking import Allowed

B, H, M, N, D = 2, 6, 7, 11, 5


def written_out(query, key, location, shift, mask, scale):
    """Return Σ_ij (Φ_ij − μ_j − x_i)² from all entries."""
    scores = scale * query @ key.repeat_interleave(query.shape[1] // key.shape[1], dim=1).transpose(-2, -1)
    squares = (scores - location - shift.unsqueeze(-1)).square()
    return (squares if mask is None else squares.masked_fill(~mask, 0.0)).flatten(1).sum(dim=1)


def inputs(key_heads: int, *, fixed: bool = False, dtype=torch.float64) -> list[torch.Tensor]:
    location = torch.randn((1, 1, 1, 1) if fixed else (B, H, 1, N), dtype=dtype)
    shift = torch.randn((1, 1, 1) if fixed else (B, H, M), dtype=dtype)
    shapes = ((B, H, M, D), (B, key_heads, N, D))
    return [x.requires_grad_() for x in (*(torch.randn(shape, dtype=dtype) for shape in shapes), location, shift)]


@pytest.mark.parametrize("key_heads", [1, 3, 6])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("fixed", [False, True])
def test_equals_the_sum_over_all_entries_with_every_gradient(key_heads, masked, fixed):
    tensors, mask = inputs(key_heads, fixed=fixed), None
    if masked:
        mask = torch.rand(B, 1, 1, N) > 0.4
        mask[1] = False
    ours = sum_of_squares(*tensors, Allowed(mask, False, (B, H, M, N)), 0.37)
    theirs = written_out(*tensors, mask, 0.37)
    upstream = torch.randn(B, dtype=torch.float64)
    torch.testing.assert_close(ours, theirs)
    for x, y in zip(*(torch.autograd.grad(s, tensors, upstream) for s in (ours, theirs)), strict=True):
        torch.testing.assert_close(x, y)


def test_float32_keeps_its_digits_where_locations_follow_large_scores():
    # what is added up is 100 times larger than the result
    tensors = [x.detach().double() for x in inputs(H, dtype=torch.float32)]
    tensors[2] = (0.37 * tensors[0] @ tensors[1].transpose(-2, -1)).mean(dim=-2, keepdim=True) + 10.0
    tensors[3] = tensors[3] - 10.0
    allowed = Allowed(None, False, (B, H, M, N))
    truth = written_out(*tensors, None, 0.37)
    found = sum_of_squares(*(x.float() for x in tensors), allowed, 0.37)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), truth, rtol=1e-4, atol=0.0)


def test_half_precision_is_multiplied_exactly():
    tensors = inputs(3, dtype=torch.float32)
    rounded = [x.detach().bfloat16().requires_grad_() if i < 2 else x for i, x in enumerate(tensors)]
    allowed = Allowed(None, False, (B, H, M, N))
    found = sum_of_squares(*rounded, allowed, 0.37)
    truth = written_out(*(x.double() for x in rounded), None, 0.37)
    torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=0.0)
    gradients = torch.autograd.grad(found.sum(), rounded)
    assert [x.dtype for x in gradients] == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]


def test_masks_that_depend_on_queries_or_heads_are_not_separable():
    shape = (B, H, M, N)
    assert is_separable(Allowed(None, False, shape))
    assert is_separable(Allowed(torch.ones(B, 1, 1, N, dtype=torch.bool), False, shape))
    for mask in (torch.ones(1, 1, M, N, dtype=torch.bool), torch.ones(1, H, 1, N, dtype=torch.bool)):
        assert not is_separable(Allowed(mask, False, shape))
    assert not is_separable(Allowed(None, True, shape))


def test_second_derivatives_are_refused():
    tensors = inputs(H)
    total = sum_of_squares(*tensors, Allowed(None, False, (B, H, M, N)), 0.37)
    with pytest.raises(RuntimeError, match="create_graph=True: fused attention has first derivatives only"):
        torch.autograd.grad(total.sum(), tensors, create_graph=True)
