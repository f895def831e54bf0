"""AdditiveAttention: Bahdanau's scores by hand, one query per step, one KL per step."""

import numpy as np
import pytest
import torch

import bayesattn as ba
from bayesattn import functional, record_kl
from bayesattn.nn import AdditiveAttention

B, M, N, DQ, DK, DV, HIDDEN = 2, 3, 7, 5, 4, 6, 11
WC = ba.AttentionConfig("BAM-WC", weibull_k=2.0)


def _module(config: ba.AttentionConfig = WC, **options) -> AdditiveAttention:
    return AdditiveAttention(DQ, DK, HIDDEN, config=config, dtype=torch.float64, **options)


def _inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    mask = torch.ones(B, N, dtype=torch.bool)
    mask[0, 4:] = False
    return *(torch.randn(B, *size, dtype=torch.float64) for size in ((M, DQ), (N, DK), (N, DV))), mask


def _scores_by_hand(module: AdditiveAttention, query: torch.Tensor, key: torch.Tensor) -> np.ndarray:
    arrays = {name: parameter.detach().numpy() for name, parameter in module.named_parameters()}
    scores = np.zeros((B, M, N))
    for b, i, j in np.ndindex(B, M, N):
        hidden = arrays["query_proj.weight"] @ query[b, i].numpy() + arrays["key_proj.weight"] @ key[b, j].numpy()
        hidden = np.tanh(hidden + arrays.get("key_proj.bias", 0.0))
        scores[b, i, j] = arrays["score_proj.weight"][0] @ hidden
    return scores


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_eval_mode_is_bahdanau_attention(bias, masked):
    module, (query, key, value, mask) = _module(bias=bias).eval(), _inputs()
    context, weights = module(query, key, value, mask=mask if masked else None)
    powers = np.exp(_scores_by_hand(module, query, key)) * (mask[:, None].numpy() if masked else 1.0)
    expected = powers / powers.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(weights.detach(), expected, rtol=1e-11, atol=1e-15)
    np.testing.assert_allclose(context.detach(), expected @ value.numpy(), rtol=1e-11)


def test_the_keys_are_the_values_unless_given():
    module, (query, key, _, mask) = _module().eval(), _inputs()
    context, weights = module(query, key, mask=mask)
    assert torch.equal(context, weights @ key)


def test_prepared_keys_change_nothing():
    module, (query, key, value, mask) = _module().eval(), _inputs()
    with record_kl() as kl:
        prepared = module.prepare(key, mask)
        for options in ({}, {"prepared": prepared}):
            context, _ = module(query, key, value, mask=mask, **options)
        expected, _ = module(query, key, value, mask=mask)
    assert torch.equal(context, expected)
    values = [value for _, value in kl.per_call()]
    assert torch.equal(values[0], values[1])


def test_every_step_draws_and_records_once():
    module, (_, key, value, mask) = _module(), _inputs()
    with record_kl(module) as kl:
        prepared, contexts = module.prepare(key, mask), []
        for _ in range(5):
            contexts.append(module(torch.ones(B, 1, DQ, dtype=torch.float64), key, value, mask=mask, prepared=prepared)[0])
    assert len(kl) == 5
    assert list(kl.per_layer()) == ["weights"]
    assert all(not torch.equal(contexts[0], other) for other in contexts[1:])
    kl.total().backward()
    assert module.weights.bayes_prior.weight_in.grad is not None


def test_the_kl_of_a_step_is_the_functional_one():
    module, (query, key, value, mask) = _module().eval(), _inputs()
    with record_kl() as kl:
        module(query, key, value, mask=mask)
    scores = torch.from_numpy(_scores_by_hand(module, query, key))[:, None]
    prior = module.weights.bayes_prior(key[:, None], mask[:, None])
    _, expected = functional.attention_weights(scores, config=WC, log_prior=prior, mask=mask[:, None, None], sample=False)
    torch.testing.assert_close(kl.per_call()[0][1], expected.detach(), rtol=1e-11, atol=0.0)


def test_keys_prepared_outside_a_scope_are_refused_inside():
    """They carry no prior; the KL would have nothing to be compared with."""
    module, (query, key, value, mask) = _module(), _inputs()
    prepared = module.prepare(key, mask)
    with record_kl(), pytest.raises(ValueError, match=r"prior must be ln Ψ .* for BAM-WC, got None"):
        module(query, key, value, mask=mask, prepared=prepared)


def test_an_example_without_keys_gives_zero_and_no_nan():
    module, (query, key, value, mask) = _module(), _inputs()
    mask[1] = False
    key.requires_grad_()
    with record_kl() as kl:
        context, weights = module(query, key, value, mask=mask)
    (context.sum() + kl.total()).backward()
    assert bool((weights[1] == 0.0).all())
    assert bool((context[1] == 0.0).all())
    assert key.grad is not None
    assert bool(key.grad.isfinite().all())
    assert bool((key.grad[1] == 0.0).all())
