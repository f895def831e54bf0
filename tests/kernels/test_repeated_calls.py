"""A converted model's call that is like an earlier one skips its checks; draws, KL and gradients are the same."""

import copy
from dataclasses import replace

import pytest
import torch
from kernel_device import DEVICE, MARKS
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel

import bayesattn as ba
from bayesattn.convert import hosted
from bayesattn.entropy import observe_entropy
from bayesattn.functional import dense
from bayesattn.functional.repeated import Repeated
from bayesattn.noise import keyed

pytestmark = MARKS
SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 31,
    "hidden_dropout_prob": 0.0, "max_position_embeddings": 32,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _by_the_kernels(monkeypatch):
    monkeypatch.setattr(dense, "choose", lambda *_: "triton")


def model_of(variant, **settings):
    torch.manual_seed(1)
    model = BertModel(BertConfig(**SIZES, attention_probs_dropout_prob=0.1))
    ba.bayesianize(model, ba.AttentionConfig(variant, **settings))
    return model.to(torch.device(DEVICE)).train()


def inputs_of(length=11, padded=True):
    ids = torch.arange(2 * length, device=DEVICE).reshape(2, length) % 31
    mask = torch.ones_like(ids)
    mask[0, length - 3 :] = 0
    return {"input_ids": ids, "attention_mask": mask} if padded else {"input_ids": ids}


def step(model, inputs):
    """Return output, KL and gradients of one draw, always the same one."""
    model.zero_grad()
    torch.manual_seed(5)
    with ba.record_kl() as kl:
        output = model(**inputs).last_hidden_state
    (output.square().sum() + 0.3 * kl.total()).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"output": output.detach(), "kl": kl.total().detach(), **gradients}


def repeated_in(model):
    parts = [part for part in model.modules() if isinstance(part, hosted.HostedAttention)]
    return [known for part in parts for known in part._repeated.values()]


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, truth in expected.items():
        # the same kernels on the same numbers; on a GPU dQ is added in any order
        torch.testing.assert_close(found[name], truth, rtol=1e-4, atol=1e-5 * float(truth.abs().max() + 1.0), msg=name)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("variant", ["BAM-NOKL", "BAM-WF", "BAM-WC"])
def test_a_repeated_call_gives_the_numbers_of_the_first(variant, padded, monkeypatch):
    model, inputs = model_of(variant), inputs_of(padded=padded)
    with monkeypatch.context() as patch:
        patch.setattr(hosted, "signature", lambda *_: None)
        expected = step(model, inputs)
    assert repeated_in(model) == []
    for _ in range(3):
        same(step(model, inputs), expected)
    assert len(repeated_in(model)) == 2
    assert all(isinstance(known, Repeated) for known in repeated_in(model))


def test_other_lengths_masks_and_settings_are_other_calls():
    model = model_of("BAM-WC")
    for inputs in (inputs_of(11), inputs_of(11, padded=False), inputs_of(7)):
        step(model, inputs)
        step(model, inputs)
    assert len(repeated_in(model)) == 6
    part = next(part for part in model.modules() if isinstance(part, hosted.HostedAttention))
    part.config = replace(part.config, weibull_k=2.0)
    assert part._repeated == {}
    with torch.no_grad():
        # without a scope there is no KL
        model(**inputs_of(11))
    assert [known is not None and known.need_kl for known in part._repeated.values()] == [False]


def test_lognormal_calls_are_looked_at_every_time():
    model = model_of("BAM-LC")
    step(model, inputs_of())
    same(step(model, inputs_of()), step(model, inputs_of()))
    assert repeated_in(model) == [None, None]


def test_open_scopes_get_what_they_ask_for():
    model, inputs = model_of("BAM-WC"), inputs_of()
    for _ in range(2):
        step(model, inputs)
    with observe_entropy() as seen:
        model(**inputs)
    assert seen.count == 4
    seeds = keyed.example_seeds(0, 0, torch.arange(2))
    outputs = []
    for _ in range(2):
        with keyed.keyed_noise(seeds):
            torch.manual_seed(len(outputs))
            outputs.append(model(**inputs).last_hidden_state)
    torch.testing.assert_close(outputs[0], outputs[1])


def test_a_copy_of_a_model_finds_out_by_itself():
    model, inputs = model_of("BAM-WC"), inputs_of()
    expected = step(model, inputs)
    twin = copy.deepcopy(model)
    assert repeated_in(twin) == []
    same(step(twin, inputs), expected)


def test_a_detached_prior_and_one_per_head_are_repeated_as_they_are():
    for settings in ({"detach_keys": True}, {"prior_per_head": True}):
        model = model_of("BAM-WC", **settings)
        expected = step(model, inputs_of())
        same(step(model, inputs_of()), expected)


@pytest.mark.parametrize("variant", ["BAM-NOKL", "BAM-WC"])
def test_rotary_queries_under_autocast_are_repeated_in_the_type_of_the_values(variant, monkeypatch):
    """Rotary embeddings leave queries and keys in float32, where the linear layer has made the values half precision."""
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 31}
    config = LlamaConfig(**sizes, num_hidden_layers=2, num_key_value_heads=2, max_position_embeddings=32, use_cache=False)
    torch.manual_seed(1)
    model = LlamaModel(config)
    ba.bayesianize(model, ba.AttentionConfig(variant))
    model.to(torch.device(DEVICE)).train()

    def cast_step():
        with torch.autocast(DEVICE, torch.float16):
            return step(model, inputs_of(padded=False))

    with monkeypatch.context() as patch:
        patch.setattr(hosted, "signature", lambda *_: None)
        expected = cast_step()
    for _ in range(3):
        same(cast_step(), expected)
    assert all(isinstance(known, Repeated) for known in repeated_in(model))
