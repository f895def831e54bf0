"""Squared score gradients against autograd on written-out attention, in float64, with every option that attention has."""

import pytest
import torch

from bayesattn.ops.attention import score_gradients
from bayesattn.ops.attention.masking import masked_softmax

B, H, M, N, D, DV = 2, 6, 7, 11, 5, 3


def written_out(query, key, value, grad_output, *, mask=None, bias=None, is_causal=False, scale, softcap=None):
    """Return Σ_i dΦ_ij² by autograd through scores that exist as an array."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = scale * query @ key.transpose(-2, -1)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    scores.requires_grad_()
    if is_causal:
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        mask = causal if mask is None else mask & causal
    output = masked_softmax(scores, mask) @ value
    (grad,) = torch.autograd.grad((output * grad_output).sum(), scores)
    return grad.square().sum(dim=-2)


def inputs(heads=H, key_heads=H, m=M, n=N):
    shapes = ((B, heads, m, D), (B, key_heads, n, D), (B, key_heads, n, DV), (B, heads, m, DV))
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


PADDING = torch.arange(N) < torch.tensor([[N], [4]])
OPTIONS = {
    "plain": {},
    "padding": {"mask": PADDING[:, None, None, :]},
    "two axes": {"mask": torch.ones(M, N, dtype=torch.bool).triu()},
    "a row without keys": {"mask": (torch.arange(M) != 3)[:, None].expand(M, N)},
    "causal": {"is_causal": True},
    "causal and padding": {"is_causal": True, "mask": PADDING[:, None, None, :]},
    "bias": {"bias": torch.linspace(-2, 2, H * M * N, dtype=torch.float64).view(1, H, M, N).sin()},
    "softcap": {"softcap": 0.7},
}


@pytest.mark.parametrize("limit", [1, 2 * N, 5 * M * N, 10**6])
@pytest.mark.parametrize("name", OPTIONS)
def test_equals_autograd_on_written_out_scores(name, limit, monkeypatch):
    monkeypatch.setitem(score_gradients.BLOCK_ENTRIES, "cpu", limit)
    query, key, value, grad = inputs()
    options = {"scale": 0.6, **OPTIONS[name]}
    found = score_gradients.squared_score_gradients(grad, query, key, value, **options)
    assert torch.allclose(found, written_out(query, key, value, grad, **options), rtol=1e-10, atol=1e-14)
    assert float(found.sum()) > 0


@pytest.mark.parametrize("key_heads", [1, 2, 3])
def test_grouped_heads(key_heads):
    query, key, value, grad = inputs(key_heads=key_heads)
    found = score_gradients.squared_score_gradients(grad, query, key, value, scale=0.3)
    assert found.shape == (B, H, N)
    assert torch.allclose(found, written_out(query, key, value, grad, scale=0.3), rtol=1e-10)


@pytest.mark.parametrize("m", [1, 13])
def test_causal_with_other_numbers_of_queries_and_keys(m):
    query, key, value, grad = inputs(m=m)
    options = {"scale": 0.3, "is_causal": True}
    found = score_gradients.squared_score_gradients(grad, query, key, value, **options)
    assert torch.allclose(found, written_out(query, key, value, grad, **options), rtol=1e-10, atol=1e-14)


def test_half_precision_is_computed_in_float32():
    halves = [x.bfloat16() for x in inputs()]
    query, key, value, grad = (x.double() for x in halves)
    found = score_gradients.squared_score_gradients(halves[3], *halves[:3], scale=0.5)
    assert found.dtype == torch.float32
    assert torch.allclose(found.double(), written_out(query, key, value, grad, scale=0.5), rtol=1e-4)
