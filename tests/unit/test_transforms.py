"""What torch does to a module beside calling it: second derivatives, torch.func, TorchScript."""

import copy

import pytest
import torch
from torch import Tensor, nn

import bayesattn as ba
from bayesattn import functional, record_kl
from bayesattn.nn import MultiheadAttention
from helpers import WITH_KL

EMBED, HEADS, BATCH, LENGTH = 12, 4, 3, 5
# torch 2.11 cannot batch the view of random words as 16-bit numbers
can_batch_noise = pytest.mark.skipif(torch.__version__ < "2.13", reason="torch.vmap of the noise needs torch 2.13")
either_way = pytest.mark.parametrize("need_weights", [False, True])


def _attention(variant="BAM-WC", **options) -> MultiheadAttention:
    # the noise of this shape is below the rounding of float64
    config = ba.AttentionConfig(variant, weibull_k=1e15, sigma_q=1e-15, kl_reduction="row_mean", **options)
    return MultiheadAttention(EMBED, HEADS, batch_first=True, dtype=torch.float64, config=config)


def _loss(attention: MultiheadAttention, parameters, x: Tensor, need_weights: bool) -> Tensor:
    with record_kl() as kl:
        output, _ = torch.func.functional_call(attention, parameters, (x, x, x), {"need_weights": need_weights})
    return output.square().sum() + kl.total()


def _parameters(attention: MultiheadAttention) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in attention.named_parameters()}


X = torch.randn(BATCH, LENGTH, EMBED, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


@either_way
@pytest.mark.parametrize("variant", WITH_KL)
def test_torch_func_grad_while_recording_is_backward(variant, need_weights):
    attention = _attention(variant)
    gradients = torch.func.grad(lambda given: _loss(attention, given, X, need_weights))(_parameters(attention))
    _loss(attention, dict(attention.named_parameters()), X, need_weights).backward()
    for name, parameter in attention.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(gradients[name], expected, rtol=1e-9, atol=1e-11)


@can_batch_noise
@either_way
def test_vmap_gives_the_gradient_of_every_example(need_weights):
    attention, axes = _attention(), (None, 0)

    def loss(parameters: dict[str, Tensor], example: Tensor) -> Tensor:
        return _loss(attention, parameters, example[None], need_weights)

    parameters = _parameters(attention)
    together = torch.func.vmap(torch.func.grad(loss), in_dims=axes, randomness="different")(parameters, X)
    for i, example in enumerate(X):
        alone = torch.func.grad(loss)(parameters, example)
        for name, gradient in alone.items():
            torch.testing.assert_close(together[name][i], gradient, rtol=1e-9, atol=1e-11)


@can_batch_noise
def test_vmap_draws_for_every_example():
    attention = MultiheadAttention(EMBED, HEADS, batch_first=True, config=ba.AttentionConfig("BAM-WC"))
    x = torch.randn(1, LENGTH, EMBED).expand(7, 1, LENGTH, EMBED)
    drawn = torch.vmap(lambda y: attention(y, y, y, need_weights=False)[0], randomness="different")(x)
    assert len({tuple(one.flatten().tolist()) for one in drawn.detach()}) == 7


def test_a_fused_backend_named_inside_torch_func_is_refused():
    q = torch.randn(2, 3, 5, 7)
    config = ba.AttentionConfig("BAM-NOKL")
    with pytest.raises(ValueError, match=r"backend 'blocked' cannot be used here: torch\.func .* Use 'auto' or 'reference'"):
        torch.func.grad(lambda x: functional.attention(x, q, q, config=config, backend="blocked")[0].sum())(q)


def test_second_derivatives_while_recording_are_right():
    """Against differences of first ones; with need_weights the plain backend runs, which torch differentiates again."""
    attention, direction = _attention(), torch.randn_like(X)

    def slope(x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.clone().requires_grad_()
        loss = _loss(attention, dict(attention.named_parameters()), x, True)
        return (torch.autograd.grad(loss, x, create_graph=True)[0] * direction).sum()

    x = X.clone().requires_grad_()
    (second,) = torch.autograd.grad(slope(x), x)
    step = 1e-5
    difference = (slope(X + step * direction) - slope(X - step * direction)) / (2 * step)
    # central differences of float64: error of the order of step²
    torch.testing.assert_close((second * direction).sum(), difference.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("recorded", [False, True])
def test_second_derivatives_of_the_fused_backend_are_refused_and_not_left_out(recorded):
    attention, x = _attention(), X.clone().requires_grad_()
    with record_kl() as kl:
        output, _ = attention(x, x, x, need_weights=False)
    loss = output.sum() + (kl.total() if recorded else 0.0)
    with pytest.raises(RuntimeError, match=r"create_graph=True: .* need_weights=True"):
        torch.autograd.grad(loss, x, create_graph=True)


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(EMBED, HEADS, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()


def test_torchscript_is_refused_with_a_way_out_that_works():
    plain = _encoder().eval()
    model = ba.bayesianize(copy.deepcopy(plain), ba.AttentionConfig("BAM-WC"))
    attentions = [module for module in model.modules() if isinstance(module, MultiheadAttention)]
    for module in (model, attentions[0]):
        with pytest.raises(RuntimeError, match=r"torch\.jit\.script cannot compile MultiheadAttention.*restore\(model\)"):
            torch.jit.script(module)
    # torch.jit.script writes what it prepared into the model
    assert [module for module in model.modules() if isinstance(module, MultiheadAttention)] == attentions
    with torch.no_grad():
        expected = plain(X)
        assert torch.equal(torch.jit.trace(model, (X,), check_trace=False)(X), expected)
        assert torch.equal(torch.jit.script(ba.restore(model))(X), expected)
