"""The two pure functions: weights, output and KL against definitions written out, and against torch in the limits."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bayesattn import AttentionConfig, noise
from bayesattn.functional import attention, attention_weights
from helpers import CONTEXTUAL, MASKS, PRESETS, REDUCTIONS, STOCHASTIC, WITH_KL, kl_oracle, make_mask, random_log_prior

B, H, M, N, D, DV = 2, 3, 5, 7, 4, 6


def _scores(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(B, H, M, N, dtype=torch.float64).to(dtype)


def _qkv(dtype: torch.dtype = torch.float64, key_heads: int = H) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shapes = (B, H, M, D), (B, key_heads, N, D), (B, key_heads, N, DV)
    query, key, value = (torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes)
    return query, key, value


def _prior(variant: str, mask: torch.Tensor | None = None, heads: int = H) -> torch.Tensor | None:
    return random_log_prior(B, heads, N, mask) if variant in CONTEXTUAL else None


def _softmax(scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Softmax by its definition, rows without a key 0."""
    powers = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
    powers = powers if mask is None else powers * mask
    total = powers.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, powers / torch.where(total > 0, total, 1.0), 0.0)


@pytest.mark.parametrize("mask_kind", MASKS)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("variant", WITH_KL)
def test_kl_equals_the_sum_over_entries(variant, preset, mask_kind):
    mask = make_mask(mask_kind, B, H, M, N)
    scores, prior = _scores(), _prior(variant, mask)
    for reduction in REDUCTIONS:
        config = AttentionConfig(
            variant, preset=preset, kl_reduction=reduction, gamma_beta=0.3, gamma_alpha=0.2, mu_p=-0.7, sigma_q=0.4
        )
        _, kl = attention_weights(scores, config=config, log_prior=prior, mask=mask, sample=False)
        # float64 sums of a few hundred terms of size at most 10
        np.testing.assert_allclose(kl, kl_oracle(scores, prior, mask, config), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("score_form", ["raw", "log_softmax"])
@pytest.mark.parametrize("alpha_form", ["psi", "beta_psi"])
@pytest.mark.parametrize("mu_form", ["psi", "log_psi"])
@pytest.mark.parametrize("variant", CONTEXTUAL)
def test_each_form_is_its_own_switch(variant, mu_form, alpha_form, score_form):
    config = AttentionConfig(
        variant, score_form=score_form, alpha_form=alpha_form, mu_form=mu_form, kl_reduction="sum", gamma_beta=0.3
    )
    scores, prior = _scores(), _prior(variant)
    _, kl = attention_weights(scores, config=config, log_prior=prior)
    np.testing.assert_allclose(kl, kl_oracle(scores, prior, None, config), rtol=1e-11)


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("mask_kind", MASKS)
@pytest.mark.parametrize("key_heads", [1, H])
@pytest.mark.parametrize("variant", WITH_KL)
def test_kl_of_dot_product_attention_is_that_of_its_scores(variant, key_heads, mask_kind, backend):
    mask = make_mask(mask_kind, B, H, M, N)
    query, key, value = _qkv(key_heads=key_heads)
    config = AttentionConfig(variant, gamma_beta=0.3, gamma_alpha=0.2)
    prior = _prior(variant, mask, heads=1)
    _, kl = attention(query, key, value, config=config, log_prior=prior, mask=mask, scale=0.7, backend=backend)
    scores = 0.7 * query @ key.transpose(-2, -1)
    np.testing.assert_allclose(kl, kl_oracle(scores, prior, mask, config), rtol=1e-11, atol=1e-11)
    _, mean_kl = attention(query, key, value, config=config, log_prior=prior, mask=mask, scale=0.7, sample=False)
    np.testing.assert_allclose(mean_kl, kl, rtol=1e-11, atol=1e-11)


def test_row_identities_tie_the_kl_to_a_cross_entropy():
    """Summed over the keys of one query the KL is a cross-entropy to the prior plus constants (any β, paper form)."""
    k, scores, log_prior = 6.0, torch.randn(1, 1, 1, N, dtype=torch.float64), random_log_prior(1, 1, N)
    euler, lgamma = np.euler_gamma, math.lgamma(1 + 1 / k)
    cross = float(-(log_prior.exp() * torch.log_softmax(scores, dim=-1)).sum())
    constant = N * (math.log(k) - euler - 1)
    for beta in (1e-3, 0.4, 1.0, 3.0):
        paper = AttentionConfig("BAM-WC", weibull_k=k, gamma_beta=beta, preset="paper")
        # the row shift that minimises the KL leaves the weights as they are
        shifted = scores - torch.logsumexp(scores, dim=-1, keepdim=True) - math.log(beta)
        _, kl = attention_weights(shifted, config=paper, log_prior=log_prior)
        offset = euler / k + lgamma + 1 + constant + float(torch.lgamma(log_prior.exp()).sum())
        assert float(kl) == pytest.approx(cross + offset, abs=1e-11)
        code = AttentionConfig("BAM-WC", weibull_k=k, gamma_beta=beta, preset="official-code", kl_reduction="sum")
        _, kl = attention_weights(scores, config=code, log_prior=log_prior)
        offset = constant + float(torch.lgamma(beta * log_prior.exp()).sum())
        assert float(kl) == pytest.approx(beta * (cross + euler / k + lgamma + 1 - math.log(beta)) + offset, abs=1e-11)


@pytest.mark.parametrize("mask_kind", MASKS)
@pytest.mark.parametrize("variant", STOCHASTIC)
def test_a_sample_is_the_softmax_of_scores_plus_specified_noise(variant, mask_kind):
    mask, scores = make_mask(mask_kind, B, H, M, N), _scores()
    config = AttentionConfig(variant, weibull_k=3.0, sigma_q=0.6)
    weights, _ = attention_weights(scores, config=config, mask=mask, seed=17, need_kl=False)
    if config.family == "weibull":
        log_noise = noise.exponential(17, (B, H, M, N), dtype=torch.float64).log() / 3.0
    else:
        log_noise = 0.6 * noise.normal(17, (B, H, M, N), dtype=torch.float64)
    torch.testing.assert_close(weights, _softmax(scores + log_noise, mask), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("options", ["mask", "causal", "bias", "gqa", "all"])
@pytest.mark.parametrize("variant", STOCHASTIC)
def test_the_output_is_the_sampled_weights_times_the_values(variant, options, backend):
    query, key, value = _qkv(key_heads=1 if options in ("gqa", "all") else H)
    mask = make_mask("dead-rows", B, H, M, N) if options in ("mask", "all") else None
    bias = torch.randn(H, M, N, dtype=torch.float64) if options in ("bias", "all") else None
    is_causal = options in ("causal", "all")
    config = AttentionConfig(variant, weibull_k=3.0, sigma_q=0.6)
    output, _ = attention(
        query, key, value, config=config, mask=mask, bias=bias, is_causal=is_causal, seed=5, need_kl=False, backend=backend
    )
    scores = query @ key.transpose(-2, -1) / math.sqrt(D) + (0.0 if bias is None else bias)
    allowed = torch.ones(M, N, dtype=torch.bool).tril() if is_causal else torch.ones(M, N, dtype=torch.bool)
    allowed = allowed if mask is None else allowed & mask
    weights, _ = attention_weights(scores, config=config, mask=allowed, seed=5, need_kl=False)
    torch.testing.assert_close(output, weights @ value, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("seed", [3, None])
@pytest.mark.parametrize("config", [
    AttentionConfig("BAM-NOKL", weibull_k=1e13), AttentionConfig("BAM-LF", sigma_q=1e-15)
], ids=["k to infinity", "sigma to 0"])  # fmt: skip
def test_the_limits_are_soft_attention(config, seed):
    mask = make_mask("dead-rows", B, H, M, N)
    scores, (query, key, value) = _scores(), _qkv()
    weights, _ = attention_weights(scores, config=config, mask=mask, seed=seed, need_kl=False)
    torch.testing.assert_close(weights, _softmax(scores, mask), rtol=1e-11, atol=1e-12)
    output, _ = attention(query, key, value, config=config, mask=mask, seed=seed, need_kl=False)
    expected = F.scaled_dot_product_attention(query, key, value, mask)
    torch.testing.assert_close(output, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("variant", STOCHASTIC)
def test_a_shift_of_a_row_changes_no_weight(variant):
    scores, shift = _scores(), 50.0 * torch.randn(B, H, M, 1, dtype=torch.float64)
    options = {"config": AttentionConfig(variant), "log_prior": _prior(variant), "seed": 2}
    weights, kl = attention_weights(scores, **options)
    shifted, shifted_kl = attention_weights(scores + shift, **options)
    torch.testing.assert_close(shifted, weights, rtol=1e-10, atol=1e-14)
    # with Φ = log-softmax (the default preset) the KL does not see the shift either
    torch.testing.assert_close(shifted_kl, kl, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("variant", WITH_KL)
def test_keys_have_no_order(variant):
    order, scores, prior = torch.randperm(N), _scores(), _prior(variant)
    config = AttentionConfig(variant)
    weights, kl = attention_weights(scores, config=config, log_prior=prior, sample=False)
    other = None if prior is None else prior[..., order]
    permuted, permuted_kl = attention_weights(scores[..., order], config=config, log_prior=other, sample=False)
    torch.testing.assert_close(permuted, weights[..., order], rtol=1e-12, atol=0.0)
    torch.testing.assert_close(permuted_kl, kl, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("mask_kind", [kind for kind in MASKS if kind != "none"])
@pytest.mark.parametrize("variant", WITH_KL)
def test_masked_entries_are_exactly_zero_and_reach_nothing(variant, mask_kind):
    mask = make_mask(mask_kind, B, H, M, N)
    assert mask is not None
    allowed = mask.expand(B, H, M, N)
    scores, prior, config = _scores(), _prior(variant, mask), AttentionConfig(variant)
    weights, kl = attention_weights(scores, config=config, log_prior=prior, mask=mask, seed=4)
    assert bool((weights[~allowed] == 0.0).all())
    row_sums = torch.where(allowed.any(dim=-1), 1.0, 0.0).double()
    torch.testing.assert_close(weights.sum(dim=-1), row_sums, rtol=1e-14, atol=0.0)
    # whatever stands at a masked entry, NaN and infinity included, changes nothing
    for rubbish in (torch.nan, torch.inf, -torch.inf, 1e30):
        spoiled = scores.masked_fill(~allowed, rubbish).requires_grad_()
        again, again_kl = attention_weights(spoiled, config=config, log_prior=prior, mask=mask, seed=4)
        assert torch.equal(again, weights)
        assert torch.equal(again_kl, kl)
        (gradient,) = torch.autograd.grad((again * torch.arange(N)).sum() + again_kl.sum(), spoiled)
        assert bool((gradient[~allowed] == 0.0).all())
        assert bool(gradient.isfinite().all())


def test_rows_without_a_key_give_zero_output_kl_and_gradient():
    for backend in ("reference", "auto"):
        query, key, value = (x.requires_grad_() for x in _qkv())
        mask = torch.zeros(B, 1, M, N, dtype=torch.bool)
        output, kl = attention(query, key, value, config=AttentionConfig("BAM-WF"), mask=mask, backend=backend)
        gradients = torch.autograd.grad(output.sum() + kl.sum(), (query, key, value))
        for tensor in (output, kl, *gradients):
            assert bool((tensor == 0.0).all())


@pytest.mark.parametrize("shape", [(B, H, M, N), (B, M, N), (M, N)])
def test_scores_with_two_or_three_axes_are_those_with_four(shape):
    scores = torch.randn(shape, dtype=torch.float64)
    full = scores.reshape((1,) * (4 - len(shape)) + shape) if len(shape) != 3 else scores[:, None]
    mask = make_mask("full", *full.shape)
    config = AttentionConfig("BAM-WF")
    weights, kl = attention_weights(scores, config=config, mask=mask.reshape(shape), seed=1)
    expected, expected_kl = attention_weights(full, config=config, mask=mask, seed=1)
    assert torch.equal(weights, expected.reshape(shape))
    assert torch.equal(kl, expected_kl)


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("variant", WITH_KL)
def test_gradients_equal_finite_differences_with_the_same_noise(variant, backend):
    b, h, m, n, d = 1, 2, 3, 5, 2  # small: finite differences cost two calls per entry
    mask = make_mask("dead-rows", b, h, m, n)
    prior = torch.log_softmax(torch.randn(b, h, 1, n, dtype=torch.float64), dim=-1).requires_grad_()
    inputs = tuple(torch.randn(b, h, size, d, dtype=torch.float64, requires_grad=True) for size in (m, n, n))
    config = AttentionConfig(variant, gamma_beta=0.3, weibull_k=2.0, sigma_q=0.5, preset="paper")

    def call(query, key, value, prior=None):
        torch.manual_seed(1)  # the noise of the blocked backend comes from torch's generator
        seed = None if backend == "auto" else 9
        return attention(query, key, value, config=config, log_prior=prior, mask=mask, seed=seed, backend=backend)

    assert torch.autograd.gradcheck(call, (*inputs, prior) if variant in CONTEXTUAL else inputs)


@pytest.mark.parametrize("variant", ["BAM-WF", "BAM-WC"])
def test_the_kl_gradient_is_the_closed_form(variant):
    scores, prior = _scores().requires_grad_(), _prior(variant)
    config = AttentionConfig(variant, preset="paper", gamma_beta=0.3, gamma_alpha=0.2)
    _, kl = attention_weights(scores, config=config, log_prior=prior)
    (gradient,) = torch.autograd.grad(kl.sum(), scores)
    alpha = 0.2 if prior is None else prior.exp()
    torch.testing.assert_close(gradient, 0.3 * scores.detach().exp() - alpha, rtol=1e-11, atol=1e-12)


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "case", ["plain", "causal", "mask", "bias", "mask+bias", "mask+causal", "bias+causal", "gqa", "scale"]
)
def test_without_sampling_the_output_is_torchs_to_the_last_bit(case, dtype):
    query, key, value = _qkv(dtype, key_heads=1 if case == "gqa" else H)
    mask = make_mask("full", B, H, M, N) if "mask" in case else None
    bias = torch.randn(B, 1, M, N).to(dtype) if "bias" in case else None
    scale = 0.31 if case == "scale" else None
    is_causal = "causal" in case
    for variant in ("soft", "BAM-NOKL", "BAM-WF", "BAM-LF"):
        output, _ = attention(
            query, key, value, config=AttentionConfig(variant), mask=mask, bias=bias, is_causal=is_causal, scale=scale,
            sample=False,
        )  # fmt: skip
        # what a user of torch would write: torch takes one of a causal flag, a boolean mask and a float mask
        allowed = mask
        if is_causal and case != "causal":
            causal = torch.ones(M, N, dtype=torch.bool).tril()
            allowed = causal if mask is None else causal & mask
        attn_mask = allowed
        if bias is not None:
            attn_mask = bias if allowed is None else bias.masked_fill(~allowed, -torch.inf)
        expected = F.scaled_dot_product_attention(
            query, key, value, attn_mask, is_causal=case == "causal", scale=scale, enable_gqa=case == "gqa"
        )
        assert output.dtype == dtype
        assert torch.equal(output, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_sampling_the_weights_are_torchs_softmax_to_the_last_bit(dtype):
    scores, mask = _scores(dtype), make_mask("full", B, H, M, N)
    assert mask is not None
    wide = torch.promote_types(dtype, torch.float32)  # noise, softmax and KL are float32 or better
    for given, expected in (
        (None, torch.softmax(scores.to(wide), dim=-1)),
        (mask, torch.softmax(scores.to(wide).masked_fill(~mask, -torch.inf), dim=-1)),
    ):
        weights, _ = attention_weights(scores, config=AttentionConfig("BAM-WF"), mask=given, sample=False)
        assert weights.dtype == dtype
        assert torch.equal(weights, expected.to(dtype))
        assert torch.equal(
            weights, torch.softmax(scores if given is None else scores.masked_fill(~given, -torch.inf), dim=-1)
        )


def test_soft_attention_never_samples():
    scores = _scores()
    weights, kl = attention_weights(scores, config=AttentionConfig("soft"), seed=1)
    assert torch.equal(weights, torch.softmax(scores, dim=-1))
    assert torch.equal(kl, torch.zeros(B, dtype=torch.float64))


def test_the_kl_is_none_only_where_nobody_asked():
    query, key, value = _qkv()
    for variant in ("soft", *STOCHASTIC):
        config = AttentionConfig(variant)
        for sample in (True, False):
            assert attention(query, key, value, config=config, need_kl=False, sample=sample)[1] is None
            assert attention_weights(_scores(), config=config, need_kl=False, sample=sample)[1] is None
            _, kl = attention(query, key, value, config=config, log_prior=_prior(variant), sample=sample)
            assert kl.shape == (B,)
            assert bool((kl == 0.0).all()) == (variant not in WITH_KL)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_kl_stays_in_float32_and_the_output_in_the_dtype_of_the_values(dtype, backend):
    query, key, value = _qkv(dtype)
    prior = random_log_prior(B, 1, N, dtype=torch.float32)
    output, kl = attention(query, key, value, config=AttentionConfig("BAM-WC"), log_prior=prior, backend=backend)
    assert output.dtype == dtype
    assert kl.dtype == torch.promote_types(dtype, torch.float32)


def test_autocast_does_not_reach_noise_softmax_and_kl():
    config, scores, prior = AttentionConfig("BAM-WC"), _scores(torch.float32), random_log_prior(B, 1, N, dtype=torch.float32)
    query, key, value = _qkv(torch.float32)
    plain = (
        *attention_weights(scores, config=config, log_prior=prior, seed=1),
        *attention(query, key, value, config=config, log_prior=prior, seed=1),
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = (
            *attention_weights(scores, config=config, log_prior=prior, seed=1),
            *attention(query, key, value, config=config, log_prior=prior, seed=1),
        )
    for one, other in zip(plain, cast, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("variant", STOCHASTIC)
def test_the_seed_decides_the_draw_and_the_global_generator_stays_put(variant):
    config, (query, key, value) = AttentionConfig(variant), _qkv()
    state = torch.get_rng_state()
    first, second, other = (attention(query, key, value, config=config, seed=seed, need_kl=False)[0] for seed in (7, 7, 8))
    weights = [attention_weights(_scores_of(query, key), config=config, seed=seed, need_kl=False)[0] for seed in (7, 7, 8)]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def _scores_of(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return query @ key.transpose(-2, -1)


@pytest.mark.parametrize("variant", STOCHASTIC)
def test_manual_seed_governs_calls_without_a_seed(variant):
    config, (query, key, value) = AttentionConfig(variant), _qkv()

    def draw() -> list[torch.Tensor]:
        weights, _ = attention_weights(_scores_of(query, key), config=config, need_kl=False)
        return [weights, *(attention(query, key, value, config=config, need_kl=False)[0] for _ in range(2))]

    torch.manual_seed(3)
    first = draw()
    torch.manual_seed(3)
    again = draw()
    torch.manual_seed(4)
    other = draw()
    for one, two, three in zip(first, again, other, strict=True):
        assert torch.equal(one, two)
        assert not torch.equal(one, three)
    assert not torch.equal(first[1], first[2])


def test_a_seed_per_example_draws_the_same_wherever_the_example_stands():
    config, (query, key, value) = AttentionConfig("BAM-NOKL"), _qkv()
    seeds = torch.tensor([3, 2**50])
    together, _ = attention(query, key, value, config=config, seed=seeds)
    swapped, _ = attention(query.flip(0), key.flip(0), value.flip(0), config=config, seed=seeds.flip(0))
    torch.testing.assert_close(swapped.flip(0), together, rtol=1e-13, atol=1e-14)


def test_dropout_drops_sampled_weights_and_leaves_the_kl():
    query, key, _ = _qkv()
    value = torch.eye(N, dtype=torch.float64).expand(B, H, N, N)  # the output is the weight matrix itself
    config = AttentionConfig("BAM-WF")
    weights, kl = attention(query, key, value, config=config, seed=1)
    dropped, dropped_kl = attention(query, key, value, config=config, seed=1, dropout_p=0.5)
    assert torch.equal(kl, dropped_kl)
    again, _ = attention(query, key, value, config=config, seed=1, dropout_p=0.5)
    assert torch.equal(again, dropped)  # the seed governs dropout, too
    is_zero = dropped == 0.0
    assert 0.3 < float(is_zero.double().mean()) < 0.7  # 210 entries: five standard errors are 0.17
    torch.testing.assert_close(dropped[~is_zero], 2.0 * weights[~is_zero])


def test_a_prior_per_key_head_serves_the_query_heads_that_share_it():
    query, key = torch.randn(2, 6, 3, 4), torch.randn(2, 2, 5, 4)
    prior = torch.randn(2, 2, 1, 5).log_softmax(-1)
    config = AttentionConfig("BAM-WC")
    _, kl = attention(query, key, key, config=config, log_prior=prior, seed=1)
    _, expanded = attention(query, key, key, config=config, log_prior=prior.repeat_interleave(3, dim=1), seed=1)
    assert torch.equal(kl, expanded)
