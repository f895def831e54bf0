"""AttentionConfig: the paper's names, presets as stated, bad values refused by name."""

import copy
import dataclasses
import json
import math
import pickle
import re

import pytest

from bayesattn import AttentionConfig
from helpers import no_type_checks


@pytest.fixture(autouse=True)
def _as_a_user_runs_it(monkeypatch):
    no_type_checks(monkeypatch)


@pytest.mark.parametrize(
    ("variant", "family", "prior_kind"),
    [
        ("soft", None, None),
        ("BAM-NOKL", "weibull", None),
        ("BAM-LF", "lognormal", "fixed"),
        ("BAM-LC", "lognormal", "contextual"),
        ("BAM-WF", "weibull", "fixed"),
        ("BAM-WC", "weibull", "contextual"),
    ],
)
def test_each_variant_means_what_its_letters_say(variant, family, prior_kind):
    config = AttentionConfig(variant)
    assert (config.family, config.prior_kind) == (family, prior_kind)
    assert config.is_stochastic == (variant != "soft")
    assert config.has_kl == (variant not in ("soft", "BAM-NOKL"))


@pytest.mark.parametrize(
    ("preset", "forms"),
    [
        ("paper", ("raw", "psi", "psi", "sum")),
        ("official-code", ("log_softmax", "beta_psi", "log_psi", "mean")),
    ],
)
def test_presets_of_the_paper_and_of_its_code(preset, forms):
    config = AttentionConfig("BAM-WC", preset=preset)
    assert (config.score_form, config.alpha_form, config.mu_form, config.kl_reduction) == forms


def test_the_default_preset_is_called_default_and_fills_every_form():
    config = AttentionConfig()
    assert config.variant == "BAM-WC"
    assert config.preset == "default"
    assert None not in (config.score_form, config.alpha_form, config.mu_form, config.kl_reduction)


def test_a_named_option_wins_over_the_preset():
    config = AttentionConfig("BAM-WC", preset="paper", kl_reduction="mean")
    assert (config.score_form, config.kl_reduction) == ("raw", "mean")


