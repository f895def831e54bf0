"""Bad input gets a ValueError that names the argument, its value and what it must be, before any work is done."""

import math

import pytest
import torch

import bayesattn as ba
from bayesattn import functional
from bayesattn.functional import attention, attention_weights
from helpers import no_type_checks

B, H, M, N, D = 2, 3, 5, 7, 4
WF, WC = ba.AttentionConfig("BAM-WF"), ba.AttentionConfig("BAM-WC")


@pytest.fixture(autouse=True)
def _as_a_user_runs_it(monkeypatch):
    """Without the suite's type checker."""
    no_type_checks(monkeypatch)


def _qkv(**changed: torch.Tensor) -> dict:
    return {"query": torch.randn(B, H, M, D), "key": torch.randn(B, H, N, D), "value": torch.randn(B, H, N, D)} | changed


def _refused(match: str, call, *args, **options) -> None:
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=match):
        call(*args, **options)
    assert torch.equal(torch.get_rng_state(), state)  # nothing was drawn before the check


SCORES, QKV = torch.zeros(B, H, M, N), _qkv()
CALLS = [
    lambda **options: attention_weights(SCORES, config=WF, **options),
    lambda **options: attention(**QKV, config=WF, **options),
]


@pytest.mark.parametrize("call", CALLS, ids=["weights", "attention"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.int64])
def test_a_mask_must_be_boolean(call, dtype):
    pattern = rf"mask must be a torch\.bool tensor where True means attend, got {dtype}. Pass an additive term as `bias`"
    _refused(pattern, call, mask=torch.zeros(M, N, dtype=dtype))


@pytest.mark.parametrize("call", CALLS, ids=["weights", "attention"])
@pytest.mark.parametrize("mask", [[[True] * N] * M, "causal"])
def test_a_mask_must_be_a_tensor(call, mask):
    _refused(r"mask must be a torch\.bool tensor .*, got (list|str)", call, mask=mask)


@pytest.mark.parametrize("call", CALLS, ids=["weights", "attention"])
@pytest.mark.parametrize("shape", [(M, N + 1), (N, M), (B, N), (B + 1, 1, 1, N), (B, H, M, N, 1), (1, B, H, M, N)])
def test_a_mask_must_broadcast_to_the_scores(call, shape):
    numbers = ", ".join(map(str, shape))
    pattern = rf"mask must be broadcastable to \({B}, {H}, {M}, {N}\) .*, got shape \({numbers}\)"
    _refused(pattern, call, mask=torch.ones(shape, dtype=torch.bool))


@pytest.mark.parametrize("shape", [(M, N + 1), (B + 1, 1, 1, N), (1, B, H, M, N)])
def test_a_bias_must_broadcast_to_the_scores(shape):
    _refused(r"bias must be broadcastable to .*, got shape", attention, **_qkv(), config=WF, bias=torch.zeros(shape))


def test_a_bias_must_be_of_floats():
    mask = torch.ones(M, N, dtype=torch.bool)
    _refused(r"bias must be a floating-point tensor, got torch\.bool", attention, **_qkv(), config=WF, bias=mask)


@pytest.mark.parametrize("shape", [(B, H, 1, N + 1), (B, H, M, N), (B, H, N), (N,), (B, H + 1, 1, N), (B + 1, 1, 1, N)])
def test_a_prior_has_one_value_per_key(shape):
    prior = torch.zeros(shape)
    pattern = rf"prior must have shape .*one value for each of the {N} keys, got \({', '.join(map(str, shape))},?\)"
    _refused(pattern, attention, **_qkv(), config=WC, log_prior=prior)
    _refused(pattern, attention_weights, torch.randn(B, H, M, N), config=WC, log_prior=prior)


def test_a_prior_is_asked_for_and_refused_where_it_does_not_belong():
    pattern = r"prior must be ln Ψ of shape \(b or 1, heads or 1, 1, 7\) for BAM-WC, got None"
    _refused(pattern, attention, **_qkv(), config=WC)
    _refused(pattern, attention_weights, torch.randn(B, H, M, N), config=WC)
    for variant in ("BAM-WF", "BAM-LF", "BAM-NOKL", "soft"):
        options = {"config": ba.AttentionConfig(variant), "log_prior": torch.zeros(1, 1, 1, N)}
        pattern = rf"prior must be None for {variant}, got a tensor. Only BAM-LC and BAM-WC take one"
        _refused(pattern, attention, **_qkv(), **options)


