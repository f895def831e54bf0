"""Modules that call torch's attention are found however they name it, from the source or by running the model once."""

import functools

import attention_helpers
import pytest
import torch
import torch.nn.functional as F
from attention_helpers import attend
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

import bayesattn as ba
from bayesattn.convert import bayesianize, conversion_report, load_bayesian, restore, save_bayesian

CONFIG = ba.AttentionConfig("BAM-WC", weibull_k=1.0, prior_hidden_dim=3)
X = torch.randn(2, 3, 5, 7)


class Base(nn.Module):
    head_dim = 7

    def attend(self, q, k, v):
        return sdpa(q, k, v)


class ByName(Base):
    def forward(self, x):
        return scaled_dot_product_attention(x, x, x)


class UnderAnotherName(Base):
    def forward(self, x):
        return sdpa(x, x, x)


class ThroughAMethod(Base):
    def forward(self, x):
        return self.attend(x, x, x)


class ThroughAFunction(Base):
    def forward(self, x):
        return attend(x, x, x)


class ThroughAModule(Base):
    def forward(self, x):
        return attention_helpers.attend(x, x, x)


class ThroughALambda(Base):
    def forward(self, x):
        return (lambda y: F.scaled_dot_product_attention(y, y, y))(x)


class ThroughAnImportInside(Base):
    def forward(self, x):
        from torch.nn.functional import scaled_dot_product_attention as inside

        return inside(x, x, x)


def closure(function):
    class ThroughAClosure(Base):
        def forward(self, x):
            return function(x, x, x)

    return ThroughAClosure


class ThroughAnAttribute(Base):
    def __init__(self) -> None:
        super().__init__()
        self.function = functools.partial(scaled_dot_product_attention, is_causal=True)

    def forward(self, x):
        return self.function(x, x, x)


class ThroughATable(Base):
    table = {"torch": scaled_dot_product_attention}  # noqa: RUF012

    def forward(self, x):
        return self.table["torch"](x, x, x)


class Own(Base):
    """Names a helper that could attend, and attends by hand."""

    def attend(self, q, k, v):
        return torch.softmax(q @ k.mT, dim=-1) @ v

    def forward(self, x):
        return self.attend(x, x, x)


class Tower(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.linear = part, nn.Linear(7, 7)

    def forward(self, x):
        return self.linear(self.part(x))


def check(model: nn.Module, before: torch.Tensor) -> None:
    assert conversion_report(model).converted == ("part",)
    assert torch.equal(model(X), before)
    with ba.sampling(model), ba.record_kl() as kl:
        assert not torch.equal(model(X), before)
    assert len(kl) == 1


SHOWN = [
    ByName,
    UnderAnotherName,
    ThroughAMethod,
    ThroughAFunction,
    ThroughAModule,
    ThroughALambda,
    ThroughAnImportInside,
    closure(attend),
]
HIDDEN = [ThroughAnAttribute, ThroughATable]


@pytest.mark.parametrize("kind", SHOWN)
def test_the_source_shows_the_call(kind):
    model = Tower(kind()).eval()
    before = model(X)
    check(bayesianize(model, CONFIG), before)


@pytest.mark.parametrize("kind", SHOWN + HIDDEN)
def test_one_run_of_the_model_shows_the_call_and_leaves_no_trace(kind):
    model = Tower(kind()).eval()
    before, model.part.training = model(X), True
    bayesianize(model, CONFIG, example_inputs=X)
    assert model.part.training
    assert not model.training
    model.eval()
    assert not model._forward_hooks
    assert not model.linear._forward_pre_hooks
    check(model, before)
    assert type(restore(model).part) is kind


@pytest.mark.parametrize("inputs", [[X], {"x": X}])
def test_example_inputs_are_given_as_for_predict(inputs):
    assert conversion_report(bayesianize(Tower(ThroughATable()), CONFIG, example_inputs=inputs)).converted == ("part",)


@pytest.mark.parametrize("kind", HIDDEN)
def test_without_inputs_the_error_says_what_to_give(kind):
    match = r"convert the model first, with one batch .*: bayesianize\(model, config, example_inputs=batch\)$"
    with pytest.raises(ValueError, match=match):
        bayesianize(Tower(kind()), CONFIG)
    with pytest.raises(ValueError, match=match):
        ba.uncertainty(Tower(kind()), X)


def test_with_inputs_the_error_does_not_ask_for_them():
    with pytest.raises(ValueError, match=r"no attention was found.*scaled_dot_product_attention$"):
        bayesianize(Tower(Own()), CONFIG, example_inputs=X)


def test_attention_by_hand_is_not_mistaken_for_torch_s():
    with pytest.raises(ValueError, match="no attention was found"):
        bayesianize(Tower(Own()), CONFIG)


def test_a_run_that_fails_changes_nothing():
    model = Tower(ThroughATable()).train()
    with pytest.raises(RuntimeError):
        bayesianize(model, CONFIG, example_inputs=torch.randn(2, 3, 5, 11))
    assert model.part.training
    assert not model.part._forward_hooks
    assert not conversion_report(model).converted


def test_torch_s_own_layers_keep_their_adapter():
    layer = nn.TransformerEncoderLayer(8, 2, 5, batch_first=True).eval()
    bayesianize(layer, CONFIG, example_inputs=torch.randn(2, 3, 8))
    assert conversion_report(layer).converted == ("self_attn",)
    assert isinstance(layer.self_attn, ba.nn.MultiheadAttention)


@pytest.mark.parametrize("whole", [True, False])
def test_what_a_run_has_shown_is_saved_with_the_model(whole, tmp_path):
    model = bayesianize(Tower(ThroughATable()).eval(), CONFIG, example_inputs=X)
    save_bayesian(model, tmp_path, whole=whole)
    other = load_bayesian(Tower(ThroughATable()).eval(), tmp_path)
    assert conversion_report(other) == conversion_report(model)
    assert torch.equal(other.part.bayes.bayes_prior.weight_in, model.part.bayes.bayes_prior.weight_in)


def test_a_call_counts_once_where_modules_are_nested():
    class Outer(Base):
        def __init__(self) -> None:
            super().__init__()
            self.inner = ByName()

        def forward(self, x):
            return sdpa(x, self.inner(x), x)

    model = bayesianize(Outer().eval(), CONFIG)
    assert conversion_report(model).converted == ("", "inner")
    with ba.record_kl() as mean:
        model(X)
    with ba.sampling(model), ba.record_kl() as drawn:
        model(X)
    assert len(mean) == len(drawn) == 2


def test_torch_s_functions_that_may_do_without_the_call_do_not_count():
    class Functional(nn.Module):
        def forward(self, x):
            zeros, w, b = None, torch.eye(7).repeat(3, 1), torch.zeros(21)
            return F.multi_head_attention_forward(x, x, x, 7, 1, w, b, zeros, zeros, False, 0.0, torch.eye(7), None)[0]

    with pytest.raises(ValueError, match="no attention was found"):
        bayesianize(Functional(), CONFIG)
