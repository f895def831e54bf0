"""The blocked CPU backend against the reference with the same noise: output, KL and every gradient."""

from unittest import mock

import pytest
import torch

import bayesattn as ba
from bayesattn import noise
from bayesattn.functional import attention
from bayesattn.ops.attention import blocked, reference
from bayesattn.ops.attention.kl import kl_from_scores
from bayesattn.ops.attention.masking import Allowed, masked_softmax

B, H, HK, M, N, D, DV = 2, 6, 3, 37, 53, 11, 7


def make_mask(kind: str) -> torch.Tensor | None:
    if kind == "key padding":
        mask = torch.rand(B, 1, 1, N) > 0.3
        mask[0] = False
        return mask
    if kind == "arbitrary":
        mask = torch.rand(B, H, M, N) > 0.3
        mask[0, 1, 3] = False
        return mask
    return None


@pytest.mark.parametrize("block_entries", [blocked.BLOCK_ENTRIES, 600, 1])
@pytest.mark.parametrize("mask_kind", ["none", "key padding", "arbitrary", "causal"])
@pytest.mark.parametrize(
    ("variant", "preset"),
    [
        *(("BAM-WC", "paper"), ("BAM-WC", "default"), ("BAM-WF", "paper"), ("BAM-NOKL", "paper")),
        *(("BAM-LC", "paper"), ("BAM-LC", "default"), ("BAM-LF", "paper"), ("BAM-LF", "official-code")),
    ],
)
def test_equals_reference_with_the_same_noise(monkeypatch, variant, preset, mask_kind, block_entries):
    if variant in ("BAM-LC", "BAM-LF") and mask_kind in ("arbitrary", "causal"):
        pytest.skip("refused: test_refuses_by_name_what_it_cannot_do")
    monkeypatch.setattr(blocked, "BLOCK_ENTRIES", block_entries)
    config = ba.AttentionConfig(variant, preset=preset, weibull_k=2.0, gamma_beta=0.3, gamma_alpha=0.7)
    double = {"dtype": torch.float64, "requires_grad": True}
    query, key, value = (
        torch.randn(B, H, M, D, **double),
        torch.randn(B, HK, N, D, **double),
        torch.randn(B, HK, N, DV, **double),
    )
    log_prior = None
    if config.prior_kind == "contextual":
        log_prior = torch.randn(B, H, 1, N, dtype=torch.float64).log_softmax(-1).requires_grad_()
    allowed, scale = Allowed(make_mask(mask_kind), mask_kind == "causal", (B, H, M, N)), 0.4
    mask = allowed.dense(query.device)

    drawn = []
    draw = noise.log_noise
    monkeypatch.setattr(noise, "log_noise", lambda *args, **kwargs: drawn.append(draw(*args, **kwargs)) or drawn[-1].clone())
    options = {"config": config, "log_prior": log_prior, "allowed": allowed, "scale": scale, "need_kl": config.has_kl}
    output, kl = blocked.attention(query, key, value, **options)
    log_noise = torch.cat([block.flatten() for block in drawn]).view(B, H, M, N)

    scores = reference.dot_product_scores(query, key, scale=scale, bias=None)
    expected = masked_softmax(scores + log_noise, mask) @ reference.expand_heads(value, H)
    results, references = [output], [expected]
    if config.has_kl:
        results.append(kl)
        references.append(kl_from_scores(scores, log_prior, mask, config))
    inputs = [query, key, value] + ([] if log_prior is None else [log_prior])
    upstream = [torch.randn_like(result) for result in results]
    # the backward pass draws again: it must see the same noise
    gradients = torch.autograd.grad(results, inputs, upstream)
    for ours, theirs in zip(
        results + list(gradients), references + list(torch.autograd.grad(references, inputs, upstream)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("block_entries", [blocked.BLOCK_ENTRIES, 100, 1])
@pytest.mark.parametrize("variant", ["BAM-WC", "BAM-NOKL"])
def test_short_sequences_keep_their_blocks_and_give_the_same_bits(monkeypatch, variant, block_entries):
    monkeypatch.setattr(blocked, "BLOCK_ENTRIES", block_entries)
    config = ba.AttentionConfig(variant, weibull_k=2.0)
    b, h, m, n, d = 2, 3, 7, 5, 11
    query, key, value = (torch.randn(b, h, length, d, requires_grad=True) for length in (m, n, n))
    mask = torch.rand(b, 1, m, n) > 0.3
    mask[0, 0, 3] = False
    upstream = torch.randn(b, h, m, d)
    log_prior = torch.randn(b, h, 1, n).log_softmax(-1) if config.has_kl else None
    found = {}
    for keeps in (True, False):
        if not keeps:
            monkeypatch.setattr(blocked, "_may_keep", lambda *args, **kwargs: False)
        torch.manual_seed(0)
        with monkeypatch.context() as patch:
            count = mock.Mock(side_effect=noise.log_noise)
            patch.setattr(noise, "log_noise", count)
            output, kl = attention(query, key, value, config=config, mask=mask, log_prior=log_prior, backend="blocked")
            num_blocks = count.call_count
            loss = (output * upstream).sum() + kl.sum()
            first = torch.autograd.grad(loss, [query, key, value], retain_graph=True)
            second = torch.autograd.grad(loss, [query, key, value])
        assert count.call_count == (num_blocks if keeps else 3 * num_blocks), "what is kept is not drawn again"
        assert all(map(torch.equal, first, second)), "a backward pass must leave what was kept as it is"
        found[keeps] = [output, kl, *first]
    assert all(map(torch.equal, found[True], found[False]))


@pytest.mark.parametrize("length", [20, 400])
def test_what_is_kept_is_no_larger_than_the_inputs(length):
    query, key, value = (torch.randn(1, 2, length, 11, requires_grad=True) for _ in range(3))
    config = ba.AttentionConfig("BAM-WF", weibull_k=2.0)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        attention(query, key, value, config=config, backend="blocked")
    # query, key, value and output, as much again, and what the KL keeps
    assert sum(saved) < 3 * 4 * query.numel()


def test_auto_takes_the_blocked_backend_and_manual_seed_governs_it(monkeypatch):
    calls = []
    original = blocked.attention
    monkeypatch.setattr(blocked, "attention", lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs))
    query, key, value = (torch.randn(1, 2, 5, 3) for _ in range(3))
    config = ba.AttentionConfig("BAM-WF", weibull_k=1.0)
    outputs = []
    for seed in (7, 7, 8):
        torch.manual_seed(seed)
        outputs.append(attention(query, key, value, config=config)[0])
    assert len(calls) == 3
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"seed": 3}, "takes no seed"),
        ({"bias": torch.zeros(5, 5)}, "no additive bias"),
        ({"dropout_p": 0.1}, "no dropout"),
        (
            {"config": ba.AttentionConfig("BAM-LF"), "is_causal": True},
            "no lognormal KL where queries have keys of their own",
        ),
        ({"config": ba.AttentionConfig("BAM-LF"), "mask": torch.ones(5, 5, dtype=torch.bool)}, "no lognormal KL"),
    ],
)
def test_refuses_by_name_what_it_cannot_do(change, reason):
    query = torch.randn(1, 2, 5, 3)
    options = {"config": ba.AttentionConfig("BAM-WF"), **change}
    with pytest.raises(ValueError, match=f"backend 'blocked' cannot be used here: .*{reason}"):
        attention(query, query, query, backend="blocked", **options)
    attention(query, query, query, backend="auto", **options)
