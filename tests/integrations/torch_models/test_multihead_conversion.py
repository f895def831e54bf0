"""nn.MultiheadAttention and torch's transformer stacks: converted in place, exact when off, sampled when on, given back."""

import copy
import math

import pytest
import torch
from torch import nn

import bayesattn as ba
from bayesattn.convert import bayesianize, conversion_report, restore

VARIANTS = ("BAM-NOKL", "BAM-LF", "BAM-LC", "BAM-WF", "BAM-WC")
EMBED, HEADS, LENGTH, BATCH = 10, 2, 7, 3


def encoder(norm_first: bool = False, dropout: float = 0.0) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(EMBED, HEADS, 11, dropout=dropout, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).eval()


def padding() -> torch.Tensor:
    mask = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    mask[0, 4:] = True
    return mask


def fingerprint(model: nn.Module) -> list:
    """Everything about a model that a conversion could leave behind."""
    hooks = [name for name in vars(nn.Module()) if "hooks" in name]
    return [
        (name, type(module), sorted(vars(module)), [list(getattr(module, hook)) for hook in hooks])
        for name, module in model.named_modules()
    ]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "fast-path"])
@pytest.mark.parametrize("mask", [None, padding()], ids=["full", "padded"])
def test_eval_is_bit_identical(variant, grad, mask):
    model, x = encoder(), torch.randn(BATCH, LENGTH, EMBED)
    with torch.set_grad_enabled(grad):
        before = model(x, src_key_padding_mask=mask)
        bayesianize(model, ba.AttentionConfig(variant))
        assert torch.equal(model(x, src_key_padding_mask=mask), before)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("mask", [None, padding()], ids=["full", "padded"])
def test_sampling_is_never_lost_to_the_fused_path(norm_first, mask):
    model, x = (
        bayesianize(encoder(norm_first), ba.AttentionConfig("BAM-WC", weibull_k=1.0)),
        torch.randn(BATCH, LENGTH, EMBED),
    )
    with torch.no_grad():
        mean = model(x, src_key_padding_mask=mask)
        with ba.sampling(model):
            first, second = (model(x, src_key_padding_mask=mask) for _ in range(2))
    real = torch.ones(BATCH, LENGTH, dtype=torch.bool) if mask is None else ~mask
    assert (first - second)[real].abs().max() > 1e-3
    assert (first - mean)[real].abs().max() > 1e-3


@pytest.mark.parametrize("mask", [None, padding()], ids=["full", "padded"])
def test_vanishing_noise_gives_the_mean(mask):
    model, x = bayesianize(encoder(), ba.AttentionConfig("BAM-LF", sigma_q=1e-7)), torch.randn(BATCH, LENGTH, EMBED)
    with torch.no_grad():
        mean = model(x, src_key_padding_mask=mask)
        with ba.sampling(model):
            drawn = model(x, src_key_padding_mask=mask)
    real = torch.ones(BATCH, LENGTH, dtype=torch.bool) if mask is None else ~mask
    # two kernels of the same float32 softmax, and noise of 1e-7
    torch.testing.assert_close(drawn[real], mean[real], atol=5e-6, rtol=0.0)


def test_decoder_converts_self_and_cross_attention():
    layer = nn.TransformerDecoderLayer(EMBED, HEADS, 11, dropout=0.0, batch_first=True)
    model = nn.TransformerDecoder(layer, 2).eval()
    x, memory = torch.randn(BATCH, 5, EMBED), torch.randn(BATCH, LENGTH, EMBED)
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    before = model(x, memory, tgt_mask=causal)
    bayesianize(model, ba.AttentionConfig("BAM-WC"))
    assert len(conversion_report(model).converted) == 4
    assert torch.equal(model(x, memory, tgt_mask=causal), before)
    with ba.sampling(model), ba.record_kl(model) as kl:
        model(x, memory, tgt_mask=causal)
    assert sorted(kl.per_layer()) == sorted(conversion_report(model).converted)


@pytest.mark.parametrize("variant", VARIANTS)
def test_restore_leaves_no_trace(variant):
    model, x = encoder(), torch.randn(BATCH, LENGTH, EMBED)
    state, trace, before = copy.deepcopy(model.state_dict()), fingerprint(model), model(x)
    bayesianize(model, ba.AttentionConfig(variant))
    model.train()
    with ba.record_kl():
        model(x)
    model.eval()
    assert restore(model) is model
    assert fingerprint(model) == trace
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(model.state_dict()[key], state[key]) for key in state)
    assert torch.equal(model(x), before)


def test_training_mode_of_the_new_prior_follows_the_module():
    model = bayesianize(encoder().train(), ba.AttentionConfig("BAM-WC"))
    assert all(module.training for module in model.modules())


def test_gradient_reaches_queries_keys_and_priors():
    model, x = bayesianize(encoder(), ba.AttentionConfig("BAM-WC")).train(), torch.randn(BATCH, LENGTH, EMBED)
    with ba.record_kl() as kl:
        model(x)
    kl.total().backward()
    first = model.layers[0].self_attn
    for parameter in (*first.bayes_prior.parameters(), first.in_proj_weight):
        assert parameter.grad is not None
    query, key, value = first.in_proj_weight.grad.chunk(3)
    assert query.abs().max() > 0
    assert key.abs().max() > 0
    # the KL of the first layer knows no values; that of the second reaches them through the first's output
    assert first.bayes_prior.weight_in.grad.abs().max() > 0
    assert math.isfinite(float(value.abs().max()))


def test_a_subclass_is_refused_by_name_and_nothing_changes():
    class Mine(nn.MultiheadAttention):
        pass

    model = nn.ModuleDict({"plain": nn.MultiheadAttention(EMBED, HEADS), "mine": Mine(EMBED, HEADS)})
    trace = fingerprint(model)
    with pytest.raises(ValueError, match=r"1 of the 2 .*\n.*Mine \('mine'\)"):
        bayesianize(model, ba.AttentionConfig("BAM-WC"))
    assert fingerprint(model) == trace
    bayesianize(model, ba.AttentionConfig("BAM-WC"), exclude=["mine"])
    assert conversion_report(model).converted == ("plain",)
    assert "subclass" in conversion_report(model).left_alone["mine"]


def test_a_module_built_bayesian_is_neither_converted_nor_restored():
    own = ba.nn.MultiheadAttention(EMBED, HEADS, config=ba.AttentionConfig("BAM-WF"))
    model = nn.ModuleDict({"own": own, "stock": nn.MultiheadAttention(EMBED, HEADS)})
    restore(bayesianize(model, ba.AttentionConfig("BAM-LF")))
    assert type(model["own"]) is ba.nn.MultiheadAttention
    assert type(model["stock"]) is nn.MultiheadAttention
    assert model["own"].config.variant == "BAM-WF"