@pytest.mark.parametrize("scores", [torch.zeros(M, N, dtype=torch.int64), [[0.0]], None])
def test_scores_must_be_floats(scores):
    _refused(r"scores must be a floating-point tensor, got .*", attention_weights, scores, config=WF)


@pytest.mark.parametrize("shape", [(N,), (1, B, H, M, N), ()])
def test_scores_have_two_to_four_axes(shape):
    _refused(r"scores must have shape \(b, h, m, n\), .*, got", attention_weights, torch.zeros(shape), config=WF)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"query": torch.randn(B, M, D)}, r"query must have four axes .*, got shape \(2, 5, 4\)"),
        ({"query": torch.zeros(B, H, M, D, dtype=torch.int32)}, r"query must be a floating-point tensor, got torch.int32"),
        ({"key": torch.randn(B, H, N, D + 1)}, r"key must have .* to fit query .*, got shape \(2, 3, 7, 5\)"),
        ({"key": torch.randn(B + 1, H, N, D)}, r"key must have batch size 2, .* to fit query .*, got shape \(3, 3, 7, 4\)"),
        ({"key": torch.randn(B, 2, N, D)}, r"key must have .*heads that divides 3.*, got shape \(2, 2, 7, 4\)"),
        ({"key": torch.randn(B, 0, N, D)}, r"key must have .*heads that divides 3.*, got shape \(2, 0, 7, 4\)"),
        ({"value": torch.randn(B, H, N + 1, D)}, r"value must have shape \(2, 3, 7, any\) to fit key, got \(2, 3, 8, 4\)"),
        ({"value": torch.randn(B, 1, N, D)}, r"value must have shape .* to fit key, got \(2, 1, 7, 4\)"),
        (
            {"value": torch.randn(B, H, N, D).double()},
            r"must have the same dtype, got torch\.float32, torch\.float32, torch\.float64",
        ),
    ],
)
def test_query_key_and_value_must_fit_each_other(changed, named):
    for sample in (True, False):
        _refused(named, attention, **_qkv(**changed), config=WF, sample=sample)


@pytest.mark.parametrize("dropout_p", [-0.1, 1.0, 1.5, math.nan])
def test_dropout_is_a_probability_below_one(dropout_p):
    _refused(
        f"dropout_p must be at least 0 and below 1, got {dropout_p}", attention, **_qkv(), config=WF, dropout_p=dropout_p
    )


def test_an_unknown_backend_is_answered_with_the_list():
    _refused(r"backend must be one of 'auto', 'reference', .*, got 'cuda'", attention, **_qkv(), config=WF, backend="cuda")


@pytest.mark.parametrize("seed", [torch.arange(B + 1), torch.zeros(B, 2, dtype=torch.int64)])
def test_a_seed_is_one_number_or_one_per_example(seed):
    pattern = r"seed must be a 64-bit integer, or .* with one or 2 entries, got a torch.int64 tensor of shape"
    _refused(pattern, attention, **_qkv(), config=WF, seed=seed)
    _refused(pattern, attention_weights, torch.randn(B, H, M, N), config=WF, seed=seed)


@pytest.mark.parametrize("seed", [1.5, "7", torch.tensor([0.5, 1.0]), 2**64])
def test_a_seed_is_an_integer_of_64_bits(seed):
    _refused(r"seed must be a 64-bit integer, .*, got", attention_weights, torch.randn(B, H, M, N), config=WF, seed=seed)


# a bias of −inf forbids
BROKEN = [(name, bad) for name in ("query", "key", "value", "log_prior") for bad in (math.nan, math.inf, -math.inf)]


