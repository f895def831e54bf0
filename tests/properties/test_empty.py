"""Empty axes: a zero-length batch, no queries, no keys. The last batch of a shard, or an empty graph, is no special case."""

import itertools

import pytest
import torch

import bayesattn as ba
from bayesattn import record_kl
from bayesattn.functional import attention, attention_weights
from helpers import CONTEXTUAL, PRESETS, STOCHASTIC, assert_finite

EMPTY = {"batch": (0, 2, 3, 5), "queries": (2, 2, 0, 5), "keys": (2, 2, 3, 0), "batch and queries": (0, 2, 0, 5)}


def _mask(kind: str, shape: tuple[int, int, int, int]) -> torch.Tensor | None:
    if kind == "none":
        return None
    return torch.ones(shape if kind == "full" else (shape[0], 1, 1, shape[3]), dtype=torch.bool)


CASES = list(
    itertools.product(
        ("soft", *STOCHASTIC), EMPTY, ("none", "full", "keys"), PRESETS, ("weights", "seeded", "sampled", "mean")
    )
)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_an_empty_axis_gives_an_empty_or_zero_result(case):
    _check(*case)


def _check(variant: str, axis: str, mask_kind: str, preset: str, path: str) -> None:
    shape = EMPTY[axis]
    b, h, m, n = shape
    prior = torch.zeros(b, h, 1, n) if variant in CONTEXTUAL else None
    options = {"config": ba.AttentionConfig(variant, preset=preset), "log_prior": prior, "mask": _mask(mask_kind, shape)}
    tensors = [torch.randn(b, h, length, 4, requires_grad=True) for length in (m, n, n)]
    if path == "weights":
        tensors = [torch.zeros(shape, requires_grad=True)]
        output, kl = attention_weights(*tensors, **options)
        assert output.shape == shape
    else:
        output, kl = attention(*tensors, seed=3 if path == "seeded" else None, sample=path != "mean", **options)
        assert output.shape == (b, h, m, 4)
    (output.sum() + kl.sum()).backward()
    assert kl.shape == (b,)
    assert bool((output == 0.0).all())  # empty, or rows without a key
    assert bool((kl == 0.0).all())
    assert_finite(*(tensor.grad for tensor in tensors))


@pytest.mark.parametrize(("train", "need_weights"), [(True, True), (True, False), (False, True), (False, False)])
def test_modules_take_a_zero_length_batch(train, need_weights):
    module = ba.nn.MultiheadAttention(6, 2, batch_first=True, config=ba.AttentionConfig("BAM-WC")).train(train)
    x = torch.zeros(0, 5, 6, requires_grad=True)
    with record_kl() as kl:
        output, _ = module(x, x, x, need_weights=need_weights)
    assert output.shape == (0, 5, 6)
    assert kl.per_call()[0][1].shape == (0,)
    # a mean over no examples must not become NaN, which one optimizer step would spread to every parameter
    total = kl.total()
    assert float(total.detach()) == 0.0
    (output.sum() + total).backward()
    assert_finite(*(parameter.grad for parameter in module.parameters()))
