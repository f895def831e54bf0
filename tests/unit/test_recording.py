"""One entry per call, read once, never lost without a word, and no work where nobody records."""

import gc
import sys
import threading
import weakref

import pytest
import torch
from torch import nn

import bayesattn as ba
from bayesattn import functional, record_kl
from bayesattn.priors import ContextualPrior

CONFIG = ba.AttentionConfig("BAM-WC")


def _layer(config: ba.AttentionConfig = CONFIG) -> ba.nn.MultiheadAttention:
    return ba.nn.MultiheadAttention(6, 2, batch_first=True, config=config)


def _call(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x, x, x, need_weights=False)[0]


X = torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(1))


def test_one_module_called_twelve_times_gives_twelve_entries():
    layer, x, expected = _layer(), X, 0.0
    with record_kl() as kl:
        for _ in range(12):
            x = _call(layer, x)
    assert len(kl) == 12
    assert [value.shape for _, value in kl.per_call()] == [(3,)] * 12
    expected = sum(float(value.mean()) for _, value in kl.per_call())
    assert float(kl.per_layer()["MultiheadAttention"]) == pytest.approx(expected, rel=1e-6)
    total = kl.total()
    assert total.requires_grad
    assert float(total.detach()) == pytest.approx(expected, rel=1e-6)


class _Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = _call(layer, x)
        return x


def test_entries_go_by_the_name_of_their_module_in_the_model():
    model = _Stack()
    with record_kl(model) as kl:
        model(X)
        model.layers[1](X, X, X)
    layers = kl.per_layer()
    assert list(layers) == ["layers.0", "layers.1", "layers.2"]
    assert [name for name, _ in kl.per_call()] == ["layers.0", "layers.1", "layers.2", "layers.1"]
    assert float(sum(layers.values())) == pytest.approx(float(kl.total().detach()), rel=1e-6)
    assert not any(value.requires_grad for value in layers.values())


def test_the_gradient_of_the_total_is_that_of_the_functional_kl():
    layer = _layer(ba.AttentionConfig("BAM-WF")).eval()
    with record_kl() as kl:
        _call(layer, X)
    kl.total().backward()
    recorded = layer.in_proj_weight.grad
    layer.zero_grad()
    q, k, v = (
        part.unflatten(-1, (2, 3)).transpose(1, 2)
        for part in nn.functional.linear(X, layer.in_proj_weight, layer.in_proj_bias).chunk(3, dim=-1)
    )
    _, expected = functional.attention(q, k, v, config=layer.config, sample=False)
    assert expected is not None
    expected.mean().backward()
    torch.testing.assert_close(recorded, layer.in_proj_weight.grad)


def test_a_total_may_be_read_any_number_of_times():
    layer = _layer()
    with record_kl() as kl:
        _call(layer, X)
    with torch.no_grad():
        logged = kl.total()
    total = kl.total()
    assert kl.total() is total
    assert total.requires_grad
    assert not logged.requires_grad
    assert torch.equal(logged, total.detach())
    kl.per_layer()
    kl.per_call()
    (total + 2.0 * kl.total()).backward()
    gradient, layer.in_proj_weight.grad = layer.in_proj_weight.grad, None
    with record_kl() as kl:
        _call(layer, X)
    (3.0 * kl.total()).backward()
    torch.testing.assert_close(gradient, layer.in_proj_weight.grad)


def test_a_call_recorded_after_the_total_was_read_raises():
    """Its KL would silently count for nothing."""
    layer = _layer()
    with record_kl() as kl:
        _call(layer, X)
        kl.total()
        with pytest.raises(RuntimeError, match=r"after kl.total\(\) was read"):
            _call(layer, X)


def test_nested_scopes_raise_and_leave_the_outer_one_usable():
    layer = _layer()
    with record_kl() as outer:
        _call(layer, X)
        with pytest.raises(RuntimeError, match=r"record_kl\(\) cannot be nested"), record_kl():
            pass
        _call(layer, X)
    assert len(outer) == 2


def test_a_scope_without_bayesian_calls_raises():
    layer = _layer()
    with record_kl() as kl:
        nn.Linear(6, 6)(X)
    _call(layer, X)
    with pytest.raises(RuntimeError, match="no Bayesian attention ran"):
        kl.total()


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("variant", ["soft", "BAM-NOKL"])
def test_the_total_of_variants_without_a_kl_is_zero(variant, train):
    config = ba.AttentionConfig(variant)
    softmax = ba.nn.BayesianWeights(config)
    additive = ba.nn.AdditiveAttention(6, 6, 4, config=config)
    encoder = ba.nn.TransformerEncoderLayer(6, 2, 8, batch_first=True, config=config)
    hosted = ba.bayesianize(nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), 1), config)
    runs = {
        _layer(config): lambda module: _call(module, X),
        softmax: lambda module: module(X),
        additive: lambda module: module(X, X),
        encoder: lambda module: module(X),
        hosted: lambda module: module(X),
    }
    for module, run in runs.items():
        module.train(train)
        with record_kl() as kl:
            run(module)
        assert len(kl) == 0
        assert kl.total() is kl.total()
        assert kl.total().item() == 0.0
        assert not kl.total().requires_grad


