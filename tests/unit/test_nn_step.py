"""Attention for decoders: what is drawn and recorded for all steps at once is what one call per step draws and records."""

import pytest
import torch

from bayesattn import AttentionConfig, record_kl
from bayesattn.nn import AdditiveAttention, StepAttention


@pytest.mark.parametrize("variant", ["BAM-LF", "BAM-LC", "BAM-WF", "BAM-WC"])
@pytest.mark.parametrize("preset", ["paper", "official-code", "default"])
def test_kl_of_all_steps_at_once_is_the_sum_of_one_record_a_step(variant, preset):
    attention = StepAttention(7, 6, 5, config=AttentionConfig(variant, preset=preset)).double()
    key, query = torch.randn(2, 4, 6, dtype=torch.float64), torch.randn(2, 3, 7, dtype=torch.float64)
    mask = torch.tensor([[True] * 4, [True, True, False, False]])
    with record_kl() as kl:
        prepared = attention.prepare(key, mask)
        for t in range(3):
            attention(query[:, t : t + 1], key, mask=mask, prepared=prepared)
    slow = kl.total()
    with record_kl() as kl:
        scores = attention.scores(query, attention.key_proj(key))
        attention.record_steps(scores, scores, key, mask=mask, steps=torch.ones(2, 3, dtype=torch.bool))
    fast = kl.total()
    assert torch.allclose(slow, fast, rtol=1e-10)
    slow_grads = torch.autograd.grad(slow, list(attention.parameters()))
    for one, other in zip(slow_grads, torch.autograd.grad(fast, list(attention.parameters())), strict=True):
        assert torch.allclose(one, other, atol=1e-9)


def test_padded_steps_have_no_kl():
    attention = StepAttention(7, 6, 5, config=AttentionConfig("BAM-WC"))
    key, mask = torch.randn(2, 4, 6), torch.ones(2, 4, dtype=torch.bool)
    scores = torch.randn(2, 3, 4)
    found = []
    for steps in ([[True] * 3, [True, False, False]], [[True] * 3, [True, True, True]]):
        with record_kl() as kl:
            attention.record_steps(scores, scores, key, mask=mask, steps=torch.tensor(steps))
        found.append(kl.per_call()[0][1])
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] < found[1][1]


def test_checkpoints_of_additive_attention_load():
    plain, ours = (kind(7, 6, 5, config=AttentionConfig("BAM-WC")) for kind in (AdditiveAttention, StepAttention))
    ours.load_state_dict(plain.state_dict())
    query, key = torch.randn(2, 1, 7), torch.randn(2, 4, 6)
    for one, other in zip(plain.eval()(query, key), ours.eval()(query, key), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("variant", ["BAM-LC", "BAM-WC"])
def test_planned_draws_have_the_mean_and_spread_of_the_modules_own(variant):
    torch.manual_seed(3)
    attention = StepAttention(7, 6, 5, config=AttentionConfig(variant, weibull_k=2.0, sigma_q=0.6)).train()
    key, query, count = torch.randn(1, 4, 6), torch.randn(1, 1, 7), 4000
    mask = torch.tensor([[True, True, True, False]])
    many_keys, many_masks = key.expand(count, -1, -1), mask.expand(count, -1)
    with torch.no_grad():
        own = attention(query.expand(count, -1, -1), many_keys, mask=many_masks)[1]
        scores = attention.scores(query, attention.key_proj(key)).expand(count, -1, -1)
        context, planned = attention.planned(scores, many_keys, attention.plan_bias(many_masks, 1))
    assert torch.allclose(context, planned @ key)
    assert not planned[..., 3].any()
    for one, other in ((own, planned), (own.square(), planned.square())):
        error = ((one.var(dim=0) + other.var(dim=0)) / count).sqrt()
        # five standard errors for six comparisons
        assert ((one.mean(dim=0) - other.mean(dim=0)).abs() <= 5.0 * error + 1e-7).all()


class Uniform(torch.nn.Module):
    """Weights of a user's own that draw nothing ahead."""

    name, has_kl, kl_reduction, has_own_dropout, runs_on_edges, is_idle = "uniform", False, None, False, False, False

    def settings(self):
        return {}

    def forward(self, scores, key, value, *, mask, dropout_p):
        open_keys = torch.ones_like(scores) if mask is None else mask.expand(scores.shape).to(scores.dtype)
        weights = open_keys / open_keys.sum(dim=-1, keepdim=True)
        return weights @ value, weights, None

    def on_edges(self, scores, value, edges, ops, *, dropout_p):
        raise NotImplementedError

    def edge_weights(self, scores, edges, ops):
        raise NotImplementedError


def test_weights_of_ones_own_that_cannot_be_drawn_ahead_say_so_and_run_step_by_step():
    attention = StepAttention(7, 6, 5, weights=Uniform())
    key, mask = torch.randn(2, 4, 6), torch.tensor([[True] * 4, [True, True, False, False]])
    assert not attention.draws_ahead
    with record_kl():
        context, weights = attention(torch.randn(2, 1, 7), key, mask=mask)
        assert not attention.needs_kl
    assert torch.allclose(weights[:, 0], mask / mask.sum(dim=1, keepdim=True))
    assert torch.allclose(context, weights @ key)
