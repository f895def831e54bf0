"""The kernels of squared score gradients against written-out attention in float64, for everything that attention has.

The yardstick is the same formula in the dtype of the inputs: the kernels may be at most twice as far from float64.
"""

from unittest import mock

import pytest
import torch
from kernel_device import DEVICE, DTYPES, MARKS, needs_gpu

from bayesattn.ops.attention import score_gradients, score_gradients_triton
from bayesattn.ops.attention.masking import masked_softmax
from bayesattn.ops.common.launch import LAUNCHES

pytestmark = MARKS


def written_out(grad, query, key, value, *, mask=None, bias=None, is_causal=False, scale, softcap=None):
    """Return output, log-sum-exp and Σ_i dΦ_ij², with products in the dtype of the inputs."""
    groups = query.shape[1] // key.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = (query @ key.transpose(-2, -1)).to(wide) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.to(wide)
    if is_causal:
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        mask = causal if mask is None else mask & causal
    weights = masked_softmax(scores, mask)
    output = weights.to(value.dtype) @ value
    products = (grad @ value.transpose(-2, -1)).to(wide)
    delta = (output.to(wide) * grad.to(wide)).sum(-1, keepdim=True)
    squares = (weights * (products - delta)).square().sum(-2)
    allowed = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
    return output, allowed.logsumexp(-1), squares


def relative_error(x: torch.Tensor, truth: torch.Tensor) -> float:
    return float((x.double() - truth).norm() / (truth.norm() + 1e-30))


def check(shape, dtype=torch.float32, *, contiguous=True, **options):
    b, h, hk, m, n, d, dv = shape
    torch.manual_seed(0)
    shapes = ((b, h, m, dv), (b, h, m, d), (b, hk, n, d), (b, hk, n, dv))
    tensors = [torch.randn(x, device=DEVICE).to(dtype) for x in shapes]
    if not contiguous:
        tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    options = {"scale": d**-0.5, **options}
    options = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    _, lse, truth = written_out(*(x.double() for x in tensors), **options)
    output, _, yardstick = written_out(*tensors, **options)
    found = None
    # the log-sum-exp computed by the kernels; given, with δ formed by the one launch; given, with a launch for δ
    for given, most_keys, launches in ((None, 1024, (1, 1)), (lse.float(), n, (0, 1)), (lse.float(), n - 1, (1, 1))):
        before = LAUNCHES["score_rows"], LAUNCHES["score_columns"]
        with mock.patch.object(score_gradients_triton, "MOST_KEYS", most_keys):
            found = score_gradients.squared_score_gradients(*tensors, output, given, **options)
        ran = LAUNCHES["score_rows"] - before[0], LAUNCHES["score_columns"] - before[1]
        assert ran == launches, "other kernels ran"
        assert found.dtype == torch.float32
        assert found.shape == (b, h, n)
        assert torch.isfinite(found).all()
        # a given log-sum-exp was rounded elsewhere than the scores, so their roundings do not cancel
        exponent = 1.0 if given is None else float(lse[lse.isfinite()].abs().max())
        allowance = 20 * torch.finfo(torch.float32).eps * max(exponent, 1.0)
        assert relative_error(found, truth) <= 2.0 * relative_error(yardstick, truth) + allowance
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [
        (2, 3, 3, 37, 61, 16, 16),
        (1, 4, 2, 71, 101, 20, 13),
        (2, 6, 1, 67, 5, 8, 8),
        (1, 1, 1, 1, 67, 64, 64),
        (1, 2, 2, 64, 128, 64, 64),
        (1, 2, 2, 13, 17, 96, 72),
        (1, 2, 1, 19, 11, 256, 256),
    ],
)
def test_odd_shapes_and_grouped_heads(shape, dtype, poisoned):
    check(shape, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(67, 67), (37, 71), (71, 37)])
def test_causal(sizes, dtype, poisoned):
    found = check((2, 2, 2, *sizes, 16, 16), dtype, is_causal=True)
    assert (found[..., sizes[0] :] == 0).all()


def window(m, n, reach):
    distance = torch.arange(m)[:, None] - torch.arange(n)
    return (distance >= 0) & (distance < reach)


def padding(b, n):
    return (torch.arange(n) < torch.tensor([n - 7 * i for i in range(b)])[:, None])[:, None, None, :]


