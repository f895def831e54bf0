"""Latent alignments: bounds that bound, estimators that estimate, Dirichlet draws with the right gradient."""

import pytest
import torch
from torch.distributions import Dirichlet, kl_divergence

from bayesattn import record_kl
from bayesattn_recipes.baselines import AttentionChoice, InferenceNetwork, LatentAlignment, categorical, dirichlet
from bayesattn_recipes.baselines.latent import run_packed
from bayesattn_recipes.baselines.variational import enum_bound, exact_nll, marginal_log_probs, sample_bound
from helpers import assert_finite, assert_within_standard_errors

PRIOR = torch.tensor([0.4, -0.3, 1.1, 0.2], dtype=torch.float64)
POSTERIOR = torch.tensor([-0.6, 0.5, 0.3, 0.9], dtype=torch.float64)
LIKELIHOOD = torch.tensor([-2.0, -7.0, -4.5, -3.0], dtype=torch.float64)
DRAWS = 20_011


def test_exact_likelihood_is_the_log_of_the_mixture():
    nll = exact_nll(torch.log_softmax(PRIOR, dim=0), LIKELIHOOD)
    expected = -torch.log((torch.softmax(PRIOR, dim=0) * LIKELIHOOD.exp()).sum())
    assert torch.allclose(nll, expected, rtol=1e-12)


def test_enum_bounds_the_exact_likelihood_and_meets_it_at_the_true_posterior():
    log_p, log_q = torch.log_softmax(PRIOR, dim=0), torch.log_softmax(POSTERIOR, dim=0)
    exact = exact_nll(log_p, LIKELIHOOD)
    assert sum(enum_bound(log_p, log_q, LIKELIHOOD)) > exact + 0.1
    best = torch.log_softmax(log_p + LIKELIHOOD, dim=0)
    assert torch.allclose(torch.stack(list(enum_bound(log_p, best, LIKELIHOOD))).sum(), exact, rtol=1e-12)


def gradients_of(bound_of, rows):
    leaves = [value.expand(rows, 4).clone().requires_grad_() for value in (PRIOR, POSTERIOR, LIKELIHOOD)]
    prior, posterior, likelihood = leaves
    bound = bound_of(categorical.log_probs(prior), categorical.log_probs(posterior), likelihood)
    (bound.nll + bound.kl).sum().backward()
    return [leaf.grad for leaf in leaves]


def one_draw(use_baseline):
    def bound(log_p, log_q, likelihood):
        chosen = categorical.draw(log_q)
        value = likelihood.gather(1, chosen[:, None]).squeeze(1)
        # a constant near the mean log-likelihood, as a soft context gives it
        return sample_bound(log_p, log_q, chosen, value, torch.full_like(value, -4.0) if use_baseline else 0.0)

    return bound


@pytest.mark.parametrize("use_baseline", [False, True])
def test_sampled_bound_has_the_gradient_of_the_enumerated_one(use_baseline):
    exact = gradients_of(enum_bound, 1)
    drawn = gradients_of(one_draw(use_baseline), DRAWS)
    for name, ours, expected in zip(("prior", "posterior", "likelihood"), drawn, exact, strict=True):
        for key in range(4):
            assert_within_standard_errors(ours[:, key], float(expected[0, key]), (name, key))


def test_soft_baseline_reduces_the_variance_of_the_posterior_gradient():
    plain, reduced = (gradients_of(one_draw(use), DRAWS)[1].var(dim=0).sum() for use in (False, True))
    assert reduced < 0.3 * plain


def test_keys_that_do_not_exist_change_nothing():
    mask = torch.tensor([True, True, True, True, False])
    wide = [torch.cat([value, torch.tensor([13.0], dtype=torch.float64)]) for value in (PRIOR, POSTERIOR, LIKELIHOOD)]
    leaves = [value.requires_grad_() for value in wide]
    log_p, log_q = (categorical.log_probs(leaf, mask) for leaf in leaves[:2])
    narrow = [torch.log_softmax(value, dim=0) for value in (PRIOR, POSTERIOR)]
    for ours, theirs in zip(enum_bound(log_p, log_q, leaves[2]), enum_bound(*narrow, LIKELIHOOD), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12)
        ours.backward(retain_graph=True)
    assert torch.allclose(exact_nll(log_p, leaves[2]), exact_nll(narrow[0], LIKELIHOOD), rtol=1e-12)
    assert all(leaf.grad is None or (leaf.grad[4] == 0.0 and bool(leaf.grad.isfinite().all())) for leaf in leaves)


