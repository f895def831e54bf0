"""MultiheadAttention is torch's: bit for bit in eval mode, to rounding in train mode where the noise vanishes."""

import copy
import itertools
import pickle

import pytest
import torch
from torch import nn

import bayesattn as ba
from bayesattn import record_kl
from bayesattn.nn import MultiheadAttention

# torch's fused path takes only an even number of heads
EMBED, HEADS, BATCH, QUERIES, KEYS = 12, 4, 2, 5, 7
# the noise of this shape is below the rounding of float64
QUIET = ba.AttentionConfig("BAM-WC", weibull_k=1e15)
NOISY = ba.AttentionConfig("BAM-WC", weibull_k=1.0)

CONSTRUCTORS = {
    "plain": {},
    "no bias": {"bias": False},
    "kdim, vdim": {"kdim": 10, "vdim": 8},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True},
    "bias_kv, zero_attn": {"add_bias_kv": True, "add_zero_attn": True},
    "kdim, vdim, bias_kv": {"kdim": 10, "vdim": 8, "add_bias_kv": True},
}
MASKS = [
    "none",
    "padding",
    "float padding",
    "bool 2d",
    "float 2d",
    "bool 3d",
    "float 3d",
    "padding + bool",
    "padding + float 3d",
]


def _pair(
    config: ba.AttentionConfig = QUIET, dtype=torch.float64, **options
) -> tuple[MultiheadAttention, nn.MultiheadAttention]:
    stock = nn.MultiheadAttention(EMBED, HEADS, dtype=dtype, **options)
    for parameter in stock.parameters():
        nn.init.normal_(parameter, std=0.5)  # torch starts biases at 0, which would hide a forgotten one
    ours = MultiheadAttention(EMBED, HEADS, dtype=dtype, config=config, **options)
    result = ours.load_state_dict(stock.state_dict(), strict=True)
    assert not result.missing_keys
    assert not result.unexpected_keys
    return ours, stock


def _inputs(options: dict, batched: bool = True, dtype=torch.float64) -> list[torch.Tensor]:
    sizes = [(QUERIES, EMBED), (KEYS, options.get("kdim", EMBED)), (KEYS, options.get("vdim", EMBED))]
    tensors = [torch.randn(BATCH, length, width, dtype=dtype) for length, width in sizes]
    if not batched:
        return [tensor[0] for tensor in tensors]
    return tensors if options.get("batch_first") else [tensor.transpose(0, 1) for tensor in tensors]


def _masks(kind: str, batched: bool = True, dtype=torch.float64) -> dict[str, torch.Tensor]:
    """In torch's convention: True or −inf means do not attend."""
    padding = torch.zeros(BATCH, KEYS, dtype=torch.bool)
    padding[0, -2:] = True
    square = torch.rand(QUERIES, KEYS) < 0.3
    square[:, 0] = False
    cube = torch.rand(BATCH * HEADS, QUERIES, KEYS) < 0.3
    cube[..., 0] = False
    bias = torch.randn(QUERIES, KEYS, dtype=dtype).masked_fill(square, -torch.inf)
    bias_3d = torch.randn(BATCH * HEADS, QUERIES, KEYS, dtype=dtype).masked_fill(cube, -torch.inf)
    float_padding = torch.randn(BATCH, KEYS, dtype=dtype).masked_fill(padding, -torch.inf)
    if not batched:
        padding, float_padding, cube, bias_3d = padding[0], float_padding[0], cube[:HEADS], bias_3d[:HEADS]
    return {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "float padding": {"key_padding_mask": float_padding},
        "bool 2d": {"attn_mask": square},
        "float 2d": {"attn_mask": bias},
        "bool 3d": {"attn_mask": cube},
        "float 3d": {"attn_mask": bias_3d},
        "padding + bool": {"key_padding_mask": padding, "attn_mask": square},
        "padding + float 3d": {"key_padding_mask": float_padding, "attn_mask": bias_3d},
    }[kind]


def _calls() -> list[dict]:
    return [
        {"need_weights": need, "average_attn_weights": average}
        for need, average in [(False, True), (True, True), (True, False)]
    ]


def _assert_same(ours: tuple, theirs: tuple, exact: bool) -> None:
    assert (ours[1] is None) == (theirs[1] is None)
    for one, other in zip(ours, theirs, strict=True):
        if one is None:
            continue
        assert one.shape == other.shape
        # float64: a handful of products and one softmax, in another order
        torch.testing.assert_close(one, other, rtol=0.0 if exact else 1e-11, atol=0.0 if exact else 1e-12, equal_nan=True)


# (constructor, batch_first, batched); torch ignores batch_first without a batch
ALL = [(name, batch_first, True) for name in CONSTRUCTORS for batch_first in (False, True)]
ALL += [("plain", True, False), *((name, False, False) for name in CONSTRUCTORS)]


