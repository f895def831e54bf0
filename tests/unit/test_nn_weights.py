"""BayesianWeights: any score tensor in, the functional's weights out, its KL recorded."""

import pytest
import torch

import bayesattn as ba
from bayesattn import functional, record_kl
from bayesattn.nn import BayesianWeights
from helpers import make_mask

B, H, M, N, D = 2, 3, 5, 7, 4
WC = ba.AttentionConfig("BAM-WC", weibull_k=2.0)


def _module(config: ba.AttentionConfig = WC, **options) -> BayesianWeights:
    return BayesianWeights(config, key_dim=D, num_heads=H, dtype=torch.float64, **options)


def _inputs(*lead: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(*lead, M, N, dtype=torch.float64), torch.randn(*lead, N, D, dtype=torch.float64)


@pytest.mark.parametrize("lead", [(B, H), (B,)])
@pytest.mark.parametrize("kind", ["none", "full", "keys", "dead-rows"])
def test_eval_mode_is_softmax_and_train_mode_samples(lead, kind):
    module, (scores, keys) = _module(), _inputs(*lead)
    heads = H if len(lead) == 2 else 1
    mask = make_mask(kind, B, heads, M, N)
    mask = mask if mask is None or len(lead) == 2 else mask[:, 0]
    first, second = module(scores, keys, mask=mask), module(scores, keys, mask=mask)
    assert not torch.equal(first, second)
    module.eval()
    expected, _ = functional.attention_weights(scores, config=WC, mask=mask, sample=False, need_kl=False)
    assert torch.equal(module(scores, keys, mask=mask), expected)
    if mask is None:
        assert torch.equal(expected, torch.softmax(scores, dim=-1))


@pytest.mark.parametrize("kind", ["none", "full", "keys", "heads", "causal", "broadcast-query", "dead-rows", "nothing"])
@pytest.mark.parametrize("lead", [(B, H), (B,)])
def test_the_recorded_kl_is_the_functional_one_with_the_prior_over_valid_keys(kind, lead):
    heads = H if len(lead) == 2 else 1
    mask = make_mask(kind, B, heads, M, N)
    if mask is not None and len(lead) == 1:
        mask = mask[:, 0] if mask.ndim == 4 else mask
    if kind == "heads" and len(lead) == 1:
        mask = mask[0]
    module, (scores, keys) = _module().eval(), _inputs(*lead)
    with record_kl() as kl:
        module(scores, keys, mask=mask)
    full_mask = None if mask is None else mask.expand(scores.shape).reshape(B, heads, M, N)
    valid = None if full_mask is None else full_mask.any(dim=-2)
    prior = module.bayes_prior(keys.reshape(B, heads, N, D), valid)
    full = scores.reshape(B, heads, M, N)
    _, expected = functional.attention_weights(full, config=WC, log_prior=prior, mask=full_mask, sample=False)
    torch.testing.assert_close(kl.per_call()[0][1], expected.detach(), rtol=1e-12, atol=1e-14)


def test_a_prepared_prior_equals_one_computed_on_the_way():
    module, (scores, keys) = _module().eval(), _inputs(B, H)
    with record_kl() as kl:
        module(scores, keys)
        module(scores, log_prior=module.log_prior(keys))
    first, second = kl.per_call()
    assert torch.equal(first[1], second[1])


def test_the_prior_is_trained_by_the_recorded_kl():
    module, (scores, keys) = _module(), _inputs(B, H)
    with record_kl() as kl:
        module(scores, keys)
    kl.total().backward()
    gradient = module.bayes_prior.weight_in.grad
    assert gradient is not None
    assert bool((gradient != 0.0).any())


def test_inside_a_scope_a_contextual_prior_needs_its_keys():
    module, (scores, _) = _module(), _inputs(B, H)
    module(scores)  # without a scope there is nothing to compare with
    with record_kl(), pytest.raises(ValueError, match=r"prior must be ln Ψ .* for BAM-WC, got None"):
        module(scores)


def test_a_contextual_prior_needs_key_dim():
    with pytest.raises(ValueError, match="key_dim must be the number of features of a key for BAM-LC, got None"):
        BayesianWeights(ba.AttentionConfig("BAM-LC"))
    assert BayesianWeights(ba.AttentionConfig("BAM-LF")).bayes_prior is None


def test_one_network_per_head_if_asked():
    module = _module(ba.AttentionConfig("BAM-WC", prior_per_head=True))
    assert module.bayes_prior.num_networks == H
    scores, keys = _inputs(B, H)
    with record_kl() as kl:
        module(scores, keys)
    assert len(kl) == 1
