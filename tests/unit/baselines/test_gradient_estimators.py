"""Bias and variance of every rival's gradient, on problems whose outcomes can all be listed or integrated.

A gradient that is drawn has a mean and a variance, and both are known here: by listing every outcome with its probability,
by an integral over one variable, or in closed form. The draws are held to them in standard errors.
"""

import itertools
import math

import pytest
import torch
from scipy import integrate
from torch import nn
from torch.distributions import Categorical, Dirichlet, kl_divergence

from bayesattn import record_kl
from bayesattn_recipes.baselines import (
    AttentionChoice,
    GaussianContext,
    LatentAlignment,
    build_weights,
    dirichlet,
    with_score_function,
)
from bayesattn_recipes.baselines.sampled_kl import sampled_kl
from bayesattn_recipes.baselines.variational import exact_nll
from helpers import assert_within_standard_errors

DRAWS = 20_011


def assert_moments(draws, mean, variance, name):
    """Entry by entry, `draws` have this mean, and their squared distance from it this mean."""
    for entry, (expected, spread) in enumerate(zip(mean.flatten().tolist(), variance.flatten().tolist(), strict=True)):
        column = draws.flatten(1)[:, entry]
        assert_within_standard_errors(column, expected, (name, "mean", entry))
        assert_within_standard_errors((column - expected).square(), spread, (name, "variance", entry))


def moments_of(outcomes):
    """Mean and variance of a gradient from all (probability, gradient) there are."""
    probability, gradient = (torch.stack(column) for column in zip(*outcomes, strict=True))
    weight = probability.view(-1, *[1] * (gradient.ndim - 1))
    mean = (weight * gradient).sum(dim=0)
    return mean, (weight * (gradient - mean).square()).sum(dim=0)


# hard attention: two steps over three keys, the second loss depends on both choices
SCORES = torch.tensor([[0.3, -0.5, 0.9], [-0.2, 0.4, 0.1]], dtype=torch.float64)
FIRST = torch.tensor([7.0, 5.0, 6.0], dtype=torch.float64)
SECOND = torch.tensor([[6.0, 9.0, 5.5], [5.0, 6.5, 8.0], [7.5, 6.0, 5.0]], dtype=torch.float64)


class TwoSteps(nn.Module):
    """A "decoder" of two losses, each of the choices so far."""

    def __init__(self, scores, baseline):
        super().__init__()
        self.scores, self.weights = scores, build_weights(AttentionChoice("hard-reinforce", baseline=baseline)).double()
        # a moving average that has seen many losses of 5.5
        self.weights.average_cost.fill_(5.5)
        self.weights.num_averaged.fill_(1e6)

    def forward(self):
        first, second = (self.weights(self.scores[:, t : t + 1])[:, 0] for t in range(2))
        return torch.stack([first @ FIRST, torch.einsum("bi,bj,ij->b", first, second, SECOND)], dim=1)


@pytest.mark.parametrize("baseline", ["none", "moving-average", "self-critical"])
def test_reinforce_has_the_moments_of_all_nine_outcomes(baseline):
    p = torch.softmax(SCORES, dim=-1)
    second = p[0] @ SECOND @ p[1]
    subtracted = {"none": [0.0, 0.0], "moving-average": [11.0, 5.5], "self-critical": [p[0] @ FIRST + second, second]}
    outcomes = []
    for i, j in itertools.product(range(3), repeat=2):
        to_go = [FIRST[i] + SECOND[i, j], SECOND[i, j]]
        rows = [(to_go[t] - subtracted[baseline][t]) * (torch.eye(3)[key].double() - p[t]) for t, key in enumerate((i, j))]
        outcomes.append((p[0, i] * p[1, j], torch.stack(rows)))
    scores = SCORES.expand(DRAWS, 2, 3).clone().requires_grad_()
    model = TwoSteps(scores, baseline)
    with_score_function(model, model).sum().backward()
    assert_moments(scores.grad, *moments_of(outcomes), baseline)


# the relaxed choice between two keys is one logistic variable: W₁ = σ((Φ₁ − Φ₂ + L) / τ)
GAP = 0.6


