"""Defaults, end points and closed forms that a small slip in the source would change unseen."""

import dataclasses
import math
import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import bayesattn as ba
from bayesattn.entropy import note_entropy, observe_entropy
from bayesattn.noise import specification as noise
from bayesattn.noise.keyed import derive_seeds, example_seeds, keyed_noise
from bayesattn.ops.attention.kl import LOG_ROW_CAP, capped_exp
from bayesattn.ops.attention.masking import Allowed
from bayesattn.priors import ContextualPrior
from helpers import no_type_checks, philox_scalar


def test_defaults_are_those_that_the_docs_name():
    values = {field.name: field.default for field in dataclasses.fields(ba.AttentionConfig)}
    assert ba.AttentionConfig().variant == "BAM-WC"
    values.pop("variant")
    assert values == {
        "weibull_k": 5.0,
        "gamma_alpha": 0.1,
        "gamma_beta": 1.0,
        "sigma_q": 0.3,
        "sigma_p": 1.0,
        "mu_p": 0.0,
        "prior_hidden_dim": 10,
        "prior_per_head": False,
        "detach_keys": False,
        "preset": "default",
        **dict.fromkeys(("score_form", "alpha_form", "mu_form", "kl_reduction")),
    }


def test_a_prior_of_one_hidden_unit_is_allowed():
    config = ba.AttentionConfig("BAM-WC", prior_hidden_dim=1)
    assert ContextualPrior(3, 2, config)(torch.zeros(1, 2, 5, 3)).shape == (1, 2, 1, 5)


def test_the_second_layer_of_the_prior_begins_with_the_variance_of_a_mean():
    prior = ContextualPrior(3, 400, ba.AttentionConfig("BAM-WC", prior_hidden_dim=300, prior_per_head=True))
    # 120,000 draws: the standard deviation is within 1 % (five standard errors)
    assert float(prior.weight_out.detach().std()) == pytest.approx(math.sqrt(1 / 300), rel=0.011)


@pytest.mark.parametrize("field", ["final", "anneal_rate", "period"])
def test_no_number_of_a_schedule_is_infinite(field):
    with pytest.raises(ValueError, match=f"{field} must be a finite number .*, got inf"):
        ba.KLSchedule("sigmoid", **{field: math.inf})


@pytest.mark.parametrize("name", ["kl_weight", "labels_per_example"])
def test_no_number_of_the_loss_is_infinite(name):
    with pytest.raises(ValueError, match=f"{name} must be a finite number .*, got inf"):
        ba.elbo(torch.tensor(1.0), torch.tensor(1.0), **{name: math.inf})


@pytest.mark.parametrize("seed", [-(2**63), 2**63 - 1])
def test_every_64_bit_seed_is_allowed(seed):
    assert int(noise.as_seed(seed, 3, "cpu")) == seed


@pytest.mark.parametrize("seed", [-(2**63) - 1, 2**63, True, 1.0])
def test_no_other_seed_is(seed, monkeypatch):
    no_type_checks(monkeypatch)
    with pytest.raises(ValueError, match=r"seed must be a 64-bit integer, .*, got"):
        noise.as_seed(seed, 3, "cpu")


def test_dropout_of_everything_and_of_nothing():
    assert noise.dropout_numbers(1.0) == (2**16, 0.0)
    assert noise.dropout_numbers(0.0) == (0, 1.0)
    assert noise.dropout_numbers(0.25) == (2**14, 4 / 3)


