"""The contextual prior: a softmax over valid keys of a two-layer network, per head or shared, in log space."""

import math

import numpy as np
import pytest
import torch

from bayesattn import AttentionConfig
from bayesattn.priors import ContextualPrior, contextual_log_prior
from helpers import assert_finite

B, H, N, D, HIDDEN = 2, 3, 7, 5, 11


def _prior(**options) -> ContextualPrior:
    config = AttentionConfig("BAM-WC", prior_hidden_dim=HIDDEN, **options)
    prior = ContextualPrior(D, H, config, dtype=torch.float64)
    for parameter in prior.parameters():
        torch.nn.init.normal_(parameter)  # non-zero biases, so that a forgotten one shows
    return prior


def _by_hand(prior: ContextualPrior, key: torch.Tensor, valid: np.ndarray) -> np.ndarray:
    """Ψ by loops over examples, heads and keys."""
    networks = [p.detach().numpy() for p in (prior.weight_in, prior.bias_in, prior.weight_out, prior.bias_out)]
    result = np.zeros((B, H, N))
    for b in range(B):
        for h in range(H):
            weight_in, bias_in, weight_out, bias_out = (p[min(h, p.shape[0] - 1)] for p in networks)
            hidden = np.maximum(key[b, h].numpy() @ weight_in + bias_in, 0.0)
            powers = np.exp((hidden @ weight_out + bias_out)[:, 0]) * valid[b, h]
            result[b, h] = powers / powers.sum()
    return result


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_the_prior_is_the_network_of_the_paper(per_head, masked):
    prior, key = _prior(prior_per_head=per_head), torch.randn(B, H, N, D, dtype=torch.float64)
    valid = torch.rand(B, 1, N) < 0.6 if masked else torch.ones(B, 1, N, dtype=torch.bool)
    valid[..., 2] = True
    log_psi = prior(key, valid if masked else None)
    assert log_psi.shape == (B, H, 1, N)
    expected = _by_hand(prior, key, np.broadcast_to(valid.numpy(), (B, H, N)))
    np.testing.assert_allclose(log_psi.exp().detach()[:, :, 0], expected, rtol=1e-12)
    assert bool((log_psi.detach()[:, :, 0].isneginf() == ~valid).all())


@pytest.mark.parametrize("per_head", [False, True])
def test_the_parameter_count_is_that_of_two_linear_layers(per_head):
    one = (D + 1) * HIDDEN + HIDDEN + 1
    assert sum(p.numel() for p in _prior(prior_per_head=per_head).parameters()) == one * (H if per_head else 1)


def test_heads_share_one_network_unless_asked_otherwise():
    key = torch.randn(B, 1, N, D, dtype=torch.float64).expand(B, H, N, D)
    shared, separate = _prior()(key), _prior(prior_per_head=True)(key)
    assert torch.equal(shared[:, 0], shared[:, 1])
    assert not torch.equal(separate[:, 0], separate[:, 1])


def test_the_prior_is_one_distribution_over_keys_in_any_order():
    prior, key, order = _prior(), torch.randn(B, H, N, D, dtype=torch.float64), torch.randperm(N)
    log_psi = prior(key)
    torch.testing.assert_close(log_psi.exp().sum(dim=-1), torch.ones(B, H, 1, dtype=torch.float64))
    torch.testing.assert_close(prior(key[:, :, order]), log_psi[..., order])


@pytest.mark.parametrize("detach", [False, True])
def test_detach_keys_keeps_the_gradient_out_of_the_keys_only(detach):
    prior = _prior(detach_keys=detach)
    key = torch.randn(B, H, N, D, dtype=torch.float64, requires_grad=True)
    (prior(key) * torch.randn(N, dtype=torch.float64)).sum().backward()
    assert (key.grad is None) == detach
    assert all(p.grad is not None and bool((p.grad != 0).any()) for p in (prior.weight_in, prior.weight_out, prior.bias_in))


def test_every_parameter_gets_a_gradient():
    """DDP insists, also for the last bias, which cancels in the softmax."""
    prior = _prior()
    (prior(torch.randn(B, H, N, D, dtype=torch.float64)) * torch.randn(N, dtype=torch.float64)).sum().backward()
    assert all(p.grad is not None for p in prior.parameters())
    assert prior.bias_out.grad is not None
    assert float(prior.bias_out.grad.abs().max()) < 1e-12


def test_keys_that_are_not_valid_do_not_matter_and_get_no_gradient():
    prior, valid = _prior(), torch.ones(B, 1, N, dtype=torch.bool)
    valid[:, :, 3] = False
    key = torch.randn(B, H, N, D, dtype=torch.float64)
    changed = key.clone()
    changed[:, :, 3] = 1e3
    changed.requires_grad_()
    log_psi = prior(changed, valid)
    assert torch.equal(log_psi, prior(key, valid))
    torch.where(valid[:, :, None], log_psi, 0.0).square().sum().backward()
    assert changed.grad is not None
    assert bool((changed.grad[:, :, 3] == 0).all())
    assert_finite(changed.grad)


def test_without_any_valid_key_the_prior_is_zero_with_zero_gradient():
    logits = torch.randn(B, H, N, requires_grad=True)
    valid = torch.ones(B, 1, N, dtype=torch.bool)
    valid[1] = False
    log_psi = contextual_log_prior(logits, valid)
    assert bool((log_psi[1] == 0.0).all())
    torch.testing.assert_close(log_psi[0].exp().sum(dim=-1), torch.ones(H, 1))
    log_psi.square().sum().backward()
    assert_finite(logits.grad)
    assert logits.grad is not None
    assert bool((logits.grad[1] == 0.0).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_log_psi_is_float32_or_better_and_survives_extreme_logits(dtype):
    logits = torch.tensor([[[-1e4, 0.0, 1e4]]], dtype=dtype)
    log_psi = contextual_log_prior(logits)
    assert log_psi.dtype == torch.promote_types(dtype, torch.float32)
    # Ψ itself would be 0, its logarithm −inf: kept as a logarithm it is exact (bfloat16 rounds 1e4 to 9984)
    torch.testing.assert_close(log_psi.flatten(), logits.to(log_psi.dtype).flatten() - logits[0, 0, 2].to(log_psi.dtype))
    assert_finite(log_psi)


def test_ten_thousand_keys_keep_their_logarithm():
    log_psi = contextual_log_prior(torch.zeros(1, 1, 10**5))
    torch.testing.assert_close(log_psi, torch.full((1, 1, 1, 10**5), -math.log(10**5)))


@pytest.mark.parametrize("sizes", [(0, 3), (4, 0)])
def test_sizes_must_be_positive(sizes):
    with pytest.raises(
        ValueError, match=rf"key_dim and num_heads must be integers of at least 1, got {sizes[0]} and {sizes[1]}"
    ):
        ContextualPrior(*sizes, AttentionConfig("BAM-WC"))


def test_initial_weights_are_he_scaled_with_zero_biases():
    prior = ContextualPrior(400, 1, AttentionConfig("BAM-WC", prior_hidden_dim=300))
    # 120 000 draws: the standard deviation is within 1 % (five standard errors)
    assert float(prior.weight_in.detach().std()) == pytest.approx(math.sqrt(2 / 400), rel=0.011)
    assert not bool(prior.bias_in.any())
    assert not bool(prior.bias_out.any())
    assert "key_dim=400" in repr(prior)