@pytest.mark.parametrize(("constructor", "batch_first", "batched"), ALL)
def test_eval_mode_is_torchs_module_bit_for_bit(constructor, batch_first, batched):
    options = {**CONSTRUCTORS[constructor], "batch_first": batch_first}
    for dtype in (torch.float32, torch.bfloat16):
        ours, stock = (module.eval() for module in _pair(NOISY, dtype, **options))
        inputs = _inputs(options, batched, dtype)
        for kind, call in itertools.product(("none", "padding", "float 2d", "bool 3d"), _calls()):
            masks = _masks(kind, batched, dtype)
            for grad in (True, False):  # without gradients torch takes its fused path where it can
                with torch.set_grad_enabled(grad):
                    _assert_same(ours(*inputs, **masks, **call), stock(*inputs, **masks, **call), exact=True)


@pytest.mark.parametrize("mask_kind", MASKS)
@pytest.mark.parametrize(("constructor", "batch_first", "batched"), ALL)
def test_train_mode_with_vanishing_noise_is_torchs_module(constructor, batch_first, batched, mask_kind):
    options = {**CONSTRUCTORS[constructor], "batch_first": batch_first}
    ours, stock = _pair(QUIET, **options)
    inputs, masks = _inputs(options, batched), _masks(mask_kind, batched)
    for call in _calls():
        _assert_same(ours(*inputs, **masks, **call), stock(*inputs, **masks, **call), exact=False)
        with record_kl() as kl:  # with its KL, and also in eval mode, where recording leaves torch's own path
            _assert_same(ours(*inputs, **masks, **call), stock(*inputs, **masks, **call), exact=False)
            _assert_same(ours.eval()(*inputs, **masks, **call), stock(*inputs, **masks, **call), exact=False)
        assert len(kl) == 2
        assert bool(kl.total().isfinite())
        ours.train()


def test_self_attention_in_the_fused_path_is_torchs_bit_for_bit():
    ours, stock = (module.eval() for module in _pair(NOISY, torch.float32, batch_first=True))
    x, padding = torch.randn(BATCH, KEYS, EMBED), _masks("padding")["key_padding_mask"]
    with torch.no_grad():
        for call in _calls():
            _assert_same(
                ours(x, x, x, key_padding_mask=padding, **call), stock(x, x, x, key_padding_mask=padding, **call), True
            )


def test_gradients_in_train_mode_with_vanishing_noise_are_torchs():
    ours, stock = _pair(QUIET, batch_first=True, add_bias_kv=True)
    inputs, masks = _inputs({"batch_first": True}), _masks("padding + bool")
    for module in (ours, stock):
        module(*inputs, **masks, need_weights=False)[0].square().sum().backward()
    for name, parameter in stock.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name).grad, parameter.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("variant", ["BAM-NOKL", "BAM-LF", "BAM-WC"])
