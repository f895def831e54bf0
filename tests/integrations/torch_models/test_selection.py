"""Which modules bayesianize takes, and that it changes nothing when it refuses."""

import pytest
import torch
from torch import nn

import bayesattn as ba
from bayesattn.convert import bayesianize, conversion_report, restore
from helpers import no_type_checks

CONFIG = ba.AttentionConfig("BAM-WC")


def stack(depth: int = 3) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(8, 2, 9, batch_first=True)
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)


@pytest.mark.parametrize(
    ("layers", "exclude", "expected"),
    [
        (None, None, (0, 1, 2)),
        ([0], None, (0,)),
        ([-1], None, (2,)),
        (["layers.1.*"], None, (1,)),
        (None, ["layers.1.self_attn", 0], (2,)),
        (["layers.[01].*"], [1], (0,)),
    ],
)
def test_layers_and_exclude_select(layers, exclude, expected):
    model = bayesianize(stack(), CONFIG, layers=layers, exclude=exclude)
    assert conversion_report(model).converted == tuple(f"layers.{i}.self_attn" for i in expected)
    assert set(conversion_report(model).left_alone.values()) <= {"not selected"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": [3]}, r"layers has 3, which matches nothing; .*layers\.0\.self_attn"),
        ({"exclude": ["encoder.*"]}, r"exclude has 'encoder\.\*', which matches nothing"),
        ({"layers": "layers.0.*"}, "layers must be a list of names, glob patterns or positions, got 'layers.0"),
        ({"layers": [True]}, "layers has True"),
        ({"layers": [0], "exclude": [0]}, "leaves nothing to convert"),
    ],
)
def test_a_selection_that_selects_nothing_is_an_error(arguments, message, monkeypatch):
    no_type_checks(monkeypatch)
    model = stack()
    with pytest.raises(ValueError, match=message):
        bayesianize(model, CONFIG, **arguments)
    assert not conversion_report(model).converted


def test_a_model_without_attention_is_an_error():
    with pytest.raises(ValueError, match="Linear, and no attention was found"):
        bayesianize(nn.Linear(3, 2), CONFIG)


def test_attention_nobody_knows_is_named_not_skipped():
    class HomeMadeAttention(nn.Module):
        def forward(self, x):
            return torch.softmax(x @ x.mT, dim=-1) @ x

    model = nn.Sequential(stack(1), HomeMadeAttention())
    with pytest.raises(ValueError, match=r"(?s)1 of the 2 .*HomeMadeAttention \('1'\).*exclude"):
        bayesianize(model, CONFIG)
    assert not conversion_report(model).converted
    bayesianize(model, CONFIG, exclude=["1"])
    assert conversion_report(model).converted == ("0.layers.0.self_attn",)


def test_converting_twice_and_restoring_what_is_plain_are_errors():
    model = stack(1)
    with pytest.raises(ValueError, match="without converted attention"):
        restore(model)
    bayesianize(model, CONFIG)
    with pytest.raises(ValueError, match=r"already has 1 Bayesian attention modules.*layers\.0\.self_attn"):
        bayesianize(model, CONFIG)


@pytest.mark.parametrize(("model", "config"), [("model", CONFIG), (nn.Linear(1, 1), "BAM-WC")])
def test_wrong_types_are_named(model, config, monkeypatch):
    no_type_checks(monkeypatch)
    with pytest.raises(ValueError, match=r"model must be a torch\.nn\.Module, got|config must be an AttentionConfig, got"):
        bayesianize(model, config)


def test_an_error_half_way_undoes_the_first_half(monkeypatch):
    from bayesattn.convert import multihead

    model, calls, original = stack(3), [], multihead.attach

    def failing(*args):
        calls.append(args[1])
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        original(*args)

    monkeypatch.setattr(multihead, "attach", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        bayesianize(model, CONFIG)
    assert all(type(layer.self_attn) is nn.MultiheadAttention for layer in model.layers)


def test_report_counts_what_was_added():
    model = bayesianize(stack(2), ba.AttentionConfig("BAM-WC", prior_hidden_dim=5))
    # one prior: 4 × 5 + 5 + 5 + 1, heads of 8 / 2 features
    assert conversion_report(model).added_parameters == 2 * 31
    assert conversion_report(model).model_parameters == sum(p.numel() for p in model.parameters())
    assert "2 of 2 attention modules are Bayesian, 62 parameters added" in str(conversion_report(model))
    assert str(conversion_report(model)).endswith("an optimizer built before the conversion does not have them")
    assert conversion_report(restore(model)).added_parameters == 0
