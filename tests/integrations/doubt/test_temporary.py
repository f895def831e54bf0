"""A plain model is searched for attention once; the next calls put the same conversion in and take it out again."""

import gc
import weakref

import pytest
import torch
from small_models import build
from test_uncertainty import assert_unchanged, snapshot

import bayesattn as ba
from bayesattn.doubt import temporary

# one of each kind of host: transformers' registry, its softmax, torch's function
NAMES = ["bert-sdpa", "deberta-v2", "own-sdpa"]


@pytest.fixture
def conversions(monkeypatch):
    """Count the searches."""
    found = []
    whole = temporary.bayesianize
    monkeypatch.setattr(temporary, "bayesianize", lambda *args: found.append(1) or whole(*args))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_second_call_searches_nothing_and_leaves_nothing(name, conversions):
    model, inputs = build(name)
    before = snapshot(model)
    first = ba.uncertainty(model, inputs)
    assert_unchanged(model, before)
    second = ba.uncertainty(model, inputs)
    assert_unchanged(model, before)
    assert len(conversions) == 1
    assert torch.equal(first.std, second.std)
    assert list(first.by_layer) == list(second.by_layer)
    with pytest.raises(ZeroDivisionError):
        ba.uncertainty(model, inputs, target=lambda outputs: 1 / 0)
    assert_unchanged(model, before)
    assert len(conversions) == 1
    assert "_bayes" not in " ".join(name for module in model.modules() for name in vars(module))
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_another_noise_is_another_conversion(conversions):
    model, inputs = build("bert-sdpa")
    five = ba.uncertainty(model, inputs)
    ten = ba.uncertainty(model, inputs, config=ba.AttentionConfig("BAM-NOKL", weibull_k=10.0))
    assert len(conversions) == 2
    assert torch.allclose(five.std, 2.0 * ten.std)


def test_a_changed_model_is_searched_again(conversions):
    model, inputs = build("bert-sdpa")
    ba.uncertainty(model, inputs)
    other, _ = build("bert-sdpa")
    model.bert.encoder.layer[1] = other.bert.encoder.layer[1]
    ba.uncertainty(model, inputs)
    assert len(conversions) == 2
    del model.bert.encoder.layer[1]
    shorter = ba.uncertainty(model, inputs)
    assert len(conversions) == 3
    assert len(shorter.by_layer) == 1
    # in place, in the config that all layers share
    model.set_attn_implementation("eager")
    ba.uncertainty(model, inputs)
    assert len(conversions) == 4
    model.config._attn_implementation_internal = "flex_attention"
    with pytest.raises(ValueError, match="flex_attention"):
        ba.uncertainty(model, inputs)


def test_parameters_may_change_and_move(conversions):
    model, inputs = build("bert-sdpa")
    ba.uncertainty(model, inputs)
    with torch.no_grad():
        model.bert.encoder.layer[0].attention.self.query.weight.mul_(1.5)
    model.float()
    found = ba.uncertainty(model, inputs)
    assert len(conversions) == 1
    fresh, _ = build("bert-sdpa")
    fresh.load_state_dict(model.state_dict())
    assert torch.allclose(found.std, ba.uncertainty(fresh.float(), inputs).std)


def test_a_conversion_by_hand_in_between(conversions):
    model, inputs = build("bert-sdpa")
    plain = ba.uncertainty(model, inputs)
    ba.bayesianize(model, ba.AttentionConfig("BAM-WC"))
    assert torch.equal(ba.uncertainty(model, inputs).std, plain.std)
    ba.restore(model)
    assert torch.equal(ba.uncertainty(model, inputs).std, plain.std)
    assert len(conversions) == 1


def test_the_model_is_not_kept_alive():
    model, inputs = build("bert-sdpa")
    ba.uncertainty(model, inputs)
    alive = weakref.ref(model), weakref.ref(model.bert.encoder.layer[0])
    known = len(temporary._KNOWN)
    del model
    gc.collect()
    assert [x() for x in alive] == [None, None]
    assert len(temporary._KNOWN) < known