def test_the_config_is_frozen_and_hashable():
    config = AttentionConfig("BAM-WF", weibull_k=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.weibull_k = 4.0  # pyright: ignore[reportAttributeAccessIssue]
    assert hash(config) == hash(AttentionConfig("BAM-WF", weibull_k=3.0))


def test_only_the_variant_is_positional():
    with pytest.raises(TypeError, match="positional"):
        AttentionConfig("BAM-WC", 10.0)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("preset", ["paper", "official-code", "default"])
def test_json_brings_back_the_same_config(preset):
    config = AttentionConfig("BAM-LC", preset=preset, sigma_p=1e15, sigma_q=1e-15, prior_per_head=True, mu_form="psi")
    assert AttentionConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_an_unknown_key_is_named_and_the_known_ones_are_listed():
    with pytest.raises(ValueError, match=r"no keys \['weibul_k'\]. Its keys are .*'weibull_k'"):
        AttentionConfig.from_dict({"variant": "BAM-WC", "weibul_k": 3.0})


def test_an_unknown_variant_is_answered_with_the_list():
    with pytest.raises(ValueError, match=r"variant must be one of 'soft', .*, got 'BAM-XX'") as caught:
        AttentionConfig("BAM-XX")
    for variant in ("soft", "BAM-NOKL", "BAM-LF", "BAM-LC", "BAM-WF", "BAM-WC"):
        assert variant in str(caught.value)


@pytest.mark.parametrize("name", ["preset", "score_form", "alpha_form", "mu_form", "kl_reduction"])
def test_an_unknown_choice_is_answered_with_the_list(name):
    with pytest.raises(ValueError, match=f"{name} must be one of '.*, got 'nonsense'"):
        AttentionConfig("BAM-WC", **{name: "nonsense"})


@pytest.mark.parametrize("name", ["weibull_k", "gamma_alpha", "gamma_beta", "sigma_q", "sigma_p"])
@pytest.mark.parametrize("value", [0, -1.5, math.nan, math.inf, "3", None, True])
def test_positive_numbers_are_required(name, value):
    with pytest.raises(ValueError, match=f"{name} must be a finite number above 0, got .*") as caught:
        AttentionConfig("BAM-WC", **{name: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, "0"])
def test_mu_p_must_be_finite(value):
    with pytest.raises(ValueError, match=r"mu_p must be a finite number, got .*"):
        AttentionConfig("BAM-LF", mu_p=value)


@pytest.mark.parametrize("value", [0, -3, 2.5])
def test_prior_hidden_dim_must_be_a_positive_integer(value):
    with pytest.raises(ValueError, match=f"prior_hidden_dim must be an integer of at least 1, got {value}"):
        AttentionConfig("BAM-WC", prior_hidden_dim=value)


@pytest.mark.parametrize(
    ("variant", "posterior", "prior"),
    [
        ("soft", "none", None),
        ("soft", None, None),
        ("BAM-NOKL", "weibull", None),
        ("BAM-LF", "lognormal", "fixed"),
        ("BAM-LC", "lognormal", "contextual"),
        ("BAM-WF", "weibull", "fixed"),
        ("BAM-WC", "weibull", "contextual"),
    ],
)
def test_posterior_and_prior_say_what_the_code_says(variant, posterior, prior):
    config = AttentionConfig(posterior=posterior, prior=prior, weibull_k=3.0)
    assert config == AttentionConfig(variant, weibull_k=3.0)
    assert hash(config) == hash(AttentionConfig(variant, weibull_k=3.0))
    assert config.variant == variant
    assert AttentionConfig(variant, posterior=posterior, prior=prior).variant == variant
    assert AttentionConfig.from_dict({"posterior": posterior, "prior": prior}).variant == variant
    for other in ("soft", "BAM-WC", "BAM-LF"):
        assert dataclasses.replace(AttentionConfig(other), variant=variant).variant == variant
        assert dataclasses.replace(AttentionConfig(other), posterior=posterior, prior=prior).variant == variant


def test_what_is_left_out_is_the_defaults_or_the_old_configs():
    assert AttentionConfig(posterior="lognormal").variant == "BAM-LC"
    assert AttentionConfig(prior="fixed").variant == "BAM-WF"
    assert AttentionConfig(posterior="none").variant == "soft"
    assert dataclasses.replace(AttentionConfig("BAM-WF"), posterior="lognormal").variant == "BAM-LF"
    assert dataclasses.replace(AttentionConfig("BAM-LF"), prior="contextual").variant == "BAM-LC"
    assert dataclasses.replace(AttentionConfig("BAM-LF"), posterior="none").variant == "soft"
    assert AttentionConfig("BAM-LF", prior="fixed").variant == "BAM-LF"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"variant": "BAM-WC", "posterior": "lognormal"},
            "variant is 'BAM-WC', but posterior='lognormal' makes it 'BAM-LC'",
        ),
        ({"variant": "BAM-LF", "prior": "contextual"}, "variant is 'BAM-LF', but prior='contextual' makes it 'BAM-LC'"),
        ({"posterior": "lognormal", "prior": None}, "posterior 'lognormal' with prior None, which is not supported"),
        ({"posterior": "none", "prior": "fixed"}, "posterior None with prior 'fixed', which is not supported"),
        ({"posterior": "gamma"}, "posterior must be one of 'none', 'weibull', 'lognormal', None, got 'gamma'"),
        ({"prior": "none"}, "prior must be one of 'fixed', 'contextual', None, got 'none'"),
    ],
)
def test_contradictions_are_refused_by_name(values, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        AttentionConfig(**values)
    if "variant" in values:
        with pytest.raises(ValueError, match=re.escape(message)):
            dataclasses.replace(AttentionConfig("soft"), **values)


@pytest.mark.parametrize(
    "passed_on", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c)), lambda c: c.from_dict(c.to_dict())]
)
def test_replacing_the_preset_replaces_its_forms_and_keeps_those_that_were_given(passed_on):
    config = passed_on(AttentionConfig("BAM-LC", mu_form="psi", sigma_q=0.2))
    paper = dataclasses.replace(config, preset="paper")
    assert paper == AttentionConfig("BAM-LC", preset="paper", mu_form="psi", sigma_q=0.2)
    assert dataclasses.replace(passed_on(paper), preset="default", mu_form=None) == AttentionConfig("BAM-LC", sigma_q=0.2)
    # given beside the new preset, though the old one had it too
    assert dataclasses.replace(config, preset="paper", kl_reduction="row_mean").kl_reduction == "row_mean"
    assert AttentionConfig(preset="paper", kl_reduction=config.kl_reduction).kl_reduction == "row_mean"
    assert dataclasses.replace(config, sigma_q=0.4).kl_reduction == "row_mean"


@pytest.mark.parametrize(
    "values",
    [
        {"sigma_p": 1e15, "sigma_q": 1e-15},
        {"weibull_k": 0.5},
        {"weibull_k": 2000},
        {"gamma_alpha": 1e-15, "gamma_beta": 1e-15},
    ],
)
def test_every_hyperparameter_of_the_paper_is_accepted(values):
    config = AttentionConfig("BAM-WC", **values)
    assert all(getattr(config, name) == value for name, value in values.items())