MASKS = {
    "padding": lambda b, h, m, n: padding(b, n),
    "padding of every query": lambda b, h, m, n: padding(b, n).expand(b, 1, m, n),
    "window": lambda b, h, m, n: window(m, n, 5)[None, None],
    "window, two axes": lambda b, h, m, n: window(m, n, 5),
    "window and padding": lambda b, h, m, n: window(m, n, 5) & padding(b, n),
    "arbitrary, by head": lambda b, h, m, n: torch.rand(b, h, m, n) > 0.4,
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_masks(name, is_causal, poisoned):
    shape = (2, 2, 1, 67, 71, 16, 16)
    check(shape, mask=MASKS[name](2, 2, 67, 71), is_causal=is_causal)


def test_rows_without_keys_give_nothing(poisoned):
    mask = torch.rand(2, 1, 37, 41) > 0.3
    mask[0, 0, 3] = False
    mask[1] = False
    found = check((2, 2, 2, 37, 41, 16, 16), mask=mask)
    assert (found[1] == 0).all()
    assert (found[0] > 0).any()


BIASES = {
    "full": (2, 4, 37, 41),
    "by head": (1, 4, 37, 41),
    "by example": (2, 1, 1, 41),
    "one": (37, 41),
}


@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", BIASES)
def test_biases(name, bias_dtype, poisoned):
    bias = torch.randn(BIASES[name]).to(bias_dtype)
    check((2, 4, 2, 37, 41, 16, 16), bias=bias)
    check((2, 4, 2, 37, 41, 16, 16), bias=bias.expand(2, 4, 37, 41), is_causal=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [0.7, 50.0])
def test_soft_caps(softcap, dtype, poisoned):
    check((1, 2, 1, 37, 41, 16, 16), dtype, softcap=softcap, bias=torch.randn(2, 37, 41), scale=3.0)


def test_strided_inputs_and_large_scores(poisoned):
    check((2, 4, 2, 37, 41, 24, 24), contiguous=False, scale=20.0)


def test_no_queries():
    x = torch.zeros(1, 2, 0, 16, device=DEVICE)
    y = torch.zeros(1, 2, 5, 16, device=DEVICE)
    assert (score_gradients.squared_score_gradients(x, x, y, y, x, scale=1.0) == 0).all()


def test_what_the_kernels_cannot_do_is_named_and_computed_by_torch():
    x = torch.randn(1, 1, 3, 16, device=DEVICE)
    assert score_gradients.why_not_kernel(x, x, x) == ""
    assert "float64" in score_gradients.why_not_kernel(x.double(), x.double(), x.double())
    wide = torch.randn(1, 1, 3, 257, device=DEVICE)
    assert "257, above 256" in score_gradients.why_not_kernel(wide, wide, x)
    assert "no keys" in score_gradients.why_not_kernel(x, x[:, :, :0], x[:, :, :0])
    before = LAUNCHES["score_columns"]
    output, _, truth = written_out(x.double(), wide.double(), wide.double(), x.double(), scale=0.1)
    found = score_gradients.squared_score_gradients(x, wide, wide, x, output.float(), scale=0.1)
    assert torch.allclose(found.double(), truth, rtol=1e-4)
    assert LAUNCHES["score_columns"] == before


def test_a_model_runs_through_them():
    hf = pytest.importorskip("transformers")

    import bayesattn as ba

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 50}
    model = hf.BertForSequenceClassification(hf.BertConfig(**sizes, num_labels=3, initializer_range=0.5)).eval().to(DEVICE)
    inputs = {
        "input_ids": torch.randint(5, 50, (3, 13)),
        "attention_mask": torch.arange(13) < torch.tensor([[13], [9], [4]]),
    }
    inputs = {name: x.long().to(DEVICE) for name, x in inputs.items()}
    before = LAUNCHES["score_columns"]
    found = ba.uncertainty(model, inputs)
    assert LAUNCHES["score_columns"] == before + 2
    exact = ba.uncertainty(model.double(), inputs)
    assert LAUNCHES["score_columns"] == before + 2
    assert torch.allclose(found.std.double(), exact.std, rtol=1e-4)
    assert (found.by_token[2, 4:] == 0).all()


@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes_of_a_real_model(dtype):
    check((4, 12, 12, 512, 512, 64, 64), dtype)
    check((4, 12, 12, 509, 509, 64, 64), dtype, mask=padding(4, 509))
    check((2, 8, 2, 1021, 1021, 128, 128), dtype, is_causal=True)


BACKENDS = {
    "FLASH_ATTENTION": {},
    "EFFICIENT_ATTENTION": {"attn_mask": padding(2, 509).expand(2, 1, 509, 509)},
    "CUDNN_ATTENTION": {},
}


@needs_gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_fused_attention_keeps_its_log_sum_exp(backend):
    options = {name: x.to(DEVICE) for name, x in BACKENDS[backend].items()}
    query, key, value = (torch.randn(2, 3, 509, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    query.requires_grad_()
    with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend)):
        output = torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)
    kept = score_gradients.kept_log_sum_exp(output.transpose(1, 2).contiguous(), (2, 3, 509))
    _, truth, _ = written_out(
        *(x.detach().double() for x in (query, query, key, value)), mask=options.get("attn_mask"), scale=0.125
    )
    assert torch.allclose(kept.double(), truth, atol=1e-3)


@needs_gpu
def test_torch_alone_multiplies_half_precision_as_it_is():
    tensors = [torch.randn(2, 3, 71, 64, device=DEVICE).bfloat16() for _ in range(4)]
    options = {"mask": padding(2, 71).to(DEVICE), "scale": 0.11}
    truth = written_out(*(x.double() for x in tensors), **options)[-1]
    found = score_gradients._in_blocks(*tensors, bias=None, is_causal=False, softcap=None, **options)
    assert relative_error(found, truth) < 0.01


@needs_gpu
def test_memory_grows_with_the_length_and_not_with_its_square():
    x = torch.randn(1, 2, 65_536, 64, device=DEVICE, dtype=torch.float16)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    score_gradients.squared_score_gradients(x, x, x, x, x, scale=0.125)
    assert torch.cuda.max_memory_allocated() - before < 16 * 2**20
