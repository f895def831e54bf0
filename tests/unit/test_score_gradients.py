"""Squared score gradients against autograd on written-out attention, in float64, with every option that attention has."""

import pytest
import torch
import torch.nn.functional as F

from bayesattn.ops.attention import score_gradients
from bayesattn.ops.attention.masking import masked_softmax

B, H, M, N, D, DV = 2, 6, 7, 11, 5, 3


def written_out(query, key, value, grad_output, *, mask=None, bias=None, is_causal=False, scale, softcap=None):
    """Return Σ_i dΦ_ij² by autograd through scores that exist as an array, output and log-sum-exp."""
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
    lse = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
    return grad.square().sum(dim=-2), output.detach(), lse.logsumexp(dim=-1).detach()


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
    truth, output, lse = written_out(query, key, value, grad, **options)
    for kept in ((), (output,), (output, lse)):
        found = score_gradients.squared_score_gradients(grad, query, key, value, *kept, **options)
        assert torch.allclose(found, truth, rtol=1e-10, atol=1e-14)
        assert float(found.sum()) > 0


@pytest.mark.parametrize("key_heads", [1, 2, 3])
def test_grouped_heads(key_heads):
    query, key, value, grad = inputs(key_heads=key_heads)
    found = score_gradients.squared_score_gradients(grad, query, key, value, scale=0.3)
    assert found.shape == (B, H, N)
    assert torch.allclose(found, written_out(query, key, value, grad, scale=0.3)[0], rtol=1e-10)


@pytest.mark.parametrize("m", [1, 13])
def test_causal_with_other_numbers_of_queries_and_keys(m):
    query, key, value, grad = inputs(m=m)
    options = {"scale": 0.3, "is_causal": True}
    found = score_gradients.squared_score_gradients(grad, query, key, value, **options)
    assert torch.allclose(found, written_out(query, key, value, grad, **options)[0], rtol=1e-10, atol=1e-14)


def test_half_precision_is_computed_in_float32():
    halves = [x.bfloat16() for x in inputs()]
    query, key, value, grad = (x.double() for x in halves)
    found = score_gradients.squared_score_gradients(halves[3], *halves[:3], scale=0.5)
    assert found.dtype == torch.float32
    assert torch.allclose(found.double(), written_out(query, key, value, grad, scale=0.5)[0], rtol=1e-4)


def attended(**options):
    query, key, value, _ = inputs()
    query.requires_grad_()
    return (
        F.scaled_dot_product_attention(query, key, torch.cat([value, value], dim=-1)[..., :D], scale=0.6, **options),
        query,
        key,
    )


@pytest.mark.parametrize("mask", [None, PADDING[:, None, None, :].expand(B, 1, M, N)])
def test_the_log_sum_exp_of_torchs_attention_is_found_behind_views_and_copies(mask):
    output, query, key = attended(attn_mask=mask)
    scores = 0.6 * query.detach() @ key.transpose(-2, -1)
    truth = (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).logsumexp(dim=-1)
    moved = output.transpose(1, 2).contiguous().transpose(1, 2)
    for given in (output, moved):
        found = score_gradients.kept_log_sum_exp(given, (B, H, M))
        assert torch.allclose(found, truth, rtol=1e-6)


def test_no_log_sum_exp_is_taken_from_anything_else():
    output, query, _ = attended()
    assert score_gradients.kept_log_sum_exp(output.detach(), (B, H, M)) is None
    assert score_gradients.kept_log_sum_exp(output * 2.0, (B, H, M)) is None
    assert score_gradients.kept_log_sum_exp(query, (B, H, M)) is None
    assert score_gradients.kept_log_sum_exp(output[:, :2].transpose(1, 2), (B, 2, M)) is None


def calls_of(masks, heads_last=False, **options):
    """Return attention calls with the gradients of their outputs, and the truth of each."""
    calls, truth = [], []
    for mask in masks:
        query, key, value, grad = inputs()
        squares, output, _ = written_out(query, key, value, grad, mask=mask, scale=0.6, **options)
        if heads_last:
            output, grad = (x.transpose(1, 2).contiguous() for x in (output, grad))
        call = score_gradients.ScoreGradients(query, key, value, output, heads_last, mask, scale=0.6, **options)
        calls.append((call, grad))
        truth.append(squares)
    return calls, truth


OTHER_PADDING = torch.arange(N) < torch.tensor([[3], [N]])
ROWS = torch.ones(M, N, dtype=torch.bool).triu()[None, None]


@pytest.mark.parametrize("heads_last", [False, True])
@pytest.mark.parametrize(
    ("masks", "batches"),
    [
        ([None] * 3, [3]),
        ([PADDING[:, None, None, :]] * 3, [3]),
        ([PADDING[:1, None, None, :]] * 2, [2]),
        ([PADDING[:, None, None, :], OTHER_PADDING[:, None, None, :], None], [1, 1, 1]),
        ([ROWS, ROWS], [1, 1]),
    ],
)
def test_calls_that_are_alike_are_computed_as_one_batch(masks, batches, heads_last, monkeypatch):
    single, computed = score_gradients.squared_score_gradients, []

    def noted(*args, **options):
        computed.append(args[0].shape[0] // B)
        return single(*args, **options)

    monkeypatch.setattr(score_gradients, "squared_score_gradients", noted)
    # the very same mask object, as the layers of a model have it
    calls, truth = calls_of(masks, heads_last)
    for found, expected in zip(score_gradients.squares_of_calls(calls), truth, strict=True):
        assert torch.allclose(found, expected, rtol=1e-10, atol=1e-14)
    assert computed == batches


@pytest.mark.parametrize(
    ("name", "most"), [("LARGEST_OF_MANY", B * H * M * D - 1), ("MOST_TOGETHER", 2 * B * H * M * D - 1)]
)
def test_large_calls_are_computed_one_by_one(name, most, monkeypatch):
    monkeypatch.setattr(score_gradients, name, most)
    calls, truth = calls_of([None, None, None])
    for found, expected in zip(score_gradients.squares_of_calls(calls), truth, strict=True):
        assert found.shape == (B, H, N)
        assert torch.allclose(found, expected, rtol=1e-10, atol=1e-14)


def test_tensors_that_were_written_into_after_the_call_are_refused():
    calls, _ = calls_of([None, None])
    calls[1][0].output.mul_(2.0)
    with pytest.raises(RuntimeError, match="the output of an attention call was changed in place"):
        score_gradients.squares_of_calls(calls)
