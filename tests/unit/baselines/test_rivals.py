"""The rivals behind one interface: shapes, masks, eval mode, switches, and the failures that are expected."""

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from bayesattn import AttentionConfig, functional, record_kl, sampling
from bayesattn.nn import BayesianWeights
from bayesattn.noise.keyed import keyed_noise
from bayesattn_recipes.baselines import (
    RIVALS,
    AttentionChoice,
    GaussianContext,
    build_step_attention,
    build_weights,
    with_score_function,
)
from bayesattn_recipes.baselines.gaussian import kl_gaussian
from bayesattn_recipes.baselines.sampled_kl import sampled_kl
from bayesattn_recipes.common.config import build_config
from helpers import (
    CONTEXTUAL,
    WITH_KL,
    assert_finite,
    assert_within_standard_errors,
    make_mask,
    no_type_checks,
    random_log_prior,
)

STEP_VARIANTS = ["soft", "BAM-WC", "BAM-LF", "hard-reinforce", "hard-gumbel", "gaussian-context", "mc-dropout"]
KEYS = torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(1))
QUERIES = torch.randn(3, 2, 7, generator=torch.Generator().manual_seed(2))
MASK = torch.tensor([[True] * 5, [True, True, False, True, False], [True] + [False] * 4])


def step_module(variant, **options):
    torch.manual_seed(4)
    return build_step_attention(AttentionChoice(variant, **options), 7, 6, 11)


def run(module):
    return module(QUERIES, KEYS, mask=MASK)


@pytest.mark.parametrize("variant", STEP_VARIANTS)
def test_eval_mode_is_soft_attention(variant):
    ours, soft = step_module(variant).eval(), step_module("soft").eval()
    soft.load_state_dict({name: value for name, value in ours.state_dict().items() if name in soft.state_dict()})
    for one, other in zip(run(ours), run(soft), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("variant", ["hard-reinforce", "hard-gumbel", "gaussian-context", "gaussian-weights", "BAM-WC"])
def test_sampling_draws_in_eval_mode(variant):
    module = step_module(variant).eval()
    with sampling(module):
        first, second = run(module)[0], run(module)[0]
    assert not torch.equal(first, second)
    # the third sentence has one key: hard and relaxed choices leave nothing to chance there
    if variant.startswith("hard"):
        assert torch.allclose(first[2], KEYS[2, :1].expand(2, 6))
    assert torch.equal(run(module)[0], run(module)[0])


def test_mc_dropout_draws_with_dropout_on():
    module = torch.nn.Sequential(torch.nn.Dropout(0.1), step_module("mc-dropout", attention_dropout=0.5)).eval()
    with sampling(module, dropout=True):
        assert not torch.equal(run(module[1])[0], run(module[1])[0])
    assert torch.equal(run(module[1])[0], run(module[1])[0])


@pytest.mark.parametrize("variant", STEP_VARIANTS)
def test_missing_keys_get_no_weight_and_parameters_get_gradients(variant):
    module = step_module(variant)
    keys = KEYS.clone().requires_grad_()

    def losses():
        context, weights = module(QUERIES, keys, mask=MASK)
        assert not weights[~MASK.unsqueeze(1).expand_as(weights)].any()
        return (context - 1.0).square().mean(dim=-1)

    with record_kl() as kl:
        loss = with_score_function(module, losses).sum()
    loss = loss + kl.total()
    assert (len(kl) > 0) == module.weights.config.has_kl or variant == "gaussian-context"
    loss.backward()
    assert_finite(keys.grad, *(parameter.grad for parameter in module.parameters()))
    assert module.query_proj.weight.grad.any()
    assert not keys.grad[~MASK].any()


def test_hard_weights_choose_one_key_with_the_probability_of_the_softmax():
    weights = build_weights(AttentionChoice("hard-reinforce"))
    scores, mask = torch.tensor([0.5, -1.0, 0.0, 9.0]), torch.tensor([True, True, True, False])
    with torch.no_grad():
        drawn = weights(scores.expand(20_011, 1, 4), mask=mask.expand(20_011, 1, 4))
    assert torch.equal(drawn.sum(dim=-1), torch.ones(20_011, 1))
    for key, probability in enumerate([*torch.softmax(scores[:3], dim=0).tolist(), 0.0]):
        assert_within_standard_errors(drawn[:, 0, key], probability, key)


def test_row_without_keys_has_no_weight():
    mask = torch.zeros(2, 3, 4, dtype=torch.bool)
    for variant in ("hard-reinforce", "hard-gumbel", "mc-dropout"):
        with torch.no_grad():
            assert not build_weights(AttentionChoice(variant))(torch.randn(2, 3, 4), mask=mask).any()


def test_gumbel_gradient_tends_to_the_exact_one_as_the_temperature_falls():
    # f(z) is quadratic, so that the relaxation is biased; the exact gradient of E f is that of Σ p_j f_j
    cost = torch.tensor([1.0, 4.0, -2.0], dtype=torch.float64)
    scores = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64)
    exact = scores.clone().requires_grad_()
    (torch.softmax(exact, dim=0) * cost.square()).sum().backward()
    errors = []
    for temperature in (2.0, 0.2):
        leaf = scores.expand(50_021, 1, 3).clone().requires_grad_()
        weights = build_weights(AttentionChoice("hard-gumbel", temperature=temperature))(leaf)
        (weights @ cost).square().sum().backward()
        errors.append(float((leaf.grad.mean(dim=(0, 1)) - exact.grad).norm()))
    # at 0.2 the standard error of the mean is about 0.1 of the bias at 2
    assert errors[1] < 0.4 * errors[0]


