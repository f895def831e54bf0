"""The ways in which a custom attention function silently goes wrong in transformers, each closed or refused by name."""

import copy

import pytest
import torch
import transformers as hf
from zoo import ARCHITECTURES, SIZES, TEXT, build, run

import bayesattn as ba
from bayesattn.convert import bayesianize, conversion_report, restore

CONFIG = ba.AttentionConfig("BAM-WC")


def test_a_shared_config_object_does_not_switch_the_other_model():
    config = hf.BertConfig(**TEXT, **SIZES)
    first, second = hf.BertModel(config).eval(), hf.BertModel(config).eval()
    bayesianize(first, CONFIG)
    assert config._attn_implementation == "sdpa"
    assert all(m.config is config for m in second.modules() if hasattr(m, "config"))
    with ba.sampling(first):
        assert torch.equal(run(second, ARCHITECTURES["bert"].inputs(True)), run(second, ARCHITECTURES["bert"].inputs(True)))


def test_encoder_and_decoder_with_different_config_objects_are_both_converted():
    encoder = hf.BertModel(hf.BertConfig(**TEXT, **SIZES))
    decoder = hf.BertLMHeadModel(hf.BertConfig(**TEXT, **SIZES, is_decoder=True, add_cross_attention=True))
    model = bayesianize(hf.EncoderDecoderModel(encoder=encoder, decoder=decoder).eval(), CONFIG)
    inputs = {**ARCHITECTURES["bert"].inputs(True), "decoder_input_ids": torch.tensor([[3, 4, 5], [6, 7, 8]])}
    with ba.sampling(model), ba.record_kl() as kl:
        model(**inputs)
    assert len(conversion_report(model).converted) == len(kl) == 6


@pytest.mark.parametrize(
    ("build_model", "kind"),
    [
        (lambda: hf.RemBertModel(hf.RemBertConfig(**TEXT, **SIZES)), "RemBertSelfAttention"),
        (
            lambda: hf.XLNetModel(hf.XLNetConfig(vocab_size=61, d_model=24, n_layer=2, n_head=3, d_inner=20)),
            "XLNetRelativeAttention",
        ),
    ],
)
def test_architectures_outside_the_registry_are_refused_by_name(build_model, kind):
    with pytest.raises(ValueError, match=rf"(?s)2 of the 2 .*{kind}.*registry.*Nothing of this model can be converted"):
        bayesianize(build_model(), CONFIG)


def test_attention_sinks_are_refused_by_name():
    config = hf.GptOssConfig(
        **TEXT, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=20,
        head_dim=6, num_local_experts=2, num_experts_per_tok=1,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"GptOssAttention .*attention sinks"):
        bayesianize(hf.GptOssForCausalLM(config), CONFIG)


def test_eager_attention_that_needs_a_mask_is_tried_with_one():
    model = hf.ModernBertDecoderModel(hf.ModernBertDecoderConfig(**TEXT, **SIZES))
    assert len(conversion_report(bayesianize(model, CONFIG)).converted) == 2


def test_groups_of_heads_may_be_a_float():
    model = build("bert")
    for layer in model.bert.encoder.layer:
        layer.attention.self.num_key_value_groups = 1.0
    assert len(conversion_report(bayesianize(model, CONFIG)).converted) == 2


def test_half_a_model_is_an_error_unless_asked_for():
    bert, rembert = hf.BertModel(hf.BertConfig(**TEXT, **SIZES)), hf.RemBertModel(hf.RemBertConfig(**TEXT, **SIZES))
    model = torch.nn.ModuleDict({"bert": bert, "rembert": rembert})
    with pytest.raises(ValueError, match=r"(?s)2 of the 4 .*RemBertSelfAttention.*exclude"):
        bayesianize(model, CONFIG)
    assert not conversion_report(model).converted
    bayesianize(model, CONFIG, exclude=["rembert.*"])
    assert len(conversion_report(model).converted) == 2


@pytest.mark.parametrize("implementation", ["flex_attention", "flash_attention_2"])
def test_other_implementations_are_refused_before_and_after_conversion(implementation):
    model = build("bert")
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation_internal = implementation
    with pytest.raises(ValueError, match=f"{implementation}.*set_attn_implementation"):
        bayesianize(model, CONFIG)
    model.config._attn_implementation_internal = "sdpa"
    bayesianize(model, CONFIG)
    model.config._attn_implementation_internal = implementation
    part = model.bert.encoder.layer[0].attention.self
    q = torch.zeros(1, 3, 2, 8)
    from bayesattn.integrations.hf.attention import bayesian_attention

    with (
        ba.sampling(model),
        pytest.raises(ValueError, match=f"must be one of sdpa, eager.* while sampling, got {implementation!r}"),
    ):
        bayesian_attention(part, q, q, q, None)


