"""The fused Weibull KL against `weibull_kl` in float64: value and the gradients of column sums, LSE and prior."""

import pytest
import torch

pytest.importorskip("triton")

import bayesattn as ba
from bayesattn.ops.attention.fused_kl import attention_kl
from bayesattn.ops.attention.kl import weibull_kl
from bayesattn.ops.attention.launch import LAUNCHES
from bayesattn.ops.attention.masking import Allowed
from bayesattn.ops.attention.support import INTERPRETED

HAS_GPU = torch.cuda.is_available() and not INTERPRETED
pytestmark = [pytest.mark.kernel] + ([pytest.mark.gpu] if HAS_GPU else [])
DEVICE = "cuda" if HAS_GPU else "cpu"

if not HAS_GPU and not INTERPRETED:
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)


def check(shape, config, mask=None, prior_shape=None, is_causal=False, is_fused=True):
    b, h, m, n = shape
    columns, lse = torch.randn(b, h, 1, n, device=DEVICE), torch.randn(b, h, m, device=DEVICE) + 3.0
    inputs = [columns, lse]
    if config.prior_kind == "contextual":
        logits = torch.randn(*(prior_shape or (b, h)), 1, n, device=DEVICE)
        valid = True if mask is None else mask
        inputs.append(torch.where(torch.as_tensor(valid, device=DEVICE), logits.log_softmax(-1), -torch.inf))
    allowed = Allowed(mask, is_causal, shape)
    upstream = torch.randn(b, device=DEVICE)
    results = []
    for function, dtype in ((attention_kl, torch.float32), (weibull_kl, torch.float64)):
        copies = [x.detach().to(dtype).requires_grad_() for x in inputs]
        before = LAUNCHES["weibull_kl"]
        kl = function(*copies, *([None] if len(copies) == 2 else []), allowed, config)
        assert LAUNCHES["weibull_kl"] == before + (function is attention_kl and is_fused)
        results.append([x.double() for x in (kl.detach(), *torch.autograd.grad(kl, copies, upstream.to(dtype)))])
    for ours, truth in zip(*results):
        assert torch.isfinite(ours).all()
        # float32 sums of m · n terms, relative to the largest entry
        torch.testing.assert_close(ours, truth, rtol=1e-5, atol=1e-5 * float(truth.abs().max()))


@pytest.mark.parametrize("variant", ["BAM-WC", "BAM-WF"])
@pytest.mark.parametrize("preset", ["paper", "official-code", "default"])
@pytest.mark.parametrize("shape", [(2, 3, 37, 41), (1, 2, 1, 300), (2, 1, 521, 7)])
def test_every_convention_equals_the_plain_formula(variant, preset, shape):
    check(shape, ba.AttentionConfig(variant, preset=preset, weibull_k=2.0, gamma_beta=0.3))


@pytest.mark.parametrize("reduction", ["sum", "row_mean", "mean"])
def test_padding_counts_nowhere_and_an_example_without_keys_has_no_kl(reduction):
    mask = torch.rand(3, 1, 1, 43, device=DEVICE) > 0.4
    mask[1] = False
    check((3, 2, 11, 43), ba.AttentionConfig("BAM-WC", kl_reduction=reduction), mask)
    check((3, 2, 11, 43), ba.AttentionConfig("BAM-WF", preset="paper", kl_reduction=reduction), mask)


@pytest.mark.parametrize("prior_shape", [(1, 1), (2, 1), (1, 3)])
def test_a_shared_prior_gathers_its_gradient(prior_shape):
    check((2, 3, 13, 17), ba.AttentionConfig("BAM-WC"), prior_shape=prior_shape)


@pytest.mark.parametrize("beta", [1e-15, 1e-2, 3.0, 1e4])
def test_the_paper_s_rates(beta):
    check((1, 2, 13, 17), ba.AttentionConfig("BAM-WC", gamma_beta=beta, weibull_k=1000.0))
    check((1, 2, 13, 17), ba.AttentionConfig("BAM-WF", gamma_beta=beta, gamma_alpha=1e-15))


def test_a_causal_call_takes_the_plain_formula():
    check((1, 2, 13, 17), ba.AttentionConfig("BAM-WF"), is_causal=True, is_fused=False)
