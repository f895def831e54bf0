"""The lognormal KL's kernels: sum of squares and every gradient against all entries in float64."""

import pytest
import torch
from kernel_device import DEVICE, DTYPES, MARKS

from bayesattn.ops.attention.gram import sum_of_squares
from bayesattn.ops.attention.masking import Allowed
from bayesattn.ops.common.launch import LAUNCHES

pytestmark = MARKS
B, M, N, SCALE = 2, 67, 131, 0.37


def written_out(query, key, location, shift, mask):
    scores = SCALE * query @ key.repeat_interleave(query.shape[1] // key.shape[1], dim=1).transpose(-2, -1)
    squares = (scores - location - shift.unsqueeze(-1)).square()
    return (squares if mask is None else squares.masked_fill(~mask, 0.0)).flatten(1).sum(dim=1)


def inputs(dtype, heads, key_heads, d, *, fixed):
    def rows(length, of_heads):
        # heads after rows, as models have them
        return torch.randn(B, length, of_heads, d, device=DEVICE).to(dtype).transpose(1, 2)

    location = torch.randn((1, 1, 1, 1) if fixed else (B, heads, 1, N), device=DEVICE)
    shift = torch.randn((1, 1, 1) if fixed else (B, heads, M), device=DEVICE)
    return [x.detach().requires_grad_() for x in (rows(M, heads), rows(N, key_heads), location, shift)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "key_heads", "d"), [(3, 3, 24), (6, 2, 64), (2, 1, 128)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("fixed", [False, True])
def test_equals_the_sum_over_all_entries_with_every_gradient(dtype, heads, key_heads, d, masked, fixed):
    torch.manual_seed(0)
    tensors, mask = inputs(dtype, heads, key_heads, d, fixed=fixed), None
    if masked:
        mask = torch.rand(B, 1, 1, N, device=DEVICE) > 0.4
        mask[1] = False
    before = LAUNCHES.copy()
    ours = sum_of_squares(*tensors, Allowed(mask, False, (B, heads, M, N)), SCALE, by_kernels=True)
    upstream = torch.randn(B, device=DEVICE) * 1e-2
    found = torch.autograd.grad(ours, tensors, upstream)
    assert {name: count - before[name] for name, count in LAUNCHES.items() if count != before[name]} == {
        "moments": 2,
        "moments_gradient": 2,
    }
    exact = [x.detach().double().requires_grad_() for x in tensors]
    truth = written_out(*exact, mask)
    torch.testing.assert_close(ours.double(), truth, rtol=1e-5, atol=1e-4)
    for x, y in zip(found, torch.autograd.grad(truth, exact, upstream.double()), strict=True):
        assert x.shape == y.shape
        rounding = torch.finfo(x.dtype).eps if x.dtype != torch.float32 else 1e-5
        torch.testing.assert_close(x.double(), y, rtol=2.0 * rounding, atol=2.0 * rounding * float(y.abs().max()))


def test_large_locations_cancel_without_loss():
    """What is added up is 100 times as large as the result, as where the prior follows the scores."""
    torch.manual_seed(0)
    query, key, *_ = (x.detach() for x in inputs(torch.float32, 3, 3, 16, fixed=True))
    location = (SCALE * query @ key.transpose(-2, -1)).mean(dim=-2, keepdim=True) + 10.0
    tensors = [x.requires_grad_() for x in (query, key, location, torch.full((B, 3, M), -10.0, device=DEVICE))]
    ours = sum_of_squares(*tensors, Allowed(None, False, (B, 3, M, N)), SCALE, by_kernels=True)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    truth = written_out(*exact, None)
    torch.testing.assert_close(ours.double(), truth, rtol=1e-3, atol=0.0)
    found, expected = (torch.autograd.grad(s.sum(), x[:2]) for s, x in ((ours, tensors), (truth, exact)))
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=0.0, atol=1e-3 * float(y.abs().max()))
