"""The statistics kernel against a dense softmax in float64: all masks, grouped heads, soft cap, bias, odd sizes."""

import pytest
import torch
from kernel_device import DEVICE, DTYPES, MARKS

from bayesattn.ops.attention.statistics import row_statistics
from bayesattn.ops.common.launch import LAUNCHES, recorded_launches

pytestmark = MARKS

# b, h, key heads, m, n, d
SIZES = [(2, 6, 2, 37, 131, 19), (1, 3, 3, 131, 37, 64), (2, 2, 1, 67, 67, 8)]


def dense(query, key, *, mask, bias, is_causal, scale, softcap, positions):
    query, key = query.double(), key.double().repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = scale * query @ key.transpose(-2, -1)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores if bias is None else scores + bias.double()
    allowed = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask.expand(scores.shape).clone()
    allowed = allowed.tril() if is_causal else allowed
    weights = torch.softmax(scores.masked_fill(~allowed, -torch.inf), dim=-1).nan_to_num(0.0)
    share = (weights * positions[:, None, None]).sum(dim=-1)
    return torch.special.entr(weights).sum(dim=-1), weights.amax(dim=-1), allowed.sum(dim=-1).double(), share


def masks(b, h, m, n):
    padding = torch.rand(b, 1, 1, n, device=DEVICE) < 0.7
    full = torch.rand(b, h, m, n, device=DEVICE) < 0.5
    full[:, :, ::5] = False  # queries without a key
    position = torch.arange(max(m, n), device=DEVICE)
    window = (position[:m, None] - position[:n]).abs() < 11
    return {"none": None, "padding": padding, "full": full, "window": window[None, None]}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mask", ["none", "padding", "full", "window"])
def test_kernel_is_the_dense_softmax(poisoned, sizes, is_causal, mask):
    b, h, hk, m, n, d = sizes
    torch.manual_seed(sum(sizes))
    query, key = torch.randn(b, h, m, d, device=DEVICE), torch.randn(b, hk, n, d, device=DEVICE)
    positions = torch.rand(b, n, device=DEVICE) < 0.3
    options = {"mask": masks(b, h, m, n)[mask], "bias": None, "is_causal": is_causal, "scale": 0.7, "softcap": None}
    before = LAUNCHES["statistics"]
    rows = row_statistics(query, key, positions=positions, **options)
    assert LAUNCHES["statistics"] == before + 1
    expected = dense(query, key, positions=positions, **options)
    for found, exact in zip((rows.entropy, rows.largest, rows.keys, rows.share), expected, strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)


def test_programs_lie_on_the_axis_of_a_grid_that_does_not_end_at_65535():
    query, key = torch.randn(3, 7, 131, 16, device=DEVICE), torch.randn(3, 7, 13, 16, device=DEVICE)
    made = []
    with recorded_launches(made):
        row_statistics(query, key, mask=None, bias=None, is_causal=False, scale=1.0, softcap=None, positions=None)
    ((launch, _),) = made
    assert launch.grid[1:] == (1, 1)
    assert launch.grid[0] % 21 == 0


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("shape", [(2, 6, 37, 131), (1, 6, 1, 131), (1, 1, 37, 131)])
def test_kernel_adds_a_bias_and_caps_scores(softcap, shape):
    torch.manual_seed(3)
    query, key = 3.0 * torch.randn(2, 6, 37, 24, device=DEVICE), torch.randn(2, 3, 131, 24, device=DEVICE)
    positions = torch.zeros(1, 131, dtype=torch.bool, device=DEVICE)
    positions[:, 0] = True
    options = {"mask": None, "bias": torch.randn(shape, device=DEVICE), "is_causal": False, "scale": 0.5, "softcap": softcap}
    rows = row_statistics(query, key, positions=positions, **options)
    expected = dense(query, key, positions=positions, **options)
    for found, exact in zip((rows.entropy, rows.largest, rows.keys, rows.share), expected, strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sharp_and_flat_attention_keep_their_digits(dtype):
    query = torch.zeros(1, 2, 3, 16, device=DEVICE, dtype=dtype)
    query[:, 1, :, 0] = 60.0
    key = torch.zeros(1, 2, 70, 16, device=DEVICE, dtype=dtype)
    key[:, :, 5, 0] = 60.0
    rows = row_statistics(query, key, scale=1.0)
    torch.testing.assert_close(rows.entropy[0, 0].cpu(), torch.full((3,), 70.0).log(), rtol=1e-5, atol=0.0)
    assert rows.entropy[0, 1].max() < 1e-6
    # a score of 3600 is known to half a unit in its last place, 1.2e-4, and so is the logarithm of its weight
    torch.testing.assert_close(rows.largest[0].cpu(), torch.tensor([[1.0 / 70.0] * 3, [1.0] * 3]), rtol=1.2e-4, atol=0.0)
    assert rows.share is None
