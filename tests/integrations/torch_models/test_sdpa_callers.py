"""Hand-written modules that call F.scaled_dot_product_attention: intercepted while sampling, untouched otherwise."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bayesattn as ba
from bayesattn.convert import bayesianize, conversion_report, restore


class Block(nn.Module):
    """Grouped-query, causal or masked, any number of leading axes."""

    def __init__(self, causal: bool = True, dropout_p: float = 0.0) -> None:
        super().__init__()
        self.head_dim, self.num_heads, self.num_kv_heads = 5, 4, 2
        self.causal, self.dropout_p = causal, dropout_p
        self.query, self.key, self.value = nn.Linear(6, 20), nn.Linear(6, 10), nn.Linear(6, 10)

    def forward(self, x, mask=None):
        q, k, v = (p(x).unflatten(-1, (-1, 5)).transpose(-3, -2) for p in (self.query, self.key, self.value))
        p = self.dropout_p if self.training else 0.0
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=p, is_causal=self.causal and mask is None, enable_gqa=True
        )
        return out.transpose(-3, -2).flatten(-2)


def masks() -> dict[str, torch.Tensor | None]:
    boolean = torch.ones(3, 1, 7, 7, dtype=torch.bool).tril()
    boolean[0, :, :, :2] = False
    boolean[0, :, 0] = False
    return {
        "causal": None,
        "boolean": boolean,
        "additive": torch.zeros(7, 7).masked_fill(torch.ones(7, 7).triu(1) > 0, -torch.inf),
    }


@pytest.mark.parametrize("kind", ["causal", "boolean", "additive"])
def test_exact_when_off_sampled_when_on(kind):
    model, x, mask = Block().eval(), torch.randn(3, 7, 6), masks()[kind]
    before = model(x, mask)
    bayesianize(model, ba.AttentionConfig("BAM-WC", weibull_k=1.0))
    assert torch.equal(model(x, mask), before)
    with ba.sampling(model), ba.record_kl(model) as kl:
        assert not torch.equal(model(x, mask), before)
    assert [value.shape for _, value in kl.per_call()] == [(3,)]


@pytest.mark.parametrize("kind", ["causal", "boolean", "additive"])
def test_vanishing_noise_gives_the_mean(kind):
    model, x, mask = Block().eval(), torch.randn(3, 7, 6), masks()[kind]
    before = model(x, mask)
    bayesianize(model, ba.AttentionConfig("BAM-LF", sigma_q=1e-7))
    with ba.sampling(model):
        # two float32 softmaxes in different order, and noise of 1e-7
        torch.testing.assert_close(model(x, mask), before, atol=2e-6, rtol=0.0)


def test_recording_without_sampling_keeps_the_output_exact():
    model, x = Block().eval(), torch.randn(3, 7, 6)
    before = model(x)
    bayesianize(model, ba.AttentionConfig("BAM-WC"))
    with ba.record_kl() as kl:
        assert torch.equal(model(x), before)
    with ba.sampling(model), ba.record_kl() as sampled:
        model(x)
    # the KL depends on the scores alone, not on the draw; the two ways of summing differ in the last bits
    torch.testing.assert_close(kl.total(), sampled.total(), rtol=1e-5, atol=0.0)


def test_more_leading_axes_become_one_batch():
    model, x = Block().eval(), torch.randn(2, 3, 7, 6)
    before = model(x)
    bayesianize(model, ba.AttentionConfig("BAM-LF", sigma_q=1e-7))
    with ba.sampling(model):
        torch.testing.assert_close(model(x), before, atol=2e-6, rtol=0.0)


def test_restore_leaves_no_trace():
    model = Block().eval()
    before, state = sorted(vars(model)), copy.deepcopy(model.state_dict())
    bayesianize(model, ba.AttentionConfig("BAM-WC"))
    assert type(model).__name__ == "Block"
    restore(model)
    assert type(model) is Block
    assert sorted(vars(model)) == before
    assert list(model.state_dict()) == list(state)


def test_a_copy_samples_on_its_own():
    model = bayesianize(Block().eval(), ba.AttentionConfig("BAM-WC", weibull_k=1.0))
    twin, x = copy.deepcopy(model), torch.randn(3, 7, 6)
    with ba.sampling(twin):
        assert not torch.equal(twin(x), model(x))
    restore(twin)
    assert conversion_report(model).converted == ("",)


def test_mc_dropout_uses_the_module_s_rate():
    model, x = Block(dropout_p=0.5).eval(), torch.randn(3, 7, 6)
    before = model(x)
    bayesianize(model, ba.AttentionConfig("BAM-LF", sigma_q=1e-7))
    with ba.sampling(model, dropout=True):
        assert (model(x) - before).abs().max() > 0.1


def test_a_contextual_prior_needs_the_head_dimension():
    class Anonymous(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x)

    with pytest.raises(ValueError, match="attribute head_dim"):
        bayesianize(Anonymous(), ba.AttentionConfig("BAM-WC"))
    model = bayesianize(Anonymous(), ba.AttentionConfig("BAM-WF")).train()
    with ba.record_kl() as kl:
        model(torch.randn(2, 3, 4, 5))
    assert torch.isfinite(kl.total())