def test_straight_through_feeds_the_choice_forward_and_the_relaxation_back():
    scores = torch.randn(7, 2, 5, requires_grad=True)
    weights = build_weights(AttentionChoice("hard-gumbel", straight_through=True))(scores)
    # a float32 sum of a one and two equal numbers of opposite sign
    assert torch.allclose(weights.detach().max(dim=-1).values, torch.ones(7, 2), atol=1e-6)
    weights[..., 0].sum().backward()
    assert scores.grad.any()


def test_gaussian_kl_is_the_closed_form():
    mean, log_sigma = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    expected = kl_divergence(Normal(mean, log_sigma.exp()), Normal(torch.full_like(mean, 0.4), 1.0))
    assert torch.allclose(kl_gaussian(mean, log_sigma, 0.4), expected, rtol=1e-12)


@pytest.mark.parametrize("prior", ["keys", "zero"])
def test_gaussian_context_is_drawn_around_the_soft_one(prior):
    module = GaussianContext(AttentionChoice("gaussian-context", context_prior=prior), 6).double()
    context = torch.randn(1, 1, 6, dtype=torch.float64)
    with torch.no_grad():
        drawn = module(context.expand(1, 20_011, 6), KEYS[:1].double())
        sigma = torch.exp(module.log_sigma(torch.tanh(module.hidden(context))))
    for feature in range(6):
        assert_within_standard_errors(drawn[0, :, feature], float(context[0, 0, feature]), feature)
        squares = ((drawn - context) / sigma)[0, :, feature].square()
        assert_within_standard_errors(squares, 1.0, feature)


def test_gaussian_context_is_pulled_towards_the_mean_of_the_keys_that_exist():
    module = GaussianContext(AttentionChoice("gaussian-context"), 6)
    with torch.no_grad():
        module.log_sigma.weight.zero_()
        module.log_sigma.bias.zero_()
    mean = torch.stack([row[valid].mean(dim=0) for row, valid in zip(KEYS, MASK)])
    with record_kl() as kl:
        module(mean.unsqueeze(1), KEYS, MASK)
    # σ = 1 and μ = μ_p: no divergence, up to rounding of the mean in float32
    assert float(kl.total().detach()) < 1e-10


def test_gaussian_weights_have_no_mean_and_their_gradients_explode():
    module = build_weights(AttentionChoice("gaussian-weights"))
    scores = torch.zeros(100_003, 1, 5, requires_grad=True)
    weights = module(scores)
    weights[..., 0].sum().backward()
    size, gradient = weights.detach().abs().flatten(), scores.grad.flatten(1).norm(dim=1)
    # a ratio of Gaussians has Cauchy tails: P(|W| > x) ~ 1/x, P(|∇W| > x) ~ 1/√x. Of 10⁵ draws some exceed these sizes
    # with probability above 1 − e⁻¹⁰⁰; for a softmax the first is at most 1 and the second below 0.5
    assert float(size.max()) > 100.0
    assert float(gradient.max()) > 1e4 * float(gradient.median())
    assert float(weights.detach().min()) < 0.0


@pytest.mark.parametrize("variant", WITH_KL)
@pytest.mark.parametrize("preset", ["paper", "default"])
def test_sampled_kl_estimates_the_closed_form(variant, preset):
    config = AttentionChoice(
        variant,
        sampled_kl=True,
        preset=preset,
        weibull_k=3.0,
        gamma_beta=0.7,
        gamma_alpha=1.3,
        sigma_q=0.4,
        kl_reduction="sum",
    )
    b, h, m, n = 4001, 1, 2, 3
    scores = torch.randn(1, h, m, n, dtype=torch.float64).expand(b, h, m, n)
    mask = make_mask("keys", 1, h, m, n)
    prior = random_log_prior(1, h, n, mask) if variant in CONTEXTUAL else None
    _, expected = functional.attention_weights(scores[:1], config=config, log_prior=prior, mask=mask)
    standard = (torch.distributions.Exponential(1.0) if config.family == "weibull" else Normal(0.0, 1.0)).sample(
        (b, h, m, n)
    )
    phi = scores
    if config.score_form == "log_softmax":
        phi = scores - torch.logsumexp(scores.masked_fill(~mask, -torch.inf), dim=-1, keepdim=True)
    drawn = sampled_kl(phi, standard.double(), prior, mask, config)
    assert_within_standard_errors(drawn, float(expected), (variant, preset))


