"""What must not change anything: batching, padding, tiling, key order, a row shift; and what a seed decides."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import SETTINGS, configs

from bayesattn.functional import attention, attention_weights
from helpers import CONTEXTUAL, STOCHASTIC

SIZES = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 6), st.integers(1, 19))
SEED = st.integers(-(2**63), 2**63 - 1)


def _prior(config, b: int, h: int, n: int) -> torch.Tensor | None:
    if config.variant not in CONTEXTUAL:
        return None
    return torch.log_softmax(torch.randn(b, h, 1, n, dtype=torch.float64), dim=-1)


@SETTINGS
@given(config=configs(STOCHASTIC), sizes=SIZES, extra=st.integers(1, 9), seed=SEED)
def test_padding_keys_changes_neither_weights_nor_kl(config, sizes, extra, seed):
    b, h, m, n = sizes
    torch.manual_seed(0)
    scores, prior = torch.randn(b, h, m, n, dtype=torch.float64), _prior(config, b, h, n)
    weights, kl = attention_weights(scores, config=config, log_prior=prior, seed=seed)
    padded = torch.nn.functional.pad(scores, (0, extra), value=7.0)
    padded_prior = None if prior is None else torch.nn.functional.pad(prior, (0, extra), value=-torch.inf)
    mask = torch.arange(n + extra) < n
    longer, longer_kl = attention_weights(padded, config=config, log_prior=padded_prior, mask=mask, seed=seed)
    torch.testing.assert_close(longer[..., :n], weights, rtol=1e-12, atol=1e-15)
    assert bool((longer[..., n:] == 0.0).all())
    torch.testing.assert_close(longer_kl, kl, rtol=1e-10, atol=1e-10)


@SETTINGS
@given(config=configs(STOCHASTIC), sizes=SIZES, seed=SEED)
def test_rows_can_be_computed_one_at_a_time(config, sizes, seed):
    """Noise depends on the counter alone, so the first rows and examples of a call are a smaller call."""
    b, h, m, n = sizes
    torch.manual_seed(0)
    scores = torch.randn(b, h, m, n, dtype=torch.float64)
    weights, _ = attention_weights(scores, config=config, seed=seed, need_kl=False)
    part, _ = attention_weights(scores[:1, :, : (m + 1) // 2], config=config, seed=seed, need_kl=False)
    torch.testing.assert_close(part, weights[:1, :, : (m + 1) // 2], rtol=1e-13, atol=0.0)


@SETTINGS
@given(config=configs(STOCHASTIC), sizes=SIZES, seed=SEED)
def test_a_batch_is_its_examples_when_each_has_a_seed(config, sizes, seed):
    b, h, m, n = sizes
    torch.manual_seed(0)
    query, key, value = (torch.randn(b, h, length, 3, dtype=torch.float64) for length in (m, n, n))
    seeds = torch.arange(b) + seed // 2
    prior = _prior(config, b, h, n)
    output, kl = attention(query, key, value, config=config, log_prior=prior, seed=seeds)
    for example in range(b):
        at = slice(example, example + 1)
        alone, alone_kl = attention(
            query[at], key[at], value[at], config=config, log_prior=None if prior is None else prior[at], seed=seeds[at]
        )
        torch.testing.assert_close(alone, output[at], rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(alone_kl, kl[at], rtol=1e-10, atol=1e-10)


@SETTINGS
@given(config=configs(STOCHASTIC), sizes=SIZES, seed=SEED, shift=st.floats(-100.0, 100.0))
def test_a_shift_of_every_score_changes_no_weight(config, sizes, seed, shift):
    torch.manual_seed(0)
    scores = torch.randn(sizes, dtype=torch.float64)
    weights, _ = attention_weights(scores, config=config, seed=seed, need_kl=False)
    shifted, _ = attention_weights(scores + shift, config=config, seed=seed, need_kl=False)
    # adding 100 and taking it away again costs 1e-14 in a score
    torch.testing.assert_close(shifted, weights, rtol=1e-12, atol=1e-15)


@SETTINGS
@given(config=configs(STOCHASTIC), sizes=SIZES, seed=SEED)
def test_same_seed_same_draw(config, sizes, seed):
    torch.manual_seed(0)
    scores = torch.randn(sizes)
    state = torch.get_rng_state()
    first, _ = attention_weights(scores, config=config, seed=seed, need_kl=False)
    again, _ = attention_weights(scores, config=config, seed=torch.tensor(seed), need_kl=False)
    assert torch.equal(first, again)
    assert torch.equal(torch.get_rng_state(), state)
