"""How a mask is written does not matter, and training takes the masks and shapes that eval takes, no others."""

import pytest
import torch
from torch import Tensor

import bayesattn as ba
from bayesattn import functional, record_kl, sampling
from bayesattn.nn import MultiheadAttention
from helpers import WITH_KL

EMBED, HEADS, BATCH, QUERIES, KEYS = 12, 4, 2, 5, 7
SMALLEST = torch.finfo(torch.float32).min
MINUS_INFINITIES = {"-inf": -torch.inf, "-100": -100.0, "-1e4": -1e4, "-1e9": -1e9, "smallest": SMALLEST}
every_way = pytest.mark.parametrize("minus", MINUS_INFINITIES.values(), ids=MINUS_INFINITIES)
either_way = pytest.mark.parametrize("need_weights", [False, True])


def _attention(config=None, **options) -> MultiheadAttention:
    config = ba.AttentionConfig("BAM-WC") if config is None else config
    return MultiheadAttention(EMBED, HEADS, batch_first=True, config=config, **options)


def _inputs(dtype=torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (torch.randn(BATCH, length, EMBED, dtype=dtype) for length in (QUERIES, KEYS, KEYS))
    return query, key, value


def _forbidden() -> dict[str, Tensor]:
    padding = torch.zeros(BATCH, KEYS, dtype=torch.bool)
    padding[0, -2:] = True
    square = torch.rand(QUERIES, KEYS) < 0.3
    square[:, 0] = False
    return {"key_padding_mask": padding, "attn_mask": square}


def _kl_and_output(attention: MultiheadAttention, inputs, **options) -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    with record_kl() as kl:
        output, _ = attention(*inputs, **options)
    return kl.total(), output


@either_way
@every_way
@pytest.mark.parametrize("variant", WITH_KL)
def test_a_mask_of_numbers_has_the_kl_and_the_draw_of_the_boolean_mask(variant, minus, need_weights):
    attention, inputs, forbidden = _attention(ba.AttentionConfig(variant)), _inputs(), _forbidden()
    numbers = {name: torch.zeros(mask.shape).masked_fill(mask, minus) for name, mask in forbidden.items()}
    expected = _kl_and_output(attention, inputs, **forbidden, need_weights=need_weights)
    given = _kl_and_output(attention, inputs, **numbers, need_weights=need_weights)
    # the lognormal KL takes another backend with numbers: float32 in another order
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-6)


@every_way
def test_a_mask_of_numbers_that_also_adds_something_forbids_the_same_entries(minus):
    """Here the numbers stay: nothing can drop them as a mask that only forbids."""
    attention, inputs, forbidden = _attention(), _inputs(), _forbidden()
    slope = torch.linspace(-1.0, 1.0, KEYS).expand(QUERIES, KEYS)
    kls = [
        _kl_and_output(attention, inputs, attn_mask=slope.masked_fill(forbidden["attn_mask"], low), need_weights=False)[0]
        for low in (minus, -torch.inf)
    ]
    assert torch.equal(*kls)


@pytest.mark.parametrize("sample", [True, False])
@every_way
def test_a_bias_forbids_what_a_mask_forbids(minus, sample):
    query, key, value = (torch.randn(BATCH, 3, length, 5) for length in (QUERIES, KEYS, KEYS))
    mask = ~_forbidden()["attn_mask"]
    bias = torch.zeros(QUERIES, KEYS).masked_fill(~mask, minus).requires_grad_()
    options = {"config": ba.AttentionConfig("BAM-WF"), "seed": 7, "sample": sample, "backend": "reference"}
    output, kl = functional.attention(query, key, value, bias=bias, check_finite=True, **options)
    expected = functional.attention(query, key, value, mask=mask, **options)
    # float32; without sampling torch's own attention gets the arguments as they are
    torch.testing.assert_close((output, kl), expected, rtol=1e-5, atol=1e-6)
    (gradient,) = torch.autograd.grad(output.sum() + kl.sum(), bias)
    assert bool(gradient.isfinite().all())
    assert float(gradient[~mask].abs().max()) < 1e-30


def test_a_strong_bias_is_a_bias():
    """−79 is far from what libraries write for "never": it is added, and the KL shows it."""
    attention, inputs = _attention(ba.AttentionConfig("BAM-WF")), _inputs()
    bias = torch.zeros(QUERIES, KEYS)
    bias[:, 3] = -79.0
    kls = [_kl_and_output(attention, inputs, attn_mask=bias * factor, need_weights=False)[0] for factor in (1.0, 2.0)]
    assert bool(kls[0] > kls[1] + 5.0)


