"""is_causal is the lower-triangular mask and nothing else: output, KL and gradients, on every backend, at every shape."""

import numpy as np
import pytest
import torch

import bayesattn as ba
from bayesattn.functional import attention
from helpers import CONTEXTUAL, PRESETS, WITH_KL, kl_oracle

B, H, D = 2, 3, 4
LENGTHS = [(5, 5), (3, 7), (7, 3), (1, 6), (6, 1), (1, 1)]


def _tensors(m: int, n: int) -> list[torch.Tensor]:
    return [torch.randn(B, H, length, D, dtype=torch.float64, requires_grad=True) for length in (m, n, n)]


def _prior(variant: str, used: torch.Tensor | None, n: int) -> torch.Tensor | None:
    """ln Ψ over the keys that somebody may attend to; −inf at the others, as `ContextualPrior` gives it."""
    if variant not in CONTEXTUAL:
        return None
    logits = torch.randn(B, H, 1, n, dtype=torch.float64)
    return torch.log_softmax(logits if used is None else logits.masked_fill(~used, -torch.inf), dim=-1)


CASES = [(masked, m, n, variant) for masked in (False, True) for m, n in LENGTHS for variant in WITH_KL]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(("masked", "m", "n", "variant"), CASES)
def test_the_causal_kl_is_that_of_the_triangle(masked, m, n, variant, preset):
    triangle = torch.ones(m, n, dtype=torch.bool).tril()
    mask = None
    if masked:
        mask = torch.rand(B, 1, m, n) < 0.7
        mask[..., 0] = True
    allowed = triangle if mask is None else triangle & mask
    used = allowed.expand(B, 1, m, n).any(dim=-2, keepdim=True)
    config = ba.AttentionConfig(variant, preset=preset, gamma_beta=0.3, gamma_alpha=0.2, weibull_k=1e14, sigma_q=1e-14)
    prior = _prior(variant, used, n)
    query, key, value = _tensors(m, n)
    expected = kl_oracle(query.detach() @ key.detach().mT / 2.0, prior, allowed, config)
    outcomes = []
    for options in ({"backend": "reference"}, {"backend": "auto"}, {"backend": "auto", "seed": 5}, {"sample": False}):
        output, kl = attention(query, key, value, config=config, log_prior=prior, mask=mask, is_causal=True, **options)
        # up to 1e-14 noise in the scores; the entries of a KL are of size 70 at such k and σ
        np.testing.assert_allclose(kl.detach(), expected, rtol=1e-10, err_msg=str(options))
        outcomes.append([output, *torch.autograd.grad(output.square().sum() + kl.sum(), (query, key, value))])
    dense, dense_kl = attention(query, key, value, config=config, log_prior=prior, mask=allowed, backend="reference")
    gradients = torch.autograd.grad(dense.square().sum() + dense_kl.sum(), (query, key, value))
    for outcome in outcomes:
        for one, other in zip(outcome, [dense, *gradients], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("variant", ["BAM-NOKL", "BAM-LF"])
@pytest.mark.parametrize(("m", "n"), LENGTHS)
@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("seed", [None, 3])
def test_the_future_does_not_matter(seed, backend, m, n, variant):
    """Keys and values after position i change no output up to i."""
    config = ba.AttentionConfig(variant, weibull_k=2.0, sigma_q=0.5)
    query, key, value = (tensor.detach() for tensor in _tensors(m, n))
    cut = min(m, n) // 2
    changed_key, changed_value = key.clone(), value.clone()
    changed_key[:, :, cut + 1 :] = 9.0
    changed_value[:, :, cut + 1 :] = -9.0
    results = []
    for k, v in ((key, value), (changed_key, changed_value)):
        torch.manual_seed(1)
        results.append(attention(query, k, v, config=config, is_causal=True, seed=seed, backend=backend, need_kl=False)[0])
    assert torch.equal(results[0][:, :, : cut + 1], results[1][:, :, : cut + 1])