@pytest.mark.parametrize("count", [1, 2, 3, 4, None])
def test_parts_are_the_largest_keys_and_the_rest_and_their_mixture_is_the_whole(count):
    scores = torch.randn(3, 5, 7, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(3, 5, 7) < 0.6
    mask[..., 2] = True
    mask[0, 0] = torch.tensor([False, False, True, False, False, False, False])
    log_p = categorical.log_probs(scores, mask)
    parts = categorical.largest(log_p, count)
    m = 7 if count is None else count + 1
    assert parts.log_probs.shape == (3, 5, m)
    mixture = (parts.log_probs.exp().unsqueeze(-1) * parts.weights).sum(dim=-2)
    assert torch.allclose(mixture, log_p.exp(), rtol=1e-12)
    if count is not None:
        assert torch.equal(parts.log_probs[..., :count], log_p.topk(count).values)
        has_rest = mask.sum(dim=-1) > count
        assert torch.allclose(parts.weights.sum(dim=-1)[..., -1], has_rest.double())
        assert torch.equal(parts.log_probs[..., -1] > -torch.inf, has_rest)
    # the likelihood of a key is that of its value, of the rest that of its mean: exact where the likelihood is linear
    values = torch.rand(3, 5, 7, 1, dtype=torch.float64)
    nll = exact_nll(parts.log_probs, (parts.weights @ values).squeeze(-1).clamp_min(1e-300).log())
    assert torch.allclose(nll, -((log_p.exp() * values.squeeze(-1)).sum(dim=-1)).log(), rtol=1e-12)
    nll.sum().backward()
    assert_finite(scores.grad)
    assert not scores.grad[~mask].any()


def test_parts_of_a_sure_choice_have_finite_gradients():
    scores = torch.tensor([[0.0, 2000.0, 1.0, -500.0]], requires_grad=True)
    parts = categorical.largest(categorical.log_probs(scores), 1)
    exact_nll(parts.log_probs, (parts.weights @ torch.rand(4, 1)).squeeze(-1).log()).sum().backward()
    assert_finite(scores.grad)


def test_draws_follow_their_probabilities():
    log_p = categorical.log_probs(torch.tensor([0.5, -1.0, 0.0, 9.0]), torch.tensor([True, True, True, False]))
    drawn = categorical.draw(log_p.expand(DRAWS, 4))
    for key in range(4):
        assert_within_standard_errors((drawn == key).double(), float(log_p[key].exp()), key)


def test_row_without_keys_has_no_choice():
    log_p = categorical.log_probs(torch.randn(3), torch.zeros(3, dtype=torch.bool))
    assert not categorical.one_hot(categorical.draw(log_p), log_p).any()


def test_marginal_is_a_distribution():
    log_probs = torch.log_softmax(torch.randn(5, 4, 7, dtype=torch.float64), dim=-1)
    marginal = marginal_log_probs(torch.log_softmax(PRIOR, dim=0).expand(5, 4), log_probs)
    expected = torch.einsum("n,bnc->bc", torch.softmax(PRIOR, dim=0), log_probs.exp())
    assert torch.allclose(marginal.exp(), expected, rtol=1e-12)


ALPHA = torch.tensor([0.7, 2.3, 0.08, 5.0], dtype=torch.float64)


def test_dirichlet_draws_have_its_mean_and_variance():
    weights = dirichlet.draw(ALPHA.expand(DRAWS, 4))
    mean = ALPHA / ALPHA.sum()
    second = mean * (ALPHA + 1.0) / (ALPHA.sum() + 1.0)
    for key in range(4):
        assert_within_standard_errors(weights[:, key], float(mean[key]), ("mean", key))
        assert_within_standard_errors(weights[:, key].square(), float(second[key]), ("second moment", key))


def test_dirichlet_gradient_is_that_of_the_second_moments():
    exact = ALPHA.clone().requires_grad_()
    factor = torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)
    total = exact.sum()
    (factor * exact * (exact + 1.0) / (total * (total + 1.0))).sum().backward()
    alpha = ALPHA.expand(DRAWS, 4).clone().requires_grad_()
    (factor * dirichlet.draw(alpha).square()).sum().backward()
    for key in range(4):
        assert_within_standard_errors(alpha.grad[:, key], float(exact.grad[key]), key)


def test_dirichlet_of_tiny_concentrations_is_finite():
    alpha = torch.full((997, 3), 4.5e-5, requires_grad=True)
    weights = dirichlet.draw(alpha)
    weights[:, 0].sum().backward()
    assert_finite(weights, alpha.grad)
    # nearly all mass on one key
    assert float(weights.detach().max(dim=-1).values.mean()) > 0.99