@either_way
def test_a_nan_in_a_mask_reaches_the_output(need_weights):
    attention, inputs = _attention(), _inputs()
    mask = torch.zeros(QUERIES, KEYS)
    mask[1, 2] = torch.nan
    is_broken = torch.zeros(QUERIES, dtype=torch.bool)
    is_broken[1] = True
    for mode in (True, False):
        output, _ = attention.train(mode)(*inputs, attn_mask=mask, need_weights=need_weights)
        assert torch.equal(output.isnan().all(dim=-1), is_broken.expand(BATCH, QUERIES))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_kl_does_not_depend_on_whether_weights_are_shown(dtype):
    attention, inputs = _attention(dtype=dtype), _inputs(dtype)
    kls = [_kl_and_output(attention, inputs, need_weights=need_weights)[0] for need_weights in (False, True)]
    # in float32 two backends, else one
    torch.testing.assert_close(*kls, rtol=1e-6 if dtype == torch.float32 else 0.0, atol=0.0)


def test_large_scores_in_float16_stay_finite_with_weights_shown():
    attention = _attention(dtype=torch.float16)
    inputs = tuple(500.0 * x for x in _inputs(torch.float16))
    for need_weights in (False, True):
        kl, output = _kl_and_output(attention, inputs, need_weights=need_weights)
        gradients = torch.autograd.grad(output.float().mean() + 0.1 * kl, list(attention.parameters()), allow_unused=True)
        assert all(bool(x.isfinite().all()) for x in (kl, output, *gradients) if x is not None)


SHAPES = {
    "padding, one example": {"key_padding_mask": (1, KEYS)},
    "padding, one key": {"key_padding_mask": (BATCH, 1)},
    "padding, no batch": {"key_padding_mask": (KEYS,)},
    "mask, one query": {"attn_mask": (1, KEYS)},
    "mask, one key": {"attn_mask": (QUERIES, 1)},
    "mask, one axis": {"attn_mask": (KEYS,)},
    "mask, four axes": {"attn_mask": (BATCH, HEADS, QUERIES, KEYS)},
    "mask per head, one query": {"attn_mask": (BATCH * HEADS, 1, KEYS)},
    "mask per example": {"attn_mask": (BATCH, QUERIES, KEYS)},
    "query, one example": {"query": (1, QUERIES, EMBED)},
    "key, one example": {"key": (1, KEYS, EMBED)},
    "value, one example": {"value": (1, KEYS, EMBED)},
    "value, shorter": {"value": (BATCH, KEYS - 1, EMBED)},
    "query, no batch": {"query": (QUERIES, EMBED)},
    "query, four axes": {"query": (1, BATCH, QUERIES, EMBED)},
    "query, too narrow": {"query": (BATCH, QUERIES, EMBED - 1)},
    "key, too narrow": {"key": (BATCH, KEYS, EMBED - 1)},
}


@either_way
@pytest.mark.parametrize("changed", SHAPES.values(), ids=SHAPES)
def test_training_refuses_by_name_the_shapes_that_eval_refuses(changed, need_weights):
    attention = _attention()
    arguments = dict(zip(("query", "key", "value"), _inputs(), strict=True))
    for name, shape in changed.items():
        arguments[name] = torch.zeros(shape, dtype=torch.bool if "mask" in name else torch.float32)
    with pytest.raises((AssertionError, RuntimeError)):
        attention.eval()(**arguments, need_weights=need_weights)
    with pytest.raises(ValueError, match=r"(query|key|value|key_padding_mask|attn_mask) must have .*, got (shape )?\("):
        attention.train()(**arguments, need_weights=need_weights)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["key_padding_mask", "attn_mask"])
def test_training_refuses_masks_of_a_type_that_eval_refuses(name, dtype):
    attention, mask = _attention(), _forbidden()[name].to(dtype)
    with pytest.raises(RuntimeError, match="dtype"):
        attention.eval()(*_inputs(), **{name: mask}, need_weights=False)
    with pytest.raises(ValueError, match=rf"{name} must be torch\.bool .* torch\.float32, got {dtype}"):
        attention.train()(*_inputs(), **{name: mask}, need_weights=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(*_inputs(), **{name: mask}, need_weights=False)[0].isfinite().all()


def test_what_torch_takes_is_taken_while_sampling_too():
    """Odd, but legal: one example, one query, one key."""
    attention = _attention().eval()
    for b, m, n in ((1, QUERIES, KEYS), (BATCH, 1, KEYS), (BATCH, QUERIES, 1)):
        query, memory, padding = torch.randn(b, m, EMBED), torch.randn(b, n, EMBED), torch.zeros(b, n, dtype=torch.bool)
        for need_weights in (False, True):
            arguments = {"key_padding_mask": padding, "need_weights": need_weights}
            expected = attention(query, memory, memory, **arguments)
            with sampling(attention):
                drawn = attention(query, memory, memory, **arguments)
            assert [x if x is None else x.shape for x in drawn] == [x if x is None else x.shape for x in expected]
