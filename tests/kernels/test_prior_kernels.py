"""The contextual prior's kernels against plain torch in float64: ln Ψ and the gradient of the keys and of the network."""

import pytest
import torch
from kernel_device import DEVICE, INTERPRETED, MARKS

import bayesattn as ba
from bayesattn.ops.common.launch import LAUNCHES
from bayesattn.priors import ContextualPrior

pytestmark = MARKS


def both(shape, *, valid=None, per_head=False, hidden=10, dtype=torch.float32, detach=False, spoil_masked=False):
    """Return ln Ψ and all gradients, by the kernels and by the plain module in float64."""
    b, h, n, d = shape
    config = ba.AttentionConfig("BAM-WC", prior_hidden_dim=hidden, prior_per_head=per_head, detach_keys=detach)
    prior = ContextualPrior(d, h, config).to(DEVICE)
    for bias in (prior.bias_in, prior.bias_out):
        torch.nn.init.normal_(bias)
    key = torch.randn(b, n, h, d, device=DEVICE).transpose(1, 2).to(dtype)
    upstream = torch.randn(b, h, 1, n, device=DEVICE)
    results = []
    for wide in (False, True):
        module = ContextualPrior(d, h, config).to(DEVICE, torch.float64 if wide else torch.float32)
        module.load_state_dict(prior.state_dict())
        keys = (key.double() if wide else key).detach().requires_grad_()
        before = LAUNCHES["prior_logits"]
        log_prior = module(keys, valid)
        assert LAUNCHES["prior_logits"] == before + (not wide)
        if spoil_masked and not wide:
            log_prior.backward(torch.where(log_prior > -torch.inf, upstream, torch.nan))
        else:
            finite = torch.where(log_prior > -torch.inf, log_prior, 0.0)
            finite.backward(upstream.to(finite.dtype))
        gradients = [keys.grad, *(p.grad for p in module.parameters())]
        results.append([x.detach().double() for x in (log_prior, *gradients) if x is not None])
    return results


def compare(fused, plain, tolerance=2e-5):
    assert len(fused) == len(plain)
    for ours, truth in zip(fused, plain):
        # float32 sums of up to some hundred terms of order 1, relative to the largest of the tensor
        scale = float(torch.where(truth > -torch.inf, truth, 0.0).abs().max().clamp(min=1.0))
        torch.testing.assert_close(ours, truth, rtol=0.0, atol=tolerance * scale)


@pytest.mark.parametrize("shape", [(2, 3, 67, 16), (1, 2, 1, 24), (2, 1, 131, 20), (1, 2, 300, 64)])
@pytest.mark.parametrize("per_head", [False, True])
def test_equals_the_plain_network_with_all_gradients(shape, per_head):
    compare(*both(shape, per_head=per_head))


@pytest.mark.parametrize("per_head", [False, True])
def test_a_program_of_the_backward_pass_may_have_many_blocks(per_head, monkeypatch):
    from bayesattn.ops.prior import launch as prior_ops

    monkeypatch.setitem(prior_ops.PROGRAMS, torch.float32, 5)
    prior_ops.backward_launch.cache_clear()  # it has looked at the number
    compare(*both((3, 2, 131, 24), per_head=per_head))
    prior_ops.backward_launch.cache_clear()


@pytest.mark.parametrize("per_head", [False, True])
def test_the_nodes_of_a_graph_are_many_keys(per_head, monkeypatch):
    from bayesattn.ops.prior import launch as prior_ops

    monkeypatch.setattr(prior_ops, "MANY_KEYS", 100)
    for launches in (prior_ops.forward_launches, prior_ops.backward_launch):
        launches.cache_clear()  # they have looked at the number
    valid = torch.rand(2, 1, 131, device=DEVICE) > 0.4
    compare(*both((2, 2, 131, 24), valid=valid, per_head=per_head, spoil_masked=True))
    for launches in (prior_ops.forward_launches, prior_ops.backward_launch):
        launches.cache_clear()


def test_masked_keys_get_minus_infinity_and_an_example_without_keys_zeros():
    valid = torch.rand(3, 1, 41, device=DEVICE) > 0.4
    valid[1] = False
    fused, plain = both((3, 2, 41, 16), valid=valid)
    compare(fused, plain)
    assert (fused[0][1] == 0.0).all()
    assert torch.equal(fused[0][0, 0, 0] == -torch.inf, ~valid[0, 0])


def test_a_mask_per_head_is_followed():
    valid = torch.rand(2, 3, 29, device=DEVICE) > 0.4
    valid[..., 0] = True
    compare(*both((2, 3, 29, 16), valid=valid))


@pytest.mark.parametrize("hidden", [1, 5, 33])
def test_any_hidden_width(hidden):
    compare(*both((1, 2, 37, 16), hidden=hidden))


def test_detached_keys_get_no_gradient():
    compare(*both((1, 2, 37, 16), detach=True))


def test_half_precision_keys():
    # dk is rounded to the keys' own type: half a unit in the last of eleven bits
    compare(*both((2, 2, 45, 16), dtype=torch.float16), tolerance=2**-11)


@pytest.mark.parametrize("shape", [(2, 3, 67, 16), (1, 2, 300, 64), (2, 1, 41, 100)])
@pytest.mark.parametrize("per_head", [False, True])
def test_products_of_bfloat16_keys_have_the_precision_of_float32(shape, per_head):
    found, truth = both(shape, per_head=per_head, dtype=torch.bfloat16)
    (log_prior, grad_key, *fused), (true_log_prior, true_grad_key, *plain) = found, truth
    compare([log_prior, *fused], [true_log_prior, *plain])
    # the keys' gradient is rounded once, to bfloat16's eight bits (the interpreter cuts); the rest as above
    scale = float(true_grad_key.abs().max().clamp(min=1.0))
    torch.testing.assert_close(grad_key, true_grad_key, rtol=2**-7 if INTERPRETED else 2**-8, atol=2e-5 * scale)


def test_gradients_repeat_bit_for_bit():
    first, second = (torch.manual_seed(1) and both((3, 4, 131, 24))[0] for _ in range(2))
    for ours, theirs in zip(first, second, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("has_valid", [True, False])
@pytest.mark.parametrize("detach", [True, False])
def test_a_compiler_gets_the_same_kernels_as_an_operator(has_valid, detach):
    config = ba.AttentionConfig("BAM-WC", detach_keys=detach)
    prior = ContextualPrior(16, 2, config).to(DEVICE)
    key = torch.randn(2, 2, 37, 16, device=DEVICE, requires_grad=True)
    valid = torch.rand(2, 1, 37, device=DEVICE) > 0.3 if has_valid else None

    def loss(key):
        log_prior = prior(key, valid)
        return torch.where(log_prior > -torch.inf, log_prior, 0.0).square().sum()

    leaves = [*prior.parameters(), *([] if detach else [key])]
    expected = torch.autograd.grad(loss(key), leaves)
    before = LAUNCHES["prior_grad"]
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager" if INTERPRETED else "inductor")
    found = torch.autograd.grad(compiled(key), leaves)
    assert LAUNCHES["prior_grad"] == before + 1
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