def scalar_seed(first: int, second: int, third: int, tag: int, seed: int) -> int:
    words = philox_scalar((first, second, third, tag), (seed % 2**32, seed // 2**32 % 2**32), noise.PHILOX_ROUNDS)
    return (words[0] << 31) ^ words[1]


@pytest.mark.parametrize("seed", [5, 7 * 2**33 + 11, -3])
def test_seeds_of_examples_and_calls_are_words_of_the_generator(seed):
    # both halves of a seed and of an index count
    example = 13 * 2**32 + 3
    found = example_seeds(seed, 17, torch.tensor([example]))
    assert found.tolist() == [scalar_seed(3, 13, 17, 2**32 - 2, seed)]
    derived = derive_seeds(torch.tensor([seed]), torch.tensor([19]), torch.tensor([23]))
    assert derived.tolist() == [scalar_seed(23, 19, 0, 2**32 - 1, seed)]


def test_a_checkpoint_recomputed_in_another_thread_finds_its_noise():
    # as on a GPU, where a thread of autograd's runs the backward pass
    x = torch.randn(7, 5, 6, dtype=torch.float64)
    gradients = []
    for is_checkpointed in (False, True):
        torch.manual_seed(0)
        config = ba.AttentionConfig("BAM-NOKL", weibull_k=1.0)
        module = ba.nn.MultiheadAttention(6, 2, batch_first=True, config=config, dtype=torch.float64)

        def attend(y, module=module):
            return module(y, y, y, need_weights=False)[0]

        with keyed_noise(example_seeds(0, 0, torch.arange(7))):
            output = checkpoint(attend, x, use_reentrant=False) if is_checkpointed else attend(x)
            thread = threading.Thread(target=output.square().sum().backward)
            thread.start()
            thread.join()
        gradients.append(module.in_proj_weight.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-12, atol=1e-12)


def test_entropy_is_a_share_of_that_of_the_allowed_keys_and_rows_without_a_choice_are_left_out():
    weights = torch.zeros(2, 1, 3, 4, dtype=torch.float64)
    weights[0, 0, 0, :2] = 0.5  # uniform over the two allowed keys: 1
    weights[0, 0, 1, 0] = 1.0  # one of three: 0
    weights[0, 0, 2, 3] = 1.0  # one allowed key: left out
    weights[1] = 0.25  # uniform over all: 1
    mask = torch.ones(2, 1, 3, 4, dtype=torch.bool)
    mask[0, 0, 0, 2:] = mask[0, 0, 1, 3:] = mask[0, 0, 2, :3] = False
    with observe_entropy() as scope:
        note_entropy(weights, mask)
        note_entropy(weights[1:], None)
    assert scope.count == 3
    assert float(scope.total) == pytest.approx(0.5 + 1.0 + 1.0)


def test_attention_notes_the_entropy_of_its_scaled_scores():
    query, key = torch.randn(1, 1, 1, 5, dtype=torch.float64), torch.randn(1, 1, 3, 5, dtype=torch.float64)
    with observe_entropy() as scope:
        ba.functional.attention(query, key, key, config=ba.AttentionConfig("BAM-NOKL"), need_kl=False)
    weights = torch.softmax((query @ key.transpose(-2, -1)).flatten() / math.sqrt(5.0), dim=0)
    assert float(scope.total) == pytest.approx(float(torch.special.entr(weights).sum()) / math.log(3.0))


def test_row_sums_grow_along_a_line_beyond_the_cap():
    x = torch.tensor([-3.0, 9.5, LOG_ROW_CAP, LOG_ROW_CAP + 2.0], dtype=torch.float64, requires_grad=True)
    value = capped_exp(x)
    top = math.exp(LOG_ROW_CAP)
    assert LOG_ROW_CAP == 10.0
    assert value.tolist() == pytest.approx([math.exp(-3.0), math.exp(9.5), top, 3.0 * top])
    (slope,) = torch.autograd.grad(value.sum(), x)
    assert slope.tolist() == pytest.approx([math.exp(-3.0), math.exp(9.5), top, top])


@pytest.mark.parametrize(("m", "n"), [(3, 7), (7, 3), (5, 5)])
def test_sums_over_a_triangle_are_those_over_it_as_a_mask(m, n):
    b, h, d = 2, 4, 3
    generator = torch.Generator().manual_seed(3)
    triangle = Allowed(None, True, (b, h, m, n))
    mask = torch.ones(m, n, dtype=torch.bool).tril()
    entries = mask.to(torch.float64)
    over_keys = torch.randn(b, h, 1, n, dtype=torch.float64, generator=generator)
    torch.testing.assert_close(triangle.sum_over_keys(over_keys), (over_keys * entries).sum(dim=-1))
    queries = torch.randn(b, h, m, d, dtype=torch.float64, generator=generator)
    torch.testing.assert_close(triangle.sum_over_queries(queries), entries.T @ queries)
    key = torch.randn(b, 2, n, d, generator=generator)
    expected = (over_keys * entries) @ key.double().repeat_interleave(2, dim=1)
    for allowed in (triangle, Allowed(mask[None, None], False, (b, h, m, n))):
        found = allowed.weighted_keys(over_keys.float(), key)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(triangle.queries_per_key(queries), entries.sum(dim=0).view(1, 1, 1, n))
    used = triangle.has_query(torch.device("cpu"))
    assert (torch.ones(n, dtype=torch.bool) if used is None else used.flatten()).tolist() == mask.any(dim=0).tolist()
    assert triangle.count(per_entry=True) == h * int(mask.sum())
    assert triangle.count(per_entry=False) == h * m


def test_a_mask_counts_once_for_each_head_and_query_that_shares_it():
    mask = torch.tensor([[True, False, True], [False, False, False]])[:, None, None]
    shared = Allowed(mask, False, (2, 5, 7, 3))
    assert shared.count(per_entry=True).tolist() == [5 * 7 * 2, 1]  # pyright: ignore[reportAttributeAccessIssue]
    assert shared.count(per_entry=False).tolist() == [5 * 7, 1]  # pyright: ignore[reportAttributeAccessIssue]
    assert shared.queries_per_key(torch.zeros(1)).flatten().tolist() == [7, 0, 7, 0, 0, 0]  # pyright: ignore[reportAttributeAccessIssue]
