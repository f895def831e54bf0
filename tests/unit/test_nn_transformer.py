"""Transformer layers: torch's in eval mode; while they sample, torch's fused path is never taken."""

import warnings

import pytest
import torch
from torch import nn

import bayesattn as ba
from bayesattn import record_kl, sampling
from bayesattn.functional import dense
from bayesattn.nn import MultiheadAttention, TransformerDecoderLayer, TransformerEncoderLayer, multihead_arguments

# torch's fused path takes only an even number of heads
DIM, HEADS, BATCH, LENGTH, MEMORY = 12, 4, 2, 5, 7
NOISY = ba.AttentionConfig("BAM-WC", weibull_k=1.0)
QUIET = ba.AttentionConfig("BAM-WC", weibull_k=1e12)


def _encoder_layer(config=NOISY, **options) -> TransformerEncoderLayer:
    return TransformerEncoderLayer(DIM, HEADS, 16, dropout=0.0, batch_first=True, config=config, **options)


def _padding() -> torch.Tensor:
    padding = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    padding[0, -2:] = True
    return padding


X = torch.randn(BATCH, LENGTH, DIM, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("options", [{}, {"norm_first": True}, {"bias": False}, {"activation": "gelu"}])
@pytest.mark.parametrize("grad", [True, False])
def test_the_encoder_layer_in_eval_mode_is_torchs_bit_for_bit(options, grad):
    stock = nn.TransformerEncoderLayer(DIM, HEADS, 16, dropout=0.0, batch_first=True, **options).eval()
    ours = _encoder_layer(**options).eval()
    ours.load_state_dict(stock.state_dict(), strict=True)
    with torch.set_grad_enabled(grad):
        assert torch.equal(ours(X), stock(X))
        kept = ~_padding()  # the fused path leaves padded places undefined
        masked = ours(X, src_key_padding_mask=_padding()), stock(X, src_key_padding_mask=_padding())
        assert torch.equal(masked[0][kept], masked[1][kept])


@pytest.mark.parametrize("norm_first", [False, True])
def test_the_decoder_layer_in_eval_mode_is_torchs_bit_for_bit(norm_first):
    stock = nn.TransformerDecoderLayer(DIM, HEADS, 16, dropout=0.0, batch_first=True, norm_first=norm_first).eval()
    ours = TransformerDecoderLayer(DIM, HEADS, 16, dropout=0.0, batch_first=True, norm_first=norm_first, config=NOISY).eval()
    ours.load_state_dict(stock.state_dict(), strict=True)
    memory, causal = torch.randn(BATCH, MEMORY, DIM), nn.Transformer.generate_square_subsequent_mask(LENGTH)
    assert torch.equal(
        ours(X, memory, tgt_mask=causal, tgt_is_causal=True), stock(X, memory, tgt_mask=causal, tgt_is_causal=True)
    )
    with record_kl(ours) as kl:
        ours.train()(X, memory, tgt_mask=causal)
    assert list(kl.per_layer()) == ["self_attn", "multihead_attn"]


def test_layers_in_train_mode_with_vanishing_noise_are_torchs():
    causal, memory = nn.Transformer.generate_square_subsequent_mask(LENGTH), torch.randn(BATCH, MEMORY, DIM)
    encoder = nn.TransformerEncoderLayer(DIM, HEADS, 16, dropout=0.0, batch_first=True)
    decoder = nn.TransformerDecoderLayer(DIM, HEADS, 16, dropout=0.0, batch_first=True)
    our_encoder = _encoder_layer(QUIET)
    our_decoder = TransformerDecoderLayer(DIM, HEADS, 16, dropout=0.0, batch_first=True, config=QUIET)
    our_encoder.load_state_dict(encoder.state_dict())
    our_decoder.load_state_dict(decoder.state_dict())
    # float32 of the same products in another order
    torch.testing.assert_close(
        our_encoder(X, causal, is_causal=True), encoder(X, causal, is_causal=True), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(our_decoder(X, memory, causal), decoder(X, memory, causal), rtol=1e-4, atol=1e-5)


def _models() -> dict[str, nn.Module]:
    exchanged = nn.TransformerEncoderLayer(DIM, HEADS, 16, dropout=0.0, batch_first=True)
    exchanged.self_attn = MultiheadAttention(DIM, HEADS, batch_first=True, config=NOISY)
    mixed = nn.TransformerEncoder(nn.TransformerEncoderLayer(DIM, HEADS, 16, dropout=0.0, batch_first=True), 3)
    mixed.layers[1].self_attn = MultiheadAttention(DIM, HEADS, batch_first=True, config=NOISY)
    return {
        "our layer": _encoder_layer(),
        "stock layer, attention exchanged": exchanged,
        "nn.TransformerEncoder of ours": nn.TransformerEncoder(_encoder_layer(), 2),
        "nn.TransformerEncoder of exchanged": nn.TransformerEncoder(exchanged, 2),
        "stock first layer, ours second": mixed,
    }


MODELS = list(_models())


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_sampling_in_eval_mode_never_takes_the_fused_path(name, padded, grad):
    model = _models()[name].eval()
    mask = {"src_key_padding_mask": _padding()} if padded else {}
    kept = ~_padding() if padded else torch.ones(BATCH, LENGTH, dtype=torch.bool)
    with torch.set_grad_enabled(grad):
        before = model(X, **mask)[..., :LENGTH, :]
        with sampling(model):
            first, second = model(X, **mask), model(X, **mask)
        after = model(X, **mask)[..., :LENGTH, :]
    # every example and position sees other weights; nested tensors may come back shorter, never reordered
    assert bool((first - second).abs().amax(dim=-1)[kept[:, : first.shape[1]]].min() > 0.0)
    assert bool(first[kept[:, : first.shape[1]]].isfinite().all())
    assert torch.equal(before[kept], after[kept])


@pytest.mark.parametrize("name", MODELS)
def test_recording_in_eval_mode_never_takes_the_fused_path(name):
    model = _models()[name].eval()
    with torch.no_grad():
        expected = model(X, src_key_padding_mask=_padding())
        with record_kl() as kl:
            output = model(X, src_key_padding_mask=_padding())
    assert len(kl) == sum(isinstance(module, MultiheadAttention) for module in model.modules())
    kept = ~_padding()
    torch.testing.assert_close(output[kept], expected[kept], rtol=1e-4, atol=1e-5)


def test_a_nested_batch_gives_what_the_padded_one_gives():
    """A stock first layer turns a padded batch into a nested tensor, which ours then has to take."""
    model = _models()["stock first layer, ours second"].eval()
    model.layers[1].self_attn.config = QUIET
    plain = model(X, src_key_padding_mask=_padding())  # gradients on: neither fused nor nested
    seen = []
    handle = model.layers[1].self_attn.register_forward_pre_hook(lambda module, args: seen.append(args[0].is_nested))
    with torch.no_grad(), record_kl() as kl, sampling(model):
        output = model(X, src_key_padding_mask=_padding())
    handle.remove()
    assert seen == [True]
    kept = ~_padding()
    torch.testing.assert_close(output[kept], plain[kept], rtol=1e-4, atol=1e-5)
    with record_kl() as padded_kl, sampling(model):
        model(X, src_key_padding_mask=_padding())
    # padded queries count in the KL too, and hold zeros in the one case and the first layer's output in the other
    torch.testing.assert_close(kl.total(), padded_kl.total().detach(), rtol=1e-2, atol=0.0)


def test_the_constructor_keeps_device_dtype_and_options():
    layer = TransformerEncoderLayer(
        DIM, HEADS, 16, dropout=0.25, batch_first=True, bias=False, dtype=torch.float64, config=NOISY
    )
    attention = layer.self_attn
    assert isinstance(attention, MultiheadAttention)
    assert attention.dropout == 0.25
    assert attention.batch_first
    assert attention.in_proj_bias is None
    assert attention.bayes_prior.weight_in.dtype == torch.float64
    assert attention.config is NOISY


def test_no_warning_when_an_encoder_is_built_from_our_layer():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nn.TransformerEncoder(_encoder_layer(), 2)


def _backends(monkeypatch) -> list[str]:
    """Note which backend every sampled call takes."""
    taken, choose = [], dense.choose
    monkeypatch.setattr(dense, "choose", lambda *args: taken.append(choose(*args)) or taken[-1])
    return taken


@pytest.mark.parametrize("mask", ["padding", "future"])
def test_masks_that_torchs_encoder_turns_into_numbers_take_the_fused_backend(monkeypatch, mask):
    encoder = nn.TransformerEncoder(_encoder_layer(), num_layers=2, enable_nested_tensor=False)
    future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    given = {"src_key_padding_mask": _padding()} if mask == "padding" else {"mask": future}
    taken = _backends(monkeypatch)
    outputs = []
    for _ in range(2):
        torch.manual_seed(5)
        outputs.append(encoder(X, **given))
    assert taken == ["blocked"] * 4
    assert torch.equal(*outputs)
    floats = torch.zeros(BATCH, LENGTH).masked_fill(_padding(), -torch.inf)
    attention = encoder.layers[0].self_attn
    results = []
    for padding in (_padding(), floats):
        torch.manual_seed(5)
        results.append(attention(X, X, X, key_padding_mask=padding, need_weights=False)[0])
    assert torch.equal(*results)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("mask", ["padding", "future"])
def test_boolean_masks_of_our_layer_take_the_fused_backend_where_nobody_can_look_at_numbers(monkeypatch, mask, norm_first):
    """As in a recording of CUDA launches."""
    monkeypatch.setattr(multihead_arguments, "look_once", lambda *_: None)
    layer, taken = _encoder_layer(QUIET, norm_first=norm_first), _backends(monkeypatch)
    future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    given = {"src_key_padding_mask": _padding()} if mask == "padding" else {"src_mask": future}
    output = layer(X, **given)
    # torch's own forward pass, with numbers
    numbers = nn.TransformerEncoderLayer.forward(layer, X, **given)
    assert taken == ["blocked", "reference"]
    # float32 of the same products in another order
    torch.testing.assert_close(output, numbers, rtol=1e-4, atol=1e-5)


def test_numbers_that_add_something_are_added(monkeypatch):
    attention, taken = _encoder_layer().self_attn, _backends(monkeypatch)
    bias = torch.zeros(LENGTH, LENGTH)
    bias[1, 2] = 3.0
    attention(X, X, X, attn_mask=bias, need_weights=False)
    learnt = torch.zeros(LENGTH, LENGTH, requires_grad=True)
    attention(X, X, X, attn_mask=learnt, need_weights=False)[0].square().sum().backward()
    assert taken == ["reference"] * 2
    assert learnt.grad is not None
    assert learnt.grad.abs().sum() > 0
    # looked at again after a change
    bias.zero_()
    attention(X, X, X, attn_mask=bias, need_weights=False)
    bias[0, 0] = 1.0
    attention(X, X, X, attn_mask=bias, need_weights=False)
    assert taken[2:] == ["blocked", "reference"]