def relaxed_moments(temperature):
    """Mean and variance of d f(W₁) / dΦ₁ with f(w) = (3 w − 1)², by integrals over L."""

    def gradient(x):
        w = 1.0 / (1.0 + math.exp(-(GAP + x) / temperature))
        return 6.0 * (3.0 * w - 1.0) * w * (1.0 - w) / temperature

    def expect(f):
        # the density of L beyond ±40 is below e⁻⁴⁰; W₁ changes near −GAP
        def integrand(x):
            return f(x) * math.exp(-abs(x)) / (1.0 + math.exp(-abs(x))) ** 2

        return integrate.quad(integrand, -40.0, 40.0, points=[-GAP], limit=200)[0]

    mean = expect(gradient)
    return mean, expect(lambda x: (gradient(x) - mean) ** 2)


@pytest.mark.parametrize("temperature", [2.0, 0.5, 0.1])
def test_gumbel_gradient_has_the_moments_of_the_relaxation(temperature):
    scores = torch.tensor([[[GAP, 0.0]]], dtype=torch.float64).expand(DRAWS, 1, 2).clone().requires_grad_()
    weights = build_weights(AttentionChoice("hard-gumbel", temperature=temperature))(scores)
    (3.0 * weights[..., 0] - 1.0).square().sum().backward()
    mean, variance = (torch.tensor([value]) for value in relaxed_moments(temperature))
    assert_moments(scores.grad[:, 0, :1], mean, variance, temperature)


# latent alignments: four keys, one step
PRIOR = torch.tensor([0.4, -0.3, 1.1, 0.2], dtype=torch.float64)
POSTERIOR = torch.tensor([-0.6, 0.5, 0.3, 0.9], dtype=torch.float64)
KEYS = torch.tensor([1.4, -0.8, 2.1, 0.3], dtype=torch.float64)


def log_likelihood(context):
    return -2.0 - (context - 1.0).square()


class Given(nn.Module):
    """An "inference network" whose scores are a leaf, one for every draw."""

    def __init__(self, rows):
        super().__init__()
        self.scores = nn.Parameter(POSTERIOR.expand(rows, 1, 4).clone())

    def forward(self):
        return self.scores


def posterior_gradients(variant, rows):
    module = LatentAlignment(AttentionChoice(variant), Given(rows))
    with record_kl() as kl:
        nll = module(
            PRIOR.expand(rows, 1, 4),
            each_key=lambda: log_likelihood(KEYS).expand(rows, 1, 4),
            mixed=lambda weights: log_likelihood(weights @ KEYS),
        )
    # a scope's total is a mean over the examples
    (nll.sum() + rows * kl.total()).backward()
    return module.inference.scores.grad


def test_sample_has_the_moments_of_its_four_outcomes_and_the_mean_of_enum():
    q = POSTERIOR.clone().requires_grad_()
    kl_divergence(Categorical(logits=q), Categorical(logits=PRIOR)).backward()
    probability = torch.softmax(POSTERIOR, dim=0)
    # the baseline: what the soft context of the prior makes likely
    baseline = log_likelihood(torch.softmax(PRIOR, dim=0) @ KEYS)
    advantages = baseline - log_likelihood(KEYS)
    outcomes = [(probability[j], advantages[j] * (torch.eye(4)[j].double() - probability) + q.grad) for j in range(4)]
    mean, variance = moments_of(outcomes)
    assert torch.allclose(posterior_gradients("variational-enum", 1)[0, 0], mean, rtol=1e-10)
    assert_moments(posterior_gradients("variational-sample", DRAWS)[:, 0], mean, variance, "sample")


def test_gradient_of_the_exact_marginal_is_the_true_posterior():
    log_p = torch.log_softmax(PRIOR, dim=0).requires_grad_()
    exact_nll(log_p, log_likelihood(KEYS)).backward()
    assert torch.allclose(-log_p.grad, torch.softmax(log_p.detach() + log_likelihood(KEYS), dim=0), rtol=1e-12)


def test_dirichlet_gradient_has_less_variance_than_its_score_function():
    alpha = torch.tensor([0.7, 2.3, 0.4, 5.0], dtype=torch.float64).expand(DRAWS, 4).clone().requires_grad_()
    factor = torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)
    drawn = dirichlet.draw(alpha)
    loss = (factor * drawn.square()).sum(dim=1)
    (pathwise,) = torch.autograd.grad(loss.sum(), alpha)
    log_prob = Dirichlet(alpha).log_prob(drawn.detach().clamp(min=1e-300))
    (score,) = torch.autograd.grad((loss.detach() * log_prob).sum(), alpha)
    for key in range(4):
        assert_within_standard_errors((pathwise - score)[:, key], 0.0, key)
    assert float(pathwise.var(dim=0).sum()) < 0.5 * float(score.var(dim=0).sum())


