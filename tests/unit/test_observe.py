"""`ba.observe`: statistics of the deterministic attention of plain and converted models, against weights written out."""

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import bayesattn as ba
from bayesattn.ops.attention import statistics
from bayesattn.ops.attention.statistics import row_statistics, score_statistics

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 12, "vocab_size": 53}
MASK = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
IDS = torch.arange(14).reshape(2, 7)


def build(family: str, **sizes) -> torch.nn.Module:
    torch.manual_seed(1)
    config = AutoConfig.for_model(family, **SIZES, **sizes)
    model = (AutoModelForCausalLM if family in ("llama", "gemma2") else AutoModel).from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith(("query.weight", "key.weight", "q_proj.weight", "k_proj.weight")):
            torch.nn.init.normal_(parameter, std=1.0)  # far from uniform
    return model.eval()


def eager_weights(model: torch.nn.Module, **inputs) -> tuple[torch.Tensor, ...]:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(**inputs, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    return weights


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("bert", {}),
        ("llama", {"num_key_value_heads": 2}),
        ("gemma2", {"num_key_value_heads": 2, "head_dim": 4, "sliding_window": 3}),
    ],
)
def test_a_plain_model_is_observed_and_left_as_it_was(family, sizes):
    model = build(family, **sizes)
    inputs = {"input_ids": IDS, "attention_mask": MASK}
    attentions = eager_weights(model, **inputs)
    if family == "gemma2":
        model.set_attn_implementation("eager")  # where its soft cap counts
    before = list(model.state_dict())
    with torch.no_grad():
        expected = model(**inputs)[0]
        with ba.observe(model, torch.tensor([True] + 6 * [False]), queries=MASK.bool()) as attention:
            outputs = model(**inputs)[0]
    assert torch.equal(outputs, expected)
    assert list(model.state_dict()) == before
    assert not any(isinstance(module, ba.nn.module.BayesianModule) for module in model.modules())
    assert len(attention.by_layer) == 2
    for found, weights in zip(attention.by_layer.values(), attentions, strict=True):
        assert found.entropy.shape == (2, 4)
        for example, length in enumerate((7, 4)):
            rows = weights[example, :, :length]
            torch.testing.assert_close(
                found.entropy[example], torch.special.entr(rows).sum(-1).mean(-1), rtol=1e-4, atol=1e-5
            )
            torch.testing.assert_close(found.largest[example], rows.amax(-1).mean(-1), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(found.share[example], rows[..., 0].mean(-1), rtol=1e-4, atol=1e-5)


def test_a_sampling_model_shows_its_mean_attention():
    model = build("bert")
    inputs = {"input_ids": IDS, "attention_mask": MASK}
    with ba.observe(model) as expected:
        model(**inputs)
    ba.bayesianize(model, ba.AttentionConfig("BAM-WC", weibull_k=1.0))
    with ba.sampling(model), ba.observe(model) as first:
        model(**inputs)
    # the first layer's scores do not depend on the draws
    name = next(iter(first.by_layer))
    torch.testing.assert_close(first.by_layer[name].entropy, expected.by_layer[name].entropy)
    assert first.by_layer[name].share is None


def test_a_shared_module_has_an_entry_per_call():
    model = build("albert", embedding_size=8)
    with ba.observe(model) as attention:
        model(input_ids=IDS)
    assert len(attention.calls) == 2
    ((name, layer),) = attention.by_layer.items()
    assert {called for called, _ in attention.calls} == {name}
    mean = torch.stack([call.entropy for _, call in attention.calls]).mean(0)
    torch.testing.assert_close(layer.entropy, mean)


def test_modules_of_the_library_are_observed():
    module = ba.nn.MultiheadAttention(12, 3, batch_first=True, config=ba.AttentionConfig("BAM-WC")).train()
    x = torch.randn(2, 5, 12)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with ba.observe(module) as attention:
        module(x, x, x, key_padding_mask=padding)
    module.eval()
    _, weights = module(x, x, x, key_padding_mask=padding, average_attn_weights=False)
    (layer,) = attention.by_layer.values()
    torch.testing.assert_close(layer.entropy, torch.special.entr(weights).sum(-1).mean(-1), rtol=1e-4, atol=1e-5)
    weights_module = ba.nn.BayesianWeights(ba.AttentionConfig("BAM-NOKL"), key_dim=4)
    scores = torch.randn(2, 5, 7)
    with ba.observe(weights_module) as attention:
        weights_module(scores)
    expected = torch.softmax(scores, -1).amax(-1).mean(-1, keepdim=True)
    torch.testing.assert_close(attention.by_layer[""].largest, expected)


def test_windows_of_an_example_are_put_together():
    torch.manual_seed(2)
    sizes = {"image_size": 16, "patch_size": 2, "embed_dim": 6, "depths": [1, 1], "num_heads": [2, 3], "window_size": 4}
    model = AutoModel.from_config(AutoConfig.for_model("swin", **sizes)).eval()
    images = torch.randn(3, 3, 16, 16)
    with ba.observe(model) as together, torch.no_grad():
        model(images)
    with ba.observe(model) as alone, torch.no_grad():
        model(images[1:2])
    for name, layer in together.by_layer.items():
        assert layer.entropy.shape[0] == 3
        torch.testing.assert_close(layer.entropy[1:2], alone.by_layer[name].entropy, rtol=1e-4, atol=1e-5)


def test_wrong_masks_and_empty_scopes_are_named():
    model = build("bert")
    with (
        pytest.raises(ValueError, match=r"queries must be a boolean tensor .*, got torch.int64 of shape \(2, 7\)"),
        ba.observe(model, queries=MASK),
    ):
        pass
    with ba.observe(model) as attention:
        pass
    with pytest.raises(RuntimeError, match="no attention was observed"):
        _ = attention.by_layer
    with (
        pytest.raises(ValueError, match=r"positions must be a mask of shape \(7,\) or \(2, 7\) .*, got \(1, 5\)"),
        ba.observe(model, torch.ones(5, dtype=torch.bool)),
    ):
        model(input_ids=IDS)
    with ba.observe(model, queries=torch.ones(5, dtype=torch.bool)) as attention:
        model(input_ids=IDS)
    with pytest.raises(ValueError, match=r"queries must be a mask of shape \(7,\) or \(2, 7\) .*, got \(1, 5\)"):
        _ = attention.by_layer
    with ba.observe(model), pytest.raises(RuntimeError, match="cannot be nested"), ba.observe(model):
        pass
    with ba.observe(model) as attention:
        model(input_ids=IDS)
        model(input_ids=IDS[:1])
    with pytest.raises(RuntimeError, match="batches of 1, 2 examples"):
        _ = attention.by_layer


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_blocks_are_the_scores_written_out(monkeypatch, is_causal, softcap):
    monkeypatch.setattr(statistics, "BLOCK_ENTRIES", {"cpu": 2 * 6 * 11 * 3})
    query, key = torch.randn(2, 6, 13, 5, dtype=torch.float64), torch.randn(2, 3, 11, 5, dtype=torch.float64)
    mask, bias = torch.rand(2, 1, 13, 11) < 0.6, torch.randn(1, 6, 13, 11, dtype=torch.float64)
    mask[:, :, 4] = False
    positions = torch.rand(2, 11) < 0.5
    scores = 0.3 * query @ key.repeat_interleave(2, dim=1).transpose(-2, -1)
    scores = (scores if softcap is None else softcap * torch.tanh(scores / softcap)) + bias
    allowed = mask & torch.ones(13, 11, dtype=torch.bool).tril() if is_causal else mask
    expected = score_statistics(scores, allowed, positions)
    options = {"mask": mask, "bias": bias, "is_causal": is_causal, "scale": 0.3, "softcap": softcap}
    found = row_statistics(query, key, positions=positions, **options)
    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, exact)
    assert torch.equal(found.entropy[:, :, 4], torch.zeros(2, 6, dtype=torch.float64))
