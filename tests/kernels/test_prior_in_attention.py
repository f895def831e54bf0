"""Attention that computes the contextual prior on its way equals attention that is given it, with all gradients."""

import pytest
import torch
from functorch.compile import make_boxed_func
from kernel_device import DEVICE, DTYPES, HAS_GPU, MARKS, needs_gpu
from torch._dynamo.backends.common import aot_autograd

import bayesattn as ba
from bayesattn.functional import attention
from bayesattn.ops.common.launch import LAUNCHES
from bayesattn.priors import ContextualPrior

pytestmark = MARKS


def run(shape, *, waits, dtype=torch.float32, mask=None, is_causal=False, calls=1, **settings):
    """Return output, KL and all gradients of the last of some equal calls."""
    b, h, n, d = shape
    config = ba.AttentionConfig("BAM-WC", **settings)
    torch.manual_seed(3)
    prior = ContextualPrior(d, h, config).to(DEVICE)
    for bias in (prior.bias_in, prior.bias_out):
        torch.nn.init.normal_(bias)
    query, key, value = (torch.randn(b, n, h, d).to(DEVICE, dtype).transpose(1, 2) for _ in range(3))
    inputs = [x.detach().requires_grad_() for x in (query, key, value)]
    valid = None if mask is None else mask[:, :, 0]
    found = []
    for _ in range(calls):
        for x in (*inputs, *prior.parameters()):
            x.grad = None
        log_prior = prior.fused(inputs[1], valid) if waits else prior(inputs[1], valid)
        before = LAUNCHES.copy()
        output, kl = attention(
            *inputs, config=config, log_prior=log_prior, mask=mask, is_causal=is_causal, seed=7, backend="triton"
        )
        assert (LAUNCHES - before)["prior_logits"] == waits
        assert kl is not None
        (output.float().square().sum() + 0.3 * kl.sum()).backward()
        found = [output, kl, *(x.grad for x in (*inputs, *prior.parameters()))]
    return [x.detach().clone() for x in found]


def compare(found, expected, dtype):
    # the same kernels on the same numbers; the keys' two gradients are added up in the keys' own type in both cases
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    for ours, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, truth, rtol=tolerance, atol=tolerance * float(truth.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("padded", "is_causal"), [(False, False), (True, False), (True, True)])
def test_equals_attention_that_is_given_the_prior(dtype, padded, is_causal):
    shape = (2, 3, 37, 16)
    mask = torch.ones(2, 1, 1, 37, dtype=torch.bool, device=DEVICE)
    mask[0, ..., 29:] = False
    options = {"dtype": dtype, "mask": mask if padded else None, "is_causal": is_causal}
    compare(run(shape, waits=True, **options), run(shape, waits=False, **options), dtype)


@pytest.mark.parametrize(
    "settings",
    [{"prior_per_head": True}, {"detach_keys": True}, {"preset": "paper"}, {"prior_hidden_dim": 23, "gamma_beta": 0.3}],
    ids=str,
)
def test_so_do_all_kinds_of_networks_and_conventions(settings):
    shape = (1, 2, 23, 8)
    compare(run(shape, waits=True, **settings), run(shape, waits=False, **settings), torch.float32)


def test_features_that_have_to_be_padded_compute_the_prior_before():
    shape = (1, 2, 13, 12)
    config = ba.AttentionConfig("BAM-WC")
    prior = ContextualPrior(12, 2, config).to(DEVICE)
    query, key, value = (torch.randn(shape, device=DEVICE) for _ in range(3))
    options = {"config": config, "seed": 7, "backend": "triton"}
    waiting = attention(query, key, value, log_prior=prior.fused(key), **options)
    given = attention(query, key, value, log_prior=prior(key), **options)
    torch.testing.assert_close(waiting, given)


def test_a_backend_without_kernels_computes_it_itself():
    config = ba.AttentionConfig("BAM-WC")
    prior = ContextualPrior(8, 2, config).to(DEVICE)
    query, key, value = (torch.randn(1, 2, 13, 8, device=DEVICE) for _ in range(3))
    options = {"config": config, "seed": 7, "backend": "reference"}
    torch.testing.assert_close(
        attention(query, key, value, log_prior=prior.fused(key), **options),
        attention(query, key, value, log_prior=prior(key), **options),
    )


@pytest.mark.compile
@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_a_compiler_gets_prior_and_attention_as_one_operator(padded, detach):
    config = ba.AttentionConfig("BAM-WC", detach_keys=detach)
    torch.manual_seed(3)
    prior = ContextualPrior(16, 2, config).to(DEVICE)
    inputs = [torch.randn(2, 37, 2, 16, device=DEVICE).transpose(1, 2).detach().requires_grad_() for _ in range(3)]
    mask = torch.arange(37, device=DEVICE).expand(2, 1, 1, 37) < torch.tensor([37, 29], device=DEVICE)[:, None, None, None]
    operators = []

    def loss(query, key, value):
        options = {"mask": mask if padded else None, "seed": 7, "backend": "triton"}
        log_prior = prior.fused(key, mask[:, :, 0] if padded else None)
        output, kl = attention(query, key, value, config=config, log_prior=log_prior, **options)
        return output.square().sum() + 0.3 * kl.sum()

    def noting(graph, _):
        operators.extend(str(node.target) for node in graph.graph.nodes if "bayesattn" in str(node.target))
        return make_boxed_func(graph.forward)

    leaves = [*inputs, *prior.parameters()]
    expected = torch.autograd.grad(loss(*inputs), leaves)
    found = torch.autograd.grad(
        torch.compile(loss, fullgraph=True, backend=aot_autograd(fw_compiler=noting))(*inputs), leaves
    )
    assert operators == ["bayesattn.weibull_forward.default", "bayesattn.weibull_backward.default"]
    compare(found, expected, torch.float32)


@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_replayed_launches_give_the_same_numbers_as_the_first_ones(dtype):
    """The first call compiles, the second records its launches, later ones replay them."""
    assert HAS_GPU
    shape = (2, 3, 61, 64)
    compare(run(shape, waits=True, dtype=dtype, calls=4), run(shape, waits=True, dtype=dtype), dtype)