@pytest.mark.parametrize("argument", ["s_aux", "indices", "block_indices", "cache"])
def test_arguments_that_change_the_mathematics_are_refused(argument):
    from bayesattn.integrations.hf.attention import bayesian_attention

    model = bayesianize(build("bert"), CONFIG)
    q = torch.zeros(1, 3, 2, 8)
    with ba.sampling(model), pytest.raises(ValueError, match=argument):
        bayesian_attention(model.bert.encoder.layer[0].attention.self, q, q, q, None, **{argument: torch.zeros(3)})


def test_the_name_without_a_conversion_is_an_error_not_a_plain_model():
    import bayesattn.integrations.hf  # noqa: F401  (registers the name)

    model = build("bert")
    model.set_attn_implementation("bayesattn")
    with pytest.raises(ValueError, match="BertSelfAttention is set to 'bayesattn' but was not converted"):
        run(model, ARCHITECTURES["bert"].inputs(True))


def test_changing_the_implementation_after_conversion_is_followed():
    model, inputs = build("llama"), ARCHITECTURES["llama"].inputs(True)
    model.set_attn_implementation("eager")
    eager = run(model, inputs)
    model.set_attn_implementation("sdpa")
    bayesianize(model, CONFIG)
    model.set_attn_implementation("eager")
    assert torch.equal(run(model, inputs), eager)
    with ba.sampling(model):
        attentions = model(**inputs, output_attentions=True).attentions
    assert len(attentions) == 2
    torch.testing.assert_close(attentions[0].sum(-1)[1], torch.ones(4, 7))


def test_left_padding_never_reaches_real_tokens():
    model = build("llama")
    ids = torch.tensor([[0, 0, 0, 9, 8, 7, 6]])
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    position_ids = torch.tensor([[0, 0, 0, 0, 1, 2, 3]])
    bayesianize(model, ba.AttentionConfig("BAM-LC", sigma_q=1e-7))
    alone = model(input_ids=ids[:, 3:]).logits
    with ba.sampling(model), ba.record_kl() as kl:
        padded = model(input_ids=ids, attention_mask=mask, position_ids=position_ids).logits
    torch.testing.assert_close(padded[:, 3:], alone, atol=1e-4, rtol=1e-4)
    with ba.sampling(model), ba.record_kl() as unpadded:
        model(input_ids=ids[:, 3:])
    torch.testing.assert_close(kl.total(), unpadded.total(), rtol=1e-4, atol=1e-4)


def test_gpt2_s_own_upcast_path_is_refused_where_it_would_run():
    config = hf.GPT2Config(**TEXT, n_embd=24, n_layer=1, n_head=3, n_positions=8, reorder_and_upcast_attn=True)
    model = hf.GPT2LMHeadModel(config)
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match=r"GPT2Attention .*of its own"):
        bayesianize(model, CONFIG)
    model.set_attn_implementation("sdpa")
    bayesianize(model, CONFIG)


def test_a_deep_copy_is_a_model_of_its_own():
    model, inputs = (
        bayesianize(build("swin"), ba.AttentionConfig("BAM-WC", weibull_k=1.0)),
        ARCHITECTURES["swin"].inputs(False),
    )
    twin = copy.deepcopy(model)
    with ba.sampling(twin), ba.record_kl() as kl:
        assert not torch.equal(run(twin, inputs), run(model, inputs))
    assert [value.shape for _, value in kl.per_call()][:2] == [(2,), (2,)]
    restore(twin)
    assert len(conversion_report(model).converted) == 2
    with ba.sampling(model):
        run(model, inputs)


def test_single_layers_can_be_chosen():
    model, inputs = build("bert"), ARCHITECTURES["bert"].inputs(True)
    bayesianize(model, CONFIG, layers=[1])
    with ba.sampling(model), ba.record_kl(model) as kl:
        run(model, inputs)
    assert list(kl.per_layer()) == ["bert.encoder.layer.1.attention.self.bayes"]
    assert "not selected" in conversion_report(model).left_alone["bert.encoder.layer.0.attention.self"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build_model", "calls"),
    [
        (lambda: hf.AlbertModel(hf.AlbertConfig(hidden_size=768, num_attention_heads=12, intermediate_size=3072)), 1),
        (lambda: hf.BertModel(hf.BertConfig()), 12),
    ],
    ids=["albert-base", "bert-base"],
)
def test_added_parameters_are_below_a_thousandth_at_base_size(build_model, calls):
    result = conversion_report(bayesianize(build_model(), CONFIG))
    # a head has 64 features: 64·10 + 10 + 10 + 1 per module
    assert result.added_parameters == calls * 661
    assert result.added_parameters < 1e-3 * result.model_parameters
