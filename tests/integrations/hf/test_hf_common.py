"""The common suite: every architecture × variant × implementation × mask, on tiny random models.

Off: bit-identical, and no trace after restore. On with vanishing noise: the mean. On: one KL per call, with gradients.
`docs/reference/supported-models.md` shows the table that these tests prove.
"""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from zoo import ARCHITECTURES, BATCH, build, main_output, run

import bayesattn as ba
from bayesattn.convert import bayesianize, conversion_report, restore

VARIANTS = ("BAM-NOKL", "BAM-LF", "BAM-LC", "BAM-WF", "BAM-WC")


def cases(*variants: str) -> pytest.MarkDecorator:
    """Every architecture × mask × variant on its default implementation, and on eager for the last variant."""
    rows = [
        pytest.param(
            name, implementation, padded, variant, id=f"{name}-{implementation}-{'padded' if padded else 'full'}-{variant}"
        )
        for name, architecture in ARCHITECTURES.items()
        for padded in ((False, True) if architecture.can_pad else (False,))
        for implementation in architecture.implementations
        for variant in (variants if implementation == architecture.implementations[0] else variants[-1:])
    ]
    return pytest.mark.parametrize(("name", "implementation", "padded", "variant"), rows)


def trace(model: PreTrainedModel) -> list[Any]:
    """Everything about a model that a conversion could leave behind; configs by identity and by content."""
    hooks = [name for name in vars(nn.Module()) if "hooks" in name]
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    modules = [
        (
            name,
            type(module),
            sorted(vars(module)),
            [list(getattr(module, hook)) for hook in hooks],
            id(vars(module).get("config")),
        )
        for name, module in model.named_modules()
    ]
    return [modules, {key: (repr(config), config._attn_implementation) for key, config in configs.items()}]


@cases(*VARIANTS)
def test_off_is_bit_identical_and_restore_leaves_no_trace(name, implementation, padded, variant):
    model, inputs = build(name, implementation), ARCHITECTURES[name].inputs(padded)
    state, before, traced = copy.deepcopy(model.state_dict()), run(model, inputs), trace(model)
    bayesianize(model, ba.AttentionConfig(variant))
    assert len(conversion_report(model).converted) == ARCHITECTURES[name].modules
    assert not conversion_report(model).left_alone
    assert torch.equal(run(model, inputs), before)
    with ba.sampling(model):
        run(model, inputs)
    restore(model)
    assert trace(model) == traced
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch.equal(run(model, inputs), before)


@cases("BAM-LF", "BAM-WF")
def test_vanishing_noise_gives_the_mean(name, implementation, padded, variant):
    """The sampled path means the same scores: mask, causality, window, position bias, soft cap, grouped heads, scale."""
    model, inputs = build(name, implementation), ARCHITECTURES[name].inputs(padded)
    mean = run(model, inputs)
    bayesianize(model, ba.AttentionConfig(variant, sigma_q=1e-7, weibull_k=1e7))
    with ba.sampling(model):
        drawn = run(model, inputs)
    # float32 softmax in another order through two layers, plus noise of 1e-6; logits are of order 1 to 50
    torch.testing.assert_close(drawn, mean, atol=2e-4, rtol=2e-4)


@cases("BAM-WC")
def test_draws_differ_from_each_other_and_from_the_mean(name, implementation, padded, variant):
    model, inputs = build(name, implementation), ARCHITECTURES[name].inputs(padded)
    mean = run(model, inputs)
    bayesianize(model, ba.AttentionConfig(variant, weibull_k=1.0))
    with ba.sampling(model):
        first, second = run(model, inputs), run(model, inputs)
    scale = mean.abs().mean()
    assert (first - second).abs().max() > 1e-2 * scale
    assert (first - mean).abs().max() > 1e-2 * scale


@cases(*VARIANTS[1:])
def test_one_kl_per_call_with_gradients(name, implementation, padded, variant):
    model, inputs = build(name, implementation), ARCHITECTURES[name].inputs(padded)
    bayesianize(model, ba.AttentionConfig(variant)).train()
    with ba.record_kl(model) as kl:
        run(model, inputs)
    assert len(kl) == ARCHITECTURES[name].calls
    assert all(value.shape == (BATCH,) and bool(torch.isfinite(value).all()) for _, value in kl.per_call())
    assert {layer.removesuffix(".bayes") for layer in kl.per_layer()} == set(conversion_report(model).converted)
    kl.total().backward()
    for layer in conversion_report(model).converted:
        prior = model.get_submodule(layer).bayes.bayes_prior
        if prior is not None:
            assert prior.weight_in.grad.abs().max() > 0
            assert all(bool(torch.isfinite(p.grad).all()) for p in prior.parameters())
    reached = [p.grad for n, p in model.named_parameters() if p.grad is not None and "bayes" not in n]
    assert max(float(grad.abs().max()) for grad in reached) > 0


def test_dropout_during_sampling_uses_each_architecture_s_own_rate():
    """In eval mode transformers passes 0.0 to the attention function; the rate must come from the module."""
    from bayesattn.convert.attributes import dropout_rate
    from bayesattn.integrations.hf import attention

    unknown = {}
    for name, architecture in ARCHITECTURES.items():
        model = bayesianize(build(name), ba.AttentionConfig("BAM-WF")).train()
        given: list[tuple[float, float | None]] = []
        original = attention._dropout

        def spy(module, child, p, given=given, original=original):
            given.append((p, dropout_rate(module)))
            return original(module, child, p)

        attention._dropout = spy
        try:
            run(model, architecture.inputs(False))
        finally:
            attention._dropout = original
        if not all(p == rate for p, rate in given):
            unknown[name] = given
    assert not unknown


@cases("BAM-NOKL")
def test_every_architecture_has_doubt_and_stays_as_it_was(name, implementation, padded, variant):
    """One number per example, of all that the model puts out; every attention module adds to its variance."""

    def number(outputs):
        flat = main_output(outputs).flatten(1)
        return (flat * torch.arange(flat.shape[1]).cos()).sum(dim=1)

    model, inputs = build(name, implementation), ARCHITECTURES[name].inputs(padded)
    before, traced = run(model, inputs), trace(model)
    result = ba.uncertainty(model, inputs, target=number)
    assert torch.isfinite(result.std).all()
    assert len(result.by_layer) == ARCHITECTURES[name].modules
    assert all((variance > 0).any() for variance in result.by_layer.values())
    torch.testing.assert_close(sum(result.by_layer.values()), result.std.square())
    assert trace(model) == traced
    assert torch.equal(run(model, inputs), before)
