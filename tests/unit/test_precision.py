"""Casts from half precision to float32: exact on the way in, saturating in float16 on the way back."""

import pytest
import torch

from bayesattn.precision import saturate, shared, upcast

UPSTREAM = torch.tensor([1.5, -3e4, 1e5, -1e9, float("inf")])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_value_is_exact_and_float32_or_better(dtype):
    x = torch.tensor([0.1, -60000.0]).to(dtype)
    assert upcast(x).dtype == torch.promote_types(dtype, torch.float32)
    assert torch.equal(upcast(x).to(dtype), x)


def test_a_float16_gradient_saturates():
    x = torch.zeros(5, dtype=torch.float16, requires_grad=True)
    (gradient,) = torch.autograd.grad(upcast(x), x, UPSTREAM)
    assert gradient.tolist() == [1.5, -30000.0, 65504.0, -65504.0, 65504.0]


def test_a_bfloat16_gradient_is_a_plain_cast():
    x = torch.zeros(5, dtype=torch.bfloat16, requires_grad=True)
    (gradient,) = torch.autograd.grad(upcast(x), x, UPSTREAM)
    assert torch.equal(gradient, UPSTREAM.to(torch.bfloat16))


def test_nan_is_never_hidden():
    assert bool(saturate(torch.tensor([float("nan")]), torch.float16).isnan().all())


def test_two_saturated_gradients_of_one_tensor_do_not_add_up_to_infinity():
    x = torch.zeros(5, dtype=torch.float16, requires_grad=True)
    split = shared(x)
    (gradient,) = torch.autograd.grad([upcast(split), upcast(split)], x, [UPSTREAM, UPSTREAM])
    assert gradient.tolist() == [3.0, -60000.0, 65504.0, -65504.0, 65504.0]


def test_gradients_of_gradients_and_vmap_pass_through():
    x = torch.tensor([2.0, 3.0], dtype=torch.float16, requires_grad=True)
    (first,) = torch.autograd.grad(upcast(x).pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.float().sum(), x)
    assert second.tolist() == [12.0, 18.0]
    assert torch.equal(torch.vmap(upcast)(x), x.float())