def test_dirichlet_kl_is_the_closed_form_and_ignores_missing_keys():
    beta = torch.tensor([1.2, 0.4, 3.0, 0.9], dtype=torch.float64)
    mask = torch.tensor([True, True, False, True])
    assert torch.allclose(dirichlet.kl(ALPHA, beta), kl_divergence(Dirichlet(ALPHA), Dirichlet(beta)), rtol=1e-10)
    masked = kl_divergence(Dirichlet(ALPHA[mask]), Dirichlet(beta[mask]))
    assert torch.allclose(dirichlet.kl(ALPHA, beta, mask), masked, rtol=1e-10)
    assert float(dirichlet.kl(ALPHA, beta, torch.zeros(4, dtype=torch.bool))) == 0.0


VARIANTS = ("variational-exact", "variational-enum", "variational-sample", "variational-dirichlet")


def latent(variant):
    config = AttentionChoice(variant, inference_dim=3)
    network = None if variant == "variational-exact" else InferenceNetwork(5, 7, config.inference_dim)
    return LatentAlignment(config, network)


def call(module, prior, keys):
    """A toy output layer: ln p(y | context) is a quadratic of the context."""
    source, target = torch.randn(2, 4, 5), torch.randn(2, 3, 7)
    mask = torch.tensor([[True] * 4, [True, True, False, False]])

    def likelihood(context):
        return -(context - 1.0).square().sum(dim=-1)

    return module(
        prior,
        source,
        [4, 2],
        target,
        [3, 1],
        mask=mask,
        steps=torch.tensor([[True] * 3, [True, False, False]]),
        each_key=lambda: likelihood(keys).unsqueeze(1).expand(2, 3, 4),
        mixed=lambda weights: likelihood(weights @ keys.unsqueeze(1)),
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_trains_prior_posterior_and_keys(variant):
    module, prior, keys = latent(variant), torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 4, 6, requires_grad=True)
    with record_kl() as kl:
        nll = call(module, prior, keys)
    loss = nll.sum() + kl.total()
    loss.backward()
    assert nll.shape == (2, 3)
    assert_finite(nll, prior.grad, keys.grad, *(parameter.grad for parameter in module.parameters()))
    assert prior.grad.any()
    assert all(parameter.grad.any() for parameter in module.parameters() if parameter.ndim > 1)
    # keys beyond the length of the second sentence
    assert not prior.grad[1, :, 2:].any()
    assert not keys.grad[1, 2:].any()


@pytest.mark.parametrize("variant", VARIANTS)
def test_eval_mode_uses_the_prior_alone_and_repeats(variant):
    module, prior, keys = latent(variant).eval(), torch.randn(2, 3, 4), torch.randn(2, 4, 6)
    first, again = call(module, prior, keys), call(module, prior, keys)
    assert torch.equal(first, again)
    if variant != "variational-dirichlet":
        assert torch.equal(first, call(latent("variational-exact"), prior, keys))


def test_packed_lstm_is_the_lstm_of_each_sequence_alone():
    lstm = torch.nn.LSTM(5, 3, num_layers=2, bidirectional=True, batch_first=True).double()
    inputs = torch.randn(3, 7, 5, dtype=torch.float64)
    outputs = run_packed(lstm, inputs, [4, 7, 1])
    for row, length in enumerate([4, 7, 1]):
        alone = lstm(inputs[row : row + 1, :length])[0][0]
        assert torch.allclose(outputs[row, :length], alone, atol=1e-12)
        assert not outputs[row, length:].any()


def test_packed_lstm_gives_padding_no_gradient():
    lstm = torch.nn.LSTM(5, 3, bidirectional=True, batch_first=True).double()
    inputs = torch.randn(3, 7, 5, dtype=torch.float64, requires_grad=True)
    run_packed(lstm, inputs, [4, 7, 1]).square().sum().backward()
    for row, length in enumerate([4, 7, 1]):
        alone = inputs[row : row + 1, :length].detach().requires_grad_()
        lstm(alone)[0].square().sum().backward()
        assert torch.allclose(inputs.grad[row, :length], alone.grad[0], atol=1e-12)
        assert not inputs.grad[row, length:].any()


@pytest.mark.parametrize("lengths", [[4, 7], [4, 8, 1], [4, 7, 0]])
def test_packed_lstm_refuses_lengths_that_are_none(lengths):
    lstm = torch.nn.LSTM(5, 3, bidirectional=True, batch_first=True)
    with pytest.raises(ValueError, match=r"lengths must be 3 integers from 1 to 7, got \[4, .*"):
        run_packed(lstm, torch.zeros(3, 7, 5), lengths)


def test_inference_network_is_required_where_there_is_a_posterior():
    with pytest.raises(ValueError, match="inference must be a network for variational-enum, got NoneType"):
        LatentAlignment(AttentionChoice("variational-enum"), None)