@pytest.mark.parametrize(("name", "bad"), [*BROKEN, ("bias", math.nan), ("bias", math.inf)])
def test_check_finite_names_the_broken_input(name, bad):
    tensors = _qkv(bias=torch.randn(M, N), log_prior=torch.zeros(1, 1, 1, N))
    attention(**tensors, config=WC, check_finite=True)
    tensors[name].view(-1)[1] = bad
    _refused(
        f"{name} has NaN or infinite entries. With check_finite=True",
        attention,
        **tensors,
        config=WC,
        check_finite=True,
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_check_finite_looks_at_scores(bad):
    scores = torch.randn(B, H, M, N)
    scores[1, 2, 3, 4] = bad
    _refused("scores has NaN or infinite entries", attention_weights, scores, config=WF, check_finite=True)


def test_check_finite_names_the_prior_of_a_key_that_a_mask_leaves():
    mask, prior = torch.ones(N, dtype=torch.bool), torch.zeros(1, 1, 1, N)
    mask[2], prior[..., 1] = False, -math.inf
    _refused("prior has NaN or inf", attention, **QKV, config=WC, log_prior=prior, mask=mask, check_finite=True)


def test_check_finite_allows_the_prior_of_a_masked_key():
    mask, prior = torch.ones(N, dtype=torch.bool), torch.zeros(1, 1, 1, N)
    mask[2], prior[..., 2] = False, -math.inf
    attention_weights(torch.randn(B, H, M, N), config=WC, log_prior=prior, mask=mask, check_finite=True)
    prior[..., 3] = math.nan
    _refused(
        "prior has NaN", attention_weights, torch.randn(B, H, M, N), config=WC, log_prior=prior, mask=mask, check_finite=True
    )


PHI = torch.zeros(3)
BARE_FUNCTIONS = {
    "weibull_k": [
        lambda k: ba.distributions.weibull_log_sample(PHI, PHI + 1.0, weibull_k=k),
        lambda k: ba.distributions.weibull_posterior(PHI, weibull_k=k),
        lambda k: ba.divergences.kl_weibull_gamma(PHI, PHI, weibull_k=k, gamma_beta=1.0),
    ],
    "gamma_beta": [
        lambda beta: ba.distributions.gamma_prior(PHI, gamma_beta=beta),
        lambda beta: ba.divergences.kl_weibull_gamma(PHI, PHI, weibull_k=1.0, gamma_beta=beta),
    ],
    "sigma_q": [
        lambda sigma: ba.distributions.lognormal_log_sample(PHI, PHI, sigma_q=sigma),
        lambda sigma: ba.distributions.lognormal_posterior(PHI, sigma_q=sigma),
        lambda sigma: ba.divergences.kl_lognormal_lognormal(PHI, PHI, sigma_q=sigma, sigma_p=1.0),
    ],
    "sigma_p": [
        lambda sigma: ba.distributions.lognormal_prior(PHI, sigma_p=sigma),
        lambda sigma: ba.divergences.kl_lognormal_lognormal(PHI, PHI, sigma_q=1.0, sigma_p=sigma),
    ],
}


@pytest.mark.parametrize("value", [0.0, -2.0, math.nan, math.inf])
@pytest.mark.parametrize("name", BARE_FUNCTIONS)
def test_the_bare_distributions_and_divergences_name_a_bad_parameter(name, value):
    for call in BARE_FUNCTIONS[name]:
        _refused(f"{name} must be a finite number above 0, got {value}", call, value)


@pytest.mark.parametrize("make", [
    lambda config: ba.nn.MultiheadAttention(8, 2, config=config),
    lambda config: ba.nn.BayesianWeights(config, key_dim=4),
    lambda config: ba.nn.AdditiveAttention(4, 4, 4, config=config),
])  # fmt: skip
def test_a_config_must_be_a_config(make):
    with pytest.raises(ValueError, match="config must be an AttentionConfig, got str"):
        make("BAM-WC")


def test_modules_need_a_config_or_weights_by_keyword():
    with pytest.raises(ValueError, match="give either config or weights, got neither"):
        ba.nn.MultiheadAttention(8, 2)


def test_the_public_backends_are_those_of_the_design():
    for backend in ("auto", "reference"):
        attention(**_qkv(), config=WF, backend=backend)
    assert {"auto", "reference", "triton"} <= set(functional.BACKENDS)


@pytest.mark.parametrize("name", ["key", "value", "mask", "log_prior", "bias"])
def test_a_tensor_on_another_device_is_refused_by_name(name):
    shapes = {
        "key": (B, H, N, D),
        "value": (B, H, N, D),
        "mask": (B, 1, 1, N),
        "log_prior": (B, 1, 1, N),
        "bias": (1, 1, M, N),
    }
    stranger = torch.zeros(shapes[name], device="meta", dtype=torch.bool if name == "mask" else torch.float32)
    given = {**_qkv(), "log_prior": torch.zeros(B, 1, 1, N), name: stranger}
    _refused(f"{name} must be on cpu like query, got meta", attention, **given, config=ba.AttentionConfig("BAM-WC"))
