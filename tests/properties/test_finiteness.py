"""No NaN or infinity, forward or backward, for anything in `strategies`; weights stay on the simplex."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import DTYPES, MASK_KINDS, SEEDS, SETTINGS, SHAPES, configs, make_mask, make_values

import bayesattn as ba
from bayesattn import record_kl
from bayesattn.functional import attention, attention_weights
from bayesattn.priors import contextual_log_prior
from helpers import CONTEXTUAL, PRESETS, STOCHASTIC, assert_finite

VARIANTS = ("soft", *STOCHASTIC)


def _log_prior(config, shape, mask, size, generator) -> torch.Tensor | None:
    """ln Ψ of logits as large as the scores, over the keys that somebody may attend to."""
    if config.variant not in CONTEXTUAL:
        return None
    b, h, _, n = shape
    logits = make_values((b, h, n), size, torch.float32, generator).requires_grad_()
    valid = None if mask is None else mask.expand(*mask.shape[:3], n).any(dim=-2)
    return contextual_log_prior(logits, valid)


def _assert_simplex(weights: torch.Tensor, mask: torch.Tensor | None, dtype: torch.dtype) -> None:
    assert bool((weights >= 0).all())
    assert bool((weights <= 1.0 + torch.finfo(dtype).eps).all())
    allowed = torch.ones_like(weights, dtype=torch.bool) if mask is None else mask.expand(weights.shape)
    assert bool((weights[~allowed] == 0).all())
    # each of up to 33 weights is rounded to the dtype once
    expected = allowed.any(dim=-1).double()
    torch.testing.assert_close(weights.double().sum(dim=-1), expected, rtol=0.0, atol=17 * torch.finfo(dtype).eps)


@SETTINGS
@given(
    config=configs(VARIANTS), dtype=DTYPES, shape=SHAPES, seed=SEEDS, mask_kind=MASK_KINDS,
    size=st.sampled_from((0.0, 1.0, 30.0, 1e4)), sample=st.booleans(), data_seed=st.integers(0, 99),
)  # fmt: skip
def test_weights_kl_and_gradients_are_finite(config, dtype, shape, seed, mask_kind, size, sample, data_seed):
    generator = torch.Generator().manual_seed(data_seed)
    scores = make_values(shape, size, dtype, generator).requires_grad_()
    mask = make_mask(mask_kind, shape, generator)
    prior = _log_prior(config, shape, mask, min(size, 100.0), generator)
    weights, kl = attention_weights(scores, config=config, log_prior=prior, mask=mask, seed=seed, sample=sample)
    assert weights.shape == shape
    assert weights.dtype == dtype
    assert kl is not None
    assert kl.shape == shape[:1]
    _assert_simplex(weights.detach(), mask, dtype)
    assert_finite(weights, kl)
    weights.backward(torch.ones_like(weights).cumsum(dim=-1), retain_graph=True)
    assert_finite(scores.grad)
    if kl.requires_grad:
        kl.sum().backward()
        assert_finite(scores.grad)


@SETTINGS
@given(
    config=configs(VARIANTS), dtype=DTYPES, shape=SHAPES, seed=SEEDS, mask_kind=MASK_KINDS,
    size=st.sampled_from((0.0, 1.0, 10.0, 100.0)), sample=st.booleans(), is_causal=st.booleans(), biased=st.booleans(),
    shared_keys=st.booleans(), data_seed=st.integers(0, 99),
)  # fmt: skip
def test_output_kl_and_gradients_are_finite(
    config, dtype, shape, seed, mask_kind, size, sample, is_causal, biased, shared_keys, data_seed
):
    """Query and key entries of ±100 in one dimension give scores of ±1e4."""
    generator = torch.Generator().manual_seed(data_seed)
    b, h, m, n = shape
    heads = 1 if shared_keys else h
    tensors = [
        make_values(size_, scale, dtype, generator).requires_grad_()
        for size_, scale in (((b, h, m, 1), size), ((b, heads, n, 1), size), ((b, heads, n, 3), 1.0))
    ]
    mask = make_mask(mask_kind, shape, generator)
    causal = torch.ones(m, n, dtype=torch.bool).tril()
    allowed = mask if not is_causal else causal.expand(1, 1, m, n) if mask is None else mask & causal
    prior = _log_prior(config, shape, allowed, min(size, 100.0), generator)
    bias = make_values((h, m, n), size, dtype, generator).requires_grad_() if biased else None
    output, kl = attention(
        *tensors, config=config, log_prior=prior, mask=mask, bias=bias, is_causal=is_causal, seed=seed, sample=sample
    )
    assert output.shape == (b, h, m, 3)
    assert output.dtype == dtype
    assert kl is not None
    assert kl.shape == (b,)
    assert_finite(output, kl)
    # an average of values in ±1, up to the rounding of the product
    assert bool((output.detach().abs() <= 1.0 + 16 * torch.finfo(dtype).eps).all())
    # one at a time and together: a KL gradient of 1e5 is right at such scores, and float16 ends at 65504
    losses = [output.float().sum()]
    if kl.requires_grad:
        losses += [kl.sum(), output.float().sum() + kl.sum()]
    inputs = [*tensors, *([] if bias is None else [bias])]
    for loss in losses:
        assert_finite(*torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_hundred_thousand_keys(variant, preset, dtype):
    n = 10**5
    config = ba.AttentionConfig(variant, preset=preset, gamma_beta=1e-15, gamma_alpha=1e-15)
    query, key, value = ((4.0 * torch.randn(1, 1, length, 4)).to(dtype).requires_grad_() for length in (2, n, n))
    logits = torch.randn(1, 1, n, requires_grad=True)
    prior = contextual_log_prior(logits) if variant in CONTEXTUAL else None
    mask = torch.arange(n)[None, None, None] % 3 > 0
    for backend in ("auto", "reference"):
        output, kl = attention(query, key, value, config=config, log_prior=prior, mask=mask, backend=backend)
        gradients = torch.autograd.grad(
            output.sum() + kl.sum(), [query, key, value, *([logits] if prior is not None else [])], retain_graph=True
        )
        assert_finite(output, kl, *gradients)


@SETTINGS
@given(config=configs(STOCHASTIC), dtype=DTYPES, mask_kind=MASK_KINDS, seed=st.integers(0, 99), need_weights=st.booleans())
def test_the_module_is_finite_from_end_to_end(config, dtype, mask_kind, seed, need_weights):
    torch.manual_seed(seed)
    module = ba.nn.MultiheadAttention(6, 2, batch_first=True, config=config, dtype=dtype)
    x = (3.0 * torch.randn(2, 5, 6)).to(dtype).requires_grad_()
    mask = make_mask(mask_kind, (2, 2, 5, 5), torch.Generator().manual_seed(seed))
    attn_mask = None if mask is None else ~mask.expand(2, 2, 5, 5).reshape(4, 5, 5)
    with record_kl() as kl:
        output, _ = module(x, x, x, attn_mask=attn_mask, need_weights=need_weights)
    loss = output.float().sum()
    if config.has_kl:
        # a batch mean as in training; at weight 1e-3 so that float16 gradients stay within its range
        loss = loss + 1e-3 * kl.total()
    loss.backward()
    assert_finite(output, x.grad, *(parameter.grad for parameter in module.parameters()))
    if config.has_kl:
        assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.parametrize("gamma_beta", [1e-15, 1e-2, 1.0])
def test_the_paper_presets_kl_saturates_at_the_documented_cap(gamma_beta):
    """β exp(Φ) would overflow at Φ = 89; beyond exp(10) it grows linearly with a bounded gradient, still upwards."""
    config = ba.AttentionConfig("BAM-WF", preset="paper", gamma_beta=gamma_beta, gamma_alpha=1e-15)
    values = []
    for level in (60.0, 90.0, 1e3, 1e4):
        scores = torch.full((1, 1, 1, 3), level, requires_grad=True)
        _, kl = attention_weights(scores, config=config)
        (gradient,) = torch.autograd.grad(kl.sum(), scores)
        assert_finite(kl, gradient)
        assert float(gradient.sum()) <= 22026.5 * (1 + 1e-5)  # exp(10), shared by the keys of the row
        assert float(gradient.sum()) > 0.0
        values.append(float(kl.detach()))
    assert values == sorted(set(values))