def test_train_mode_samples_and_the_weights_returned_are_those_used(variant, need_weights):
    ours, _ = _pair(ba.AttentionConfig(variant, weibull_k=1.0, sigma_q=1.0), batch_first=True)
    inputs = _inputs({"batch_first": True})
    first, second = (ours(*inputs, need_weights=need_weights) for _ in range(2))
    assert not torch.allclose(first[0], second[0])
    if need_weights:
        output, weights = ours(*inputs, average_attn_weights=False)
        value = nn.functional.linear(inputs[2], ours.in_proj_weight[-EMBED:], ours.in_proj_bias[-EMBED:])
        heads = weights @ value.unflatten(-1, (HEADS, EMBED // HEADS)).transpose(1, 2)
        torch.testing.assert_close(ours.out_proj(heads.transpose(1, 2).flatten(2)), output)
        torch.testing.assert_close(weights.sum(dim=-1), torch.ones(BATCH, HEADS, QUERIES, dtype=torch.float64))


@pytest.mark.parametrize("need_weights", [False, True])
def test_the_recorded_kl_does_not_depend_on_how_the_output_is_asked_for(need_weights):
    ours, _ = _pair(ba.AttentionConfig("BAM-WC", preset="paper"), batch_first=True)
    inputs, masks = _inputs({"batch_first": True}), _masks("padding + float 3d")
    totals = []
    for options in ({"need_weights": need_weights}, {"need_weights": False}):
        with record_kl() as kl:
            ours(*inputs, **masks, **options)
        totals.append(kl.total().detach())
    torch.testing.assert_close(*totals, rtol=1e-10, atol=0.0)


def test_padding_does_not_change_the_kl_of_an_example():
    """A padded batch records for each example what the example alone records."""
    for variant in ("BAM-WC", "BAM-LC", "BAM-WF"):
        ours, _ = _pair(ba.AttentionConfig(variant), batch_first=True)
        x = torch.randn(2, 7, EMBED, dtype=torch.float64)
        padding = torch.zeros(2, 7, dtype=torch.bool)
        padding[1, 4:] = True
        query = x[:, :4]
        with record_kl() as kl:
            ours(query, x, x, key_padding_mask=padding)
            ours(query[1:], x[1:, :4], x[1:, :4])
        (_, together), (_, alone) = kl.per_call()
        torch.testing.assert_close(together[1:], alone, rtol=1e-11, atol=0.0)


def test_a_fully_padded_example_gives_no_nan():
    ours, _ = _pair(NOISY, batch_first=True)
    inputs = [x.requires_grad_() for x in _inputs({"batch_first": True})]
    padding = torch.zeros(BATCH, KEYS, dtype=torch.bool)
    padding[1] = True
    for need_weights in (False, True):
        with record_kl() as kl:
            output, _ = ours(*inputs, key_padding_mask=padding, need_weights=need_weights)
        assert float(kl.per_call()[0][1][1]) == 0.0
        gradients = torch.autograd.grad(output.sum() + kl.total(), [*inputs, *ours.parameters()])
        assert all(bool(x.isfinite().all()) for x in (output, *gradients))
        torch.testing.assert_close(output[1], ours.out_proj.bias.expand(QUERIES, EMBED))  # attention 0, then the projection


def test_dropout_acts_in_train_mode_only():
    ours, _ = _pair(QUIET, dropout=0.5, batch_first=True)
    inputs = _inputs({"batch_first": True})
    for need_weights in (False, True):
        assert not torch.allclose(ours(*inputs, need_weights=need_weights)[0], ours(*inputs, need_weights=need_weights)[0])
    weights = ours(*inputs)[1]
    assert weights is not None
    ours.eval()
    assert torch.equal(ours(*inputs)[0], ours(*inputs)[0])


def test_state_dicts_travel_both_ways_and_a_partial_prior_is_an_error():
    ours, stock = _pair(NOISY)
    state = ours.state_dict()
    assert {key for key in state if "bayes_prior" not in key} == set(stock.state_dict())
    fresh = MultiheadAttention(EMBED, HEADS, dtype=torch.float64, config=NOISY)
    before = fresh.bayes_prior.weight_in.detach().clone()
    fresh.load_state_dict(stock.state_dict(), strict=True)
    assert torch.equal(fresh.bayes_prior.weight_in, before)  # no prior in the checkpoint: the fresh one stays
    fresh.load_state_dict(state, strict=True)
    assert torch.equal(fresh.bayes_prior.weight_in, ours.bayes_prior.weight_in)
    state.pop("bayes_prior.weight_in")
    with pytest.raises(RuntimeError, match=r"bayes_prior\.weight_in"):
        fresh.load_state_dict(state, strict=True)


@pytest.mark.parametrize("options", [{}, {"kdim": 10, "vdim": 8}])
def test_copies_and_pickles_work_like_the_original(options):
    ours, _ = _pair(NOISY, **options)
    inputs = _inputs(options)
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        torch.manual_seed(1)
        expected = ours.train()(*inputs)[0]
        torch.manual_seed(1)
        assert torch.equal(twin.train()(*inputs)[0], expected)
        assert torch.equal(twin.eval()(*inputs)[0], ours.eval()(*inputs)[0])


def test_is_causal_without_a_mask_is_refused_while_sampling_as_torch_does():
    """It is a hint about the mask, not a mask; ignoring it would let queries see the future."""
    ours, stock = _pair(NOISY, batch_first=True)
    x = torch.randn(BATCH, KEYS, EMBED, dtype=torch.float64)
    for module, error in ((stock, RuntimeError), (ours, ValueError)):
        with pytest.raises(error, match="is_causal"):
            module(x, x, x, is_causal=True, need_weights=False)


@pytest.mark.parametrize("name", ["attn_mask", "key_padding_mask"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_an_integer_mask_is_refused_by_name(name, dtype):
    """Added to the scores, a 0/1 mask would nearly do nothing."""
    ours, _ = _pair(NOISY, batch_first=True)
    shape = (QUERIES, KEYS) if name == "attn_mask" else (BATCH, KEYS)
    with pytest.raises(ValueError, match=f"{name} must be torch.bool .*, got {dtype}"):
        ours(*_inputs({"batch_first": True}), **{name: torch.zeros(shape, dtype=dtype)})


@pytest.mark.parametrize(
    ("name", "shape"),
    [("key_padding_mask", (BATCH, KEYS + 1)), ("attn_mask", (QUERIES, KEYS + 1)), ("attn_mask", (BATCH, QUERIES, KEYS))],
)
def test_a_mask_of_the_wrong_shape_is_refused(name, shape):
    ours, _ = _pair(NOISY, batch_first=True)
    with pytest.raises(ValueError, match=rf"mask must have shape .*, got .*{shape[-1]}\)"):
        ours(*_inputs({"batch_first": True}), **{name: torch.zeros(shape, dtype=torch.bool)})