def test_a_zero_total_is_where_the_module_is():
    layer = _layer(ba.AttentionConfig("soft")).to("meta")
    with record_kl() as kl:
        _call(layer, X.to("meta"))
    assert kl.total().device.type == "meta"


def test_a_scope_closes_when_its_body_fails():
    layer = _layer()
    with pytest.raises(RuntimeError, match=r"record_kl\(\) cannot be nested"), record_kl() as kl, record_kl():
        pass
    _call(layer, X)
    assert len(kl) == 0
    with record_kl() as kl:
        _call(layer, X)
    assert len(kl) == 1


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("variant", ["BAM-WC", "BAM-WF", "BAM-LF"])
def test_without_a_scope_neither_prior_nor_kl_is_computed(variant, train, monkeypatch):
    """Everything that could compute a prior (WC) or a KL (WF, LF) breaks; calls without a scope must not notice."""

    def broken(*args, **kwargs):
        raise AssertionError("KL work without a scope")

    monkeypatch.setattr(ContextualPrior, "forward", broken)
    functions = () if variant == "BAM-WC" else ("kl_from_scores", "weibull_kl", "separable_lognormal_kl")
    for name, module in list(sys.modules.items()):
        for function in functions if name.startswith("bayesattn") else ():
            monkeypatch.setattr(module, function, broken, raising=False)
    config = ba.AttentionConfig(variant)
    for module, call in [
        (_layer(config), lambda m: _call(m, X)),
        (_layer(config), lambda m: m(X, X, X)[0]),
        (ba.nn.BayesianWeights(config, key_dim=6), lambda m: m(X @ X.mT, X)),
        (ba.nn.AdditiveAttention(6, 6, 4, config=config), lambda m: m(X, X)[0]),
    ]:
        module.train(train)
        assert bool(call(module).isfinite().all())
        with record_kl(), pytest.raises(AssertionError, match="KL work"):
            call(module)  # the breakage is seen inside a scope, so the check above is not idle


def test_threads_have_their_own_scopes():
    layer, lengths = _layer(), {}
    barrier = threading.Barrier(2)

    def work(name: str, calls: int) -> None:
        with record_kl() as kl:
            barrier.wait()  # both scopes are open now
            for _ in range(calls):
                _call(layer, X)
            barrier.wait()
        lengths[name] = len(kl)

    threads = [threading.Thread(target=work, args=(name, calls)) for name, calls in (("a", 2), ("b", 5))]
    for thread in threads:
        thread.start()
    with record_kl() as mine:
        _call(layer, X)
    for thread in threads:
        thread.join()
    assert (lengths, len(mine)) == ({"a": 2, "b": 5}, 1)


def test_scope_and_graph_are_freed_together():
    layer = _layer()
    with record_kl() as kl:
        output = _call(layer, X)
    watched = weakref.ref(kl)
    loss = output.sum() + kl.total()
    loss.backward()
    del loss, output, kl
    gc.collect()
    assert watched() is None


def test_a_validation_pass_under_no_grad_can_be_read():
    with torch.no_grad(), record_kl() as kl:
        _call(_layer(), X)
        total = kl.total()
    assert not total.requires_grad
    assert total.dtype == torch.float32


def test_a_kl_that_lost_its_gradient_raises_in_backward():
    layer, head = _layer(), nn.Linear(6, 1)
    with record_kl() as kl:
        with torch.no_grad():
            hidden = _call(layer, X)
        output = head(hidden)
    loss = output.sum() + kl.total()
    with pytest.raises(RuntimeError, match="1 of 1 recorded KLs lost their gradient"):
        loss.backward()


def test_a_frozen_attention_layer_is_a_constant_not_a_loss_of_gradient():
    """Nothing in it can be trained: its KL has no gradient to lose, and fine-tuning a head must go on."""
    layer, head = _layer(ba.AttentionConfig("BAM-WF")).requires_grad_(False), nn.Linear(6, 1)
    with record_kl() as kl:
        output = head(_call(layer, X))
    (output.sum() + kl.total()).backward()
    assert head.weight.grad is not None


def test_backward_twice_through_one_graph_counts_the_kl_twice():
    layer = _layer()
    with record_kl() as kl:
        output = _call(layer, X)
    loss = output.sum() + kl.total()
    loss.backward(retain_graph=True)
    once = layer.in_proj_weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(layer.in_proj_weight.grad, 2 * once)