def test_gaussian_context_has_the_gradient_of_its_second_moment():
    module = GaussianContext(AttentionChoice("gaussian-context"), 3).double()
    mean = torch.tensor([0.7, -1.2, 0.4], dtype=torch.float64)
    exact = mean.clone().requires_grad_()
    log_sigma = module.log_sigma(torch.tanh(module.hidden(exact)))
    # E c² = μ² + σ(μ)²
    (exact.square() + torch.exp(2.0 * log_sigma)).sum().backward()
    context = mean.expand(1, DRAWS, 3).clone().requires_grad_()
    module(context, torch.zeros(1, 2, 3, dtype=torch.float64)).square().sum().backward()
    for feature in range(3):
        assert_within_standard_errors(context.grad[0, :, feature], float(exact.grad[feature]), feature)


def test_gaussian_context_with_a_fixed_deviation_has_gradients_of_known_variance():
    module = GaussianContext(AttentionChoice("gaussian-context"), 3).double()
    nn.init.zeros_(module.log_sigma.weight)
    mean, sigma = torch.tensor([0.7, -1.2, 0.4], dtype=torch.float64), math.exp(-1.0)
    context = mean.expand(1, DRAWS, 3).clone().requires_grad_()
    module(context, torch.zeros(1, 2, 3, dtype=torch.float64)).square().sum().backward()
    # d c² / dμ = 2 (μ + σ ε)
    assert_moments(context.grad[0], 2.0 * mean, torch.full((3,), 4.0 * sigma**2), "context")


@pytest.mark.parametrize("variant", ["BAM-WF", "BAM-LF"])
def test_sampled_kl_has_the_gradient_of_the_closed_form_and_a_known_variance(variant):
    options = {"weibull_k": 1.7, "gamma_beta": 0.6, "gamma_alpha": 1.3, "sigma_q": 0.4, "sigma_p": 0.9, "mu_p": 0.2}
    config = AttentionChoice(variant, sampled_kl=True, preset="paper", kl_reduction="sum", **options)
    phi = torch.tensor([0.3, -0.8, 0.5], dtype=torch.float64)
    leaf = phi.expand(DRAWS, 1, 1, 3).clone().requires_grad_()
    if variant == "BAM-WF":
        standard = torch.empty(DRAWS, 1, 1, 3, dtype=torch.float64).exponential_()
        # β S − α; S is a Weibull of mean exp Φ
        ratio = math.gamma(1.0 + 2.0 / 1.7) / math.gamma(1.0 + 1.0 / 1.7) ** 2 - 1.0
        mean, variance = 0.6 * torch.exp(phi) - 1.3, (0.6 * torch.exp(phi)).square() * ratio
    else:
        standard = torch.randn(DRAWS, 1, 1, 3, dtype=torch.float64)
        # (ln S − μ_p) / σ_p², ln S ~ N(Φ − σ_q²/2, σ_q²)
        mean, variance = (phi - 0.08 - 0.2) / 0.81, torch.full((3,), 0.16 / 0.81**2)
    sampled_kl(leaf, standard, None, None, config).sum().backward()
    assert_moments(leaf.grad[:, 0, 0], mean, variance, variant)


def test_mc_dropout_has_the_moments_of_its_eight_masks():
    scores, values = torch.tensor([0.3, -0.5, 0.9], dtype=torch.float64), torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    p = 0.25
    outcomes = []
    for mask in itertools.product([0.0, 1.0], repeat=3):
        leaf, kept = scores.clone().requires_grad_(), torch.tensor(mask, dtype=torch.float64)
        ((torch.softmax(leaf, dim=0) * kept / (1.0 - p)) @ values).square().backward()
        outcomes.append(((1.0 - p) ** kept.sum() * p ** (3.0 - kept.sum()), leaf.grad))
    leaf = scores.expand(DRAWS, 1, 3).clone().requires_grad_()
    weights = build_weights(AttentionChoice("mc-dropout", attention_dropout=p)).train()(leaf)
    (weights @ values).square().sum().backward()
    assert_moments(leaf.grad[:, 0], *moments_of(outcomes), "dropout")
