"""Attention outside the registry, whose softmax alone is replaced: what the prior reads, which keys count, what is dropped.

That it is exact when off, means the same scores when on and leaves no trace is in the common suite.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.gptj.modeling_gptj import GPTJFlashAttention2
from zoo import ARCHITECTURES, BATCH, LENGTH, build, run

import bayesattn as ba
from bayesattn.convert import bayesianize
from bayesattn_recipes.baselines import AttentionChoice, attention_options

CONFIG = ba.AttentionConfig("BAM-WC")
NAMES = ("deberta_v2", "mpnet", "gptj", "bloom", "falcon", "falcon, new architecture", "falcon, ALiBi")


def converted(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(module, "bayes")]


def keys_of_prior(module: nn.Module) -> list[torch.Tensor]:
    """Return a list that fills with what the module's prior is given."""
    seen: list[torch.Tensor] = []
    module.bayes.bayes_prior.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    return seen


@pytest.mark.parametrize("pos_att_type", [[], ["c2p"], ["p2c", "c2p"]])
def test_deberta_s_prior_reads_the_content_keys_as_the_projection_gave_them(pos_att_type):
    model = build("deberta_v2")
    for module in model.modules():
        if hasattr(module, "pos_att_type"):
            module.pos_att_type = pos_att_type
    first = converted(bayesianize(model, CONFIG))[0]
    keys, projected = keys_of_prior(first), []
    first.key_proj.register_forward_hook(lambda *args: projected.append(args[2].detach()))
    with ba.record_kl(model):
        run(model, ARCHITECTURES["deberta_v2"].inputs(True))
    # the projection runs once more for the positions if they share it
    expected = projected[0].view(BATCH, LENGTH, 3, 8).transpose(1, 2)
    torch.testing.assert_close(keys[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["gptj", "bloom", "falcon", "falcon, ALiBi"])
def test_a_cached_step_has_the_prior_of_all_keys(name):
    model = bayesianize(build(name, "eager"), CONFIG)
    ids = ARCHITECTURES[name].inputs(False)["input_ids"]
    keys = keys_of_prior(converted(model)[0])
    with torch.no_grad(), ba.record_kl(model):
        model(ids)
        past = model(ids[:, :-1], use_cache=True).past_key_values
        model(ids[:, -1:], past_key_values=past)
    whole, _, step = keys
    torch.testing.assert_close(step, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["mpnet", "gptj", "bloom", "falcon"])
@pytest.mark.parametrize("forbidden", [-1e4, -1e9, -torch.inf])
def test_any_minus_infinity_in_a_mask_means_the_same_kl(name, forbidden):
    model = bayesianize(build(name, "eager"), CONFIG)
    inputs = ARCHITECTURES[name].inputs(False)
    allowed = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(BATCH, 1, LENGTH, LENGTH)

    def total(value: float) -> torch.Tensor:
        part = converted(model)[0]
        part.register_forward_pre_hook(
            replace_mask(torch.zeros(allowed.shape).masked_fill(~allowed, value)), with_kwargs=True
        )
        with torch.no_grad(), ba.record_kl(part) as kl:
            run(model, inputs)
        return kl.total()

    torch.testing.assert_close(total(forbidden), total(torch.finfo(torch.float32).min))


def replace_mask(mask: torch.Tensor):
    def hook(module, args, kwargs):
        given = type(module).__mro__[2].forward.__code__.co_varnames[1 : len(args) + 1]
        position = given.index("attention_mask") if "attention_mask" in given else None
        if position is None:
            return args, {**kwargs, "attention_mask": mask}
        return (*args[:position], mask, *args[position + 1 :]), kwargs

    return hook


@pytest.mark.parametrize("name", NAMES)
def test_recording_alone_changes_nothing_and_gives_the_kl_of_a_draw(name):
    model, inputs = build(name), ARCHITECTURES[name].inputs(True)
    before = run(model, inputs)
    # one layer: below it nothing is random, so its KL is that of the mean
    bayesianize(model, CONFIG, layers=[0])
    with ba.record_kl() as mean:
        assert torch.equal(run(model, inputs), before)
    with ba.sampling(model), ba.record_kl() as drawn:
        run(model, inputs)
    torch.testing.assert_close(drawn.total(), mean.total(), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("name", NAMES)
def test_the_weights_that_come_back_are_the_drawn_ones(name):
    model, inputs = build(name, "eager"), ARCHITECTURES[name].inputs(False)
    mean = model(**inputs, output_attentions=True).attentions[0]
    bayesianize(model, ba.AttentionConfig("BAM-WC", weibull_k=1.0))
    with ba.sampling(model):
        drawn = model(**inputs, output_attentions=True).attentions[0]
    assert drawn.shape == mean.shape
    assert (drawn - mean).abs().max() > 0.05
    assert torch.equal(drawn > 0, mean > 0)
    torch.testing.assert_close(drawn.sum(-1), torch.ones(drawn.shape[:-1]))


@pytest.mark.parametrize("variant", ["soft", "BAM-WF"])
@pytest.mark.parametrize("implementation", ["default", "eager"])
@pytest.mark.parametrize("name", NAMES)
def test_dropout_during_sampling_is_the_host_s(name, implementation, variant):
    model, inputs = build(name, None if implementation == "default" else implementation), ARCHITECTURES[name].inputs(False)
    bayesianize(model, ba.AttentionConfig(variant, weibull_k=1e7))
    for module in converted(model):
        for child in ("attention_dropout", "attn_dropout", "dropout"):
            if hasattr(module, child):
                getattr(module, child).p = 0.5
    mean = run(model, inputs)
    with ba.sampling(model, dropout=True):
        dropped = run(model, inputs)
    # Falcon never drops weights beside rotary positions
    does_drop = name not in ("falcon", "falcon, new architecture")
    assert ((dropped - mean).abs().max() > 1e-2) == does_drop


def test_keys_repeated_for_all_heads_get_a_prior_for_each():
    model = bayesianize(build("falcon, new architecture"), ba.AttentionConfig("BAM-WC", prior_per_head=True))
    with ba.sampling(model), ba.record_kl() as kl:
        run(model, ARCHITECTURES["falcon, new architecture"].inputs(True))
    kl.total().backward()
    assert all(bool((m.bayes.bayes_prior.weight_in.grad.flatten(1) != 0).any(1).all()) for m in converted(model))


def test_rivals_are_refused_by_name():
    with pytest.raises(ValueError, match=r"MPNetSelfAttention\) .*hard-gumbel needs the values"):
        bayesianize(build("mpnet"), **attention_options(AttentionChoice("hard-gumbel")))


def test_a_subclass_is_refused_by_name():
    config = build("gptj").config
    with pytest.raises(ValueError, match=r"GPTJFlashAttention2 .*set_attn_implementation"):
        bayesianize(nn.ModuleDict({"attention": GPTJFlashAttention2(config, layer_idx=0)}), CONFIG)


def test_another_number_of_softmaxes_than_expected_is_an_error(monkeypatch):
    model = bayesianize(build("mpnet"), CONFIG)
    host = type(converted(model)[0]).__mro__[2]
    original = host.forward

    def before(self, hidden_states, *args, **kwargs):
        return original(self, F.softmax(hidden_states, dim=-1), *args, **kwargs)

    def after(self, hidden_states, *args, **kwargs):
        return (*original(self, hidden_states, *args, **kwargs), F.softmax(torch.zeros(1, 1, 2, 3), dim=-1))

    def never(self, hidden_states, *args, **kwargs):
        return (hidden_states,)

    for forward in (before, after, never):
        monkeypatch.setattr(host, "forward", forward)
        with ba.sampling(model), pytest.raises(RuntimeError, match="MPNetSelfAttention of this version of transformers"):
            run(model, ARCHITECTURES["mpnet"].inputs(False))
