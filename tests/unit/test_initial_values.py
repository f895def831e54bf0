"""Soft and Bayesian models of one seed differ in the contextual prior alone."""

import pytest
import torch
from torch import nn

import bayesattn as ba
from bayesattn.priors import ContextualPrior
from bayesattn_recipes.baselines import AttentionChoice
from bayesattn_recipes.translation.config import TranslationConfig
from bayesattn_recipes.translation.model import Translator


class Two(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.first = ba.nn.AdditiveAttention(5, 4, 3, config=config)
        self.second = ba.nn.AdditiveAttention(5, 4, 3, config=config)
        self.head = nn.Linear(4, 2)


def encoder(config):
    layer = nn.TransformerEncoderLayer(12, 3, 16, batch_first=True)
    model = ba.bayesianize(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), config)
    model.head = nn.Linear(12, 2)  # built after the conversion
    return model


SIZES = {"embedding_dim": 6, "encoder_dim": 5, "decoder_dim": 7, "attention_dim": 4, "dropout": 0.0}
MODELS = {
    "multihead": lambda config: ba.nn.MultiheadAttention(12, 3, config=config),
    "additive": lambda config: ba.nn.AdditiveAttention(5, 4, 3, config=config),
    "two": Two,
    "layer": lambda config: ba.nn.TransformerDecoderLayer(12, 3, 16, config=config),
    "converted": encoder,
    "translation": lambda config: Translator(TranslationConfig(attention=AttentionChoice(config.variant), **SIZES), 17),
}


def build(name, variant):
    torch.manual_seed(3)
    model = MODELS[name](ba.AttentionConfig(variant))
    return model, torch.get_rng_state()


@pytest.mark.parametrize("variant", ["BAM-WC", "BAM-LC", "BAM-WF"])
@pytest.mark.parametrize("name", MODELS)
def test_soft_and_bayesian_models_share_every_common_initial_value(name, variant):
    soft, state = build(name, "soft")
    bayesian, bayesian_state = build(name, variant)
    assert torch.equal(state, bayesian_state)
    theirs = dict(bayesian.named_parameters())
    for key, value in soft.named_parameters():
        assert torch.equal(value, theirs.pop(key)), key
    assert all("bayes_prior" in key for key in theirs)
    assert bool(theirs) == (variant != "BAM-WF")


@pytest.mark.parametrize("name", MODELS)
def test_priors_depend_on_the_seed_alone_and_differ_from_each_other(name):
    (model, _), (again, _) = build(name, "BAM-WC"), build(name, "BAM-WC")
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    first = [module.weight_in for module in model.modules() if isinstance(module, ContextualPrior)]
    assert all(not torch.equal(one, other) for i, one in enumerate(first) for other in first[:i])
    torch.manual_seed(4)
    others = [m.weight_in for m in MODELS[name](ba.AttentionConfig("BAM-WC")).modules() if isinstance(m, ContextualPrior)]
    assert all(not torch.equal(one, other) for one, other in zip(first, others, strict=True))


def test_names_tell_apart_priors_that_are_built_together():
    config = ba.AttentionConfig("BAM-WC")
    first, same, other = (ba.nn.BayesianWeights(config, key_dim=4, prior_name=name) for name in ("a", "a", "b"))
    assert torch.equal(first.bayes_prior.weight_in, same.bayes_prior.weight_in)
    assert not torch.equal(first.bayes_prior.weight_in, other.bayes_prior.weight_in)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_initial_values_have_he_deviations_in_every_dtype(dtype):
    prior = ContextualPrior(400, 1, ba.AttentionConfig("BAM-WC", prior_hidden_dim=300), dtype=dtype)
    assert prior.weight_in.dtype == dtype
    assert float(prior.weight_in.detach().double().std()) == pytest.approx((2 / 400) ** 0.5, rel=0.02)
    assert ContextualPrior(4, 1, ba.AttentionConfig("BAM-WC"), device="meta").weight_in.is_meta
