"""Weights of one's own in the library's modules: any object with the right members, by itself or built by a function."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bayesattn as ba
from bayesattn.nn import AttentionWeights
from helpers import no_type_checks


class Sharpened(nn.Module):
    """softmax(2 Φ), with a KL of 3 per example."""

    name, has_kl, kl_reduction, has_own_dropout, runs_on_edges, is_idle = "sharpened", True, "sum", False, False, False

    def __init__(self, *, head_dim, num_heads, device=None, dtype=None):
        super().__init__()
        self.sizes = (head_dim, num_heads)
        self.factor = nn.Parameter(torch.tensor(2.0, device=device, dtype=dtype))

    def settings(self):
        return {"name": self.name}

    def forward(self, scores, key, value, *, mask, dropout_p):
        scores = scores * self.factor
        weights = torch.softmax(scores if mask is None else scores.masked_fill(~mask, -torch.inf), dim=-1)
        return F.dropout(weights, dropout_p) @ value, weights, torch.full((len(scores),), 3.0)

    def on_edges(self, scores, value, edges, ops, *, dropout_p):
        raise NotImplementedError

    def edge_weights(self, scores, edges, ops):
        raise NotImplementedError


X = torch.randn(2, 5, 12)
PADDING = torch.tensor([[False] * 5, [False, False, True, True, True]])


def test_the_example_has_what_the_protocol_lists():
    assert isinstance(Sharpened(head_dim=4, num_heads=3), AttentionWeights)


@pytest.mark.parametrize("is_built", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention_runs_the_object(need_weights, is_built):
    weights = Sharpened if is_built else Sharpened(head_dim=4, num_heads=3)
    layer = ba.nn.MultiheadAttention(12, 3, batch_first=True, weights=weights).eval()
    assert layer.bayes_weights.sizes == (4, 3)
    soft = ba.nn.MultiheadAttention(12, 3, batch_first=True, config=ba.AttentionConfig("soft")).eval()
    state = {name: value.clone() for name, value in layer.state_dict().items() if "bayes" not in name}
    # twice the query is twice the score
    state["in_proj_weight"][:12] *= 2.0
    state["in_proj_bias"][:12] *= 2.0
    soft.load_state_dict(state)
    with ba.record_kl() as kl:
        output, shown = layer(X, X, X, key_padding_mask=PADDING, need_weights=need_weights)
    assert kl.total().item() == 3.0
    expected, maps = soft(X, X, X, key_padding_mask=PADDING, need_weights=True)
    torch.testing.assert_close(output, expected)
    assert shown is not None  # what the object returned, asked for or not
    torch.testing.assert_close(shown, maps)


def test_additive_attention_and_transformer_layers_take_it():
    attention = ba.nn.AdditiveAttention(12, 12, 7, weights=Sharpened)
    with ba.record_kl() as kl:
        context, weights = attention(X, X, mask=~PADDING)
    assert kl.total().item() == 3.0
    assert context.shape == X.shape
    assert not weights[1, :, 2:].any()
    torch.testing.assert_close(
        weights,
        torch.softmax(2.0 * attention.scores(X, attention.key_proj(X)).masked_fill(PADDING[:, None], -torch.inf), -1),
    )
    layer = ba.nn.TransformerDecoderLayer(12, 3, 16, batch_first=True, weights=Sharpened)
    with ba.record_kl() as kl:
        layer(X, X).sum().backward()
    assert kl.total().item() == 6.0
    assert all(p.grad is not None for p in layer.parameters())


def test_a_converted_model_gets_one_object_per_module_and_gives_it_back():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 2, 16, batch_first=True), 2)
    before = set(model.state_dict())
    ba.bayesianize(model, weights=Sharpened)
    parts = [module for module in model.modules() if isinstance(module, Sharpened)]
    assert len({id(part) for part in parts}) == 2
    assert parts[0].sizes == (6, 2)
    assert [row.variant for row in ba.conversion_report(model).rows] == ["sharpened"] * 2
    ba.restore(model)
    assert set(model.state_dict()) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give either config or weights, got neither"),
        ({"config": ba.AttentionConfig("soft"), "weights": Sharpened}, "give either config or weights, got both"),
        ({"weights": 3}, "weights must be an nn.Module, .*, got int"),
        (
            {"weights": lambda **sizes: nn.Identity()},
            "weights must be an nn.Module with .*, got Identity without name, has_kl",
        ),
    ],
)
def test_what_it_must_be_is_said_by_name(options, message, monkeypatch):
    no_type_checks(monkeypatch)
    with pytest.raises(ValueError, match=message):
        ba.nn.MultiheadAttention(12, 3, **options)


def test_one_object_for_several_modules_is_refused(monkeypatch):
    no_type_checks(monkeypatch)
    weights = Sharpened(head_dim=4, num_heads=3)
    with pytest.raises(ValueError, match="because the layer has 2, got one Sharpened"):
        ba.nn.TransformerDecoderLayer(12, 3, 16, weights=weights)
    with pytest.raises(
        ValueError, match="weights must be a function that builds one object per attention module, got Sharpened"
    ):
        ba.bayesianize(nn.TransformerEncoderLayer(12, 3, 16), weights=weights)