def test_sampled_kl_has_gradient_noise_where_the_closed_form_has_none():
    grads = {}
    for sampled in (False, True):
        torch.manual_seed(0)
        module = build_weights(AttentionChoice("BAM-WF", sampled_kl=sampled, weibull_k=1.0, preset="paper"))
        scores = torch.zeros(997, 1, 3, requires_grad=True)
        with record_kl() as kl:
            module(scores)
        (997 * kl.total()).backward()
        grads[sampled] = scores.grad
    assert not grads[False].var(dim=0).any()
    # β exp(Φ) − α becomes β S − α with S exponential: a deviation of β = 1 an entry; relative error of a variance 0.1
    assert (grads[True].var(dim=0) > 0.5).all()


@pytest.mark.parametrize("variant", ["variational-exact", "variational-enum", "variational-sample", "variational-dirichlet"])
def test_latent_alignments_are_refused_where_they_cannot_run(variant):
    with pytest.raises(ValueError, match=f"variant '{variant}' needs the likelihood of the output"):
        build_step_attention(AttentionChoice(variant), 7, 6, 11)


@pytest.mark.parametrize("variant", RIVALS)
def test_functions_of_the_core_refuse_rivals_instead_of_running_something_else(variant):
    config, query = AttentionChoice(variant), torch.randn(2, 3, 5, 4)
    refused = pytest.raises(ValueError, match=f"this module runs only 'soft', .*, got variant '{variant}'")
    with refused:
        functional.attention(query, query, query, config=config, backend="triton")
    with refused:
        functional.attention_weights(query, config=config)
    with refused:
        BayesianWeights(config)


def test_plain_config_builds_plain_bayesian_attention():
    module = build_step_attention(AttentionConfig("BAM-WC"), 7, 6, 11)
    assert [name for name, _ in module.named_parameters()] == [name for name, _ in step_module("BAM-WC").named_parameters()]


def test_yaml_values_become_a_choice():
    config = build_config(AttentionChoice, {"variant": "hard-reinforce", "baseline": "self-critical", "entropy_bonus": 1e-2})
    assert (config.variant, config.baseline, config.entropy_bonus) == ("hard-reinforce", "self-critical", 0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "hard"}, "variant must be one of 'soft', .*'hard-reinforce', .*, got 'hard'"),
        ({"baseline": "magic"}, "baseline must be one of 'none', 'moving-average', 'self-critical', got 'magic'"),
        ({"temperature": 0.0}, "temperature must be a finite number above 0, got 0.0"),
        ({"gaussian_sigma": -1.0}, "gaussian_sigma must be .*, got -1.0"),
        ({"entropy_bonus": -0.1}, "entropy_bonus must be .*, got -0.1"),
        ({"attention_dropout": 1.0}, "attention_dropout must be .*, got 1.0"),
        ({"inference_dim": 0}, "inference_dim must be .*, got 0"),
        ({"context_prior": "one"}, "context_prior must be one of 'keys', 'zero', got 'one'"),
        ({"variant": "soft", "sampled_kl": True}, "sampled_kl=True needs a variant with a KL .BAM-LF.*, got soft"),
        ({"variant": "hard-gumbel", "sampled_kl": True}, "sampled_kl=True needs a variant with a KL .*, got hard-gumbel"),
        ({"weibull_k": -1.0}, "weibull_k must be a finite number above 0, got -1.0"),
    ],
)
def test_bad_values_are_named(options, message, monkeypatch):
    no_type_checks(monkeypatch)
    with pytest.raises(ValueError, match=message):
        AttentionChoice(**options)


def test_the_planned_noise_of_an_example_depends_on_its_seed_alone():
    attention = build_step_attention(AttentionChoice("BAM-WC"), 5, 7, 3).train()
    mask, seeds = torch.ones(3, 11, dtype=torch.bool), torch.tensor([101, 202, 303])
    with keyed_noise(seeds):
        first, second = attention.plan_bias(mask, 4), attention.plan_bias(mask, 4)
    order = torch.tensor([2, 0, 1])
    with keyed_noise(seeds[order]):
        again = attention.plan_bias(mask, 4)
    assert torch.equal(again, first[order])
    assert not torch.equal(first, second)
