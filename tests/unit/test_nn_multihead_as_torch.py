"""What users of torch's attention module rely on, asked of ours on each of its paths, and of no other code.

`test_nn_multihead.py` compares with torch's module.
"""

import contextlib
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bayesattn as ba
from bayesattn import sampling
from bayesattn.nn import MultiheadAttention

EMBED, HEADS, BATCH, QUERIES, KEYS = 12, 4, 3, 5, 7
PATHS = ("soft, eval", "BAM-WC, eval", "BAM-WC, sampling", "BAM-WC, training")
every_path = pytest.mark.parametrize("path", PATHS)
sampled = pytest.mark.parametrize("path", PATHS[2:])


@contextlib.contextmanager
def _on(path: str, dtype=torch.float64, **options):
    variant, mode = path.split(", ")
    # the noise of this shape is below the rounding of float64
    config = ba.AttentionConfig(variant, **({} if variant == "soft" else {"weibull_k": 1e15}))
    module = MultiheadAttention(EMBED, HEADS, batch_first=True, dtype=dtype, config=config, **options)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.5)
    module.train(mode == "training")
    with sampling(module) if mode == "sampling" else contextlib.nullcontext():
        yield module


def _inputs(options: dict, dtype=torch.float64) -> list[Tensor]:
    widths = (EMBED, options.get("kdim", EMBED), options.get("vdim", EMBED))
    return [torch.randn(BATCH, n, width, dtype=dtype) for n, width in zip((QUERIES, KEYS, KEYS), widths, strict=True)]


def _by_hand(module: MultiheadAttention, inputs: list[Tensor], hidden: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Attention in numpy, one example and head at a time; `hidden` is True where a query may not look."""
    state = {name: value.double().numpy() for name, value in module.state_dict().items()}
    if "in_proj_weight" in state:
        projections = np.split(state["in_proj_weight"], 3)
    else:
        projections = [state[f"{name}_proj_weight"] for name in "qkv"]
    shifts = np.split(state.get("in_proj_bias", np.zeros(3 * EMBED)), 3)
    size = EMBED // HEADS
    outputs, weights = np.zeros((BATCH, QUERIES, EMBED)), []
    for i in range(BATCH):
        q, k, v = (x[i].double().numpy() @ w.T + b for x, w, b in zip(inputs, projections, shifts, strict=True))
        seen = ~hidden[i].numpy()
        extra = [(state["bias_k"][0], state["bias_v"][0])] if "bias_k" in state else []
        extra += [(np.zeros((1, EMBED)),) * 2] if module.add_zero_attn else []
        for more_k, more_v in extra:
            k, v = np.concatenate([k, more_k]), np.concatenate([v, more_v])
            seen = np.concatenate([seen, np.ones((QUERIES, 1), dtype=bool)], axis=1)
        for head in range(HEADS):
            part = slice(head * size, (head + 1) * size)
            odds = np.exp(q[:, part] @ k[:, part].T / math.sqrt(size)) * seen
            weights.append(odds / odds.sum(axis=1, keepdims=True))
            outputs[i, :, part] = weights[-1] @ v[:, part]
    output = outputs @ state["out_proj.weight"].T + state.get("out_proj.bias", 0.0)
    return output, np.stack(weights).reshape(BATCH, HEADS, QUERIES, -1)


OPTIONS = {
    "plain": {},
    "no bias": {"bias": False},
    "other widths": {"kdim": 10, "vdim": 8},
    "learned key": {"add_bias_kv": True},
    "zero key": {"add_zero_attn": True},
    "both keys, other widths": {"kdim": 10, "vdim": 8, "add_bias_kv": True, "add_zero_attn": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@every_path
def test_output_and_weights_are_those_of_the_definition(path, options):
    inputs = _inputs(options)
    padding, future = torch.zeros(BATCH, KEYS, dtype=torch.bool), torch.ones(QUERIES, KEYS, dtype=torch.bool).triu(1)
    padding[1, -3:] = True
    with _on(path, **options) as module:
        expected, expected_weights = _by_hand(module, inputs, padding[:, None] | future)
        masks = {"key_padding_mask": padding, "attn_mask": future}
        output, weights = module(*inputs, **masks, average_attn_weights=False)
        _, averaged = module(*inputs, **masks)
        alone, nothing = module(*inputs, **masks, need_weights=False)
    assert nothing is None
    for ours, truth in ((output, expected), (alone, expected), (weights, expected_weights)):
        np.testing.assert_allclose(ours.detach().numpy(), truth, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(averaged.detach().numpy(), expected_weights.mean(axis=1), rtol=1e-9, atol=1e-11)


@every_path
def test_a_mask_of_every_head_acts_as_each_of_its_masks_alone(path):
    inputs, mask = _inputs({}), torch.rand(BATCH * HEADS, QUERIES, KEYS) < 0.4
    mask[..., 0] = False
    with _on(path) as module:
        _, together = module(*inputs, attn_mask=mask, average_attn_weights=False)
        for i, head in ((0, 1), (1, 3), (2, 0)):
            one = [x[i : i + 1] for x in inputs]
            _, alone = module(*one, attn_mask=mask[i * HEADS + head], average_attn_weights=False)
            torch.testing.assert_close(together[i, head], alone[0, head])


@every_path
def test_one_example_needs_no_batch(path):
    inputs, padding = _inputs({}), torch.zeros(KEYS, dtype=torch.bool)
    padding[-2:] = True
    with _on(path) as module:
        together = module(*inputs, key_padding_mask=padding.expand(BATCH, -1))
        alone = module(*(x[1] for x in inputs), key_padding_mask=padding)
    for ours, truth in zip(alone, together, strict=True):
        torch.testing.assert_close(ours, truth[1])


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@every_path
def test_results_have_the_type_of_the_module(path, dtype, need_weights):
    with _on(path, dtype) as module:
        results = module(*_inputs({}, dtype), need_weights=need_weights)
    assert all(x is None or (x.dtype == dtype and bool(x.isfinite().all())) for x in results)
    assert (results[1] is not None) == need_weights


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize(("dtype", "other"), [(torch.float16, torch.float32), (torch.float32, torch.float16)])
@every_path
def test_a_bias_may_have_another_type_than_the_weights(path, dtype, other, need_weights):
    inputs = _inputs({}, dtype)
    with _on(path, dtype) as module:
        expected, _ = module(*inputs, need_weights=need_weights)
        module.in_proj_bias = nn.Parameter(module.in_proj_bias.to(other))
        output, _ = module(*inputs, need_weights=need_weights)
    assert output.dtype == dtype
    # float16 has 11 bits; a bias added before or after rounding
    torch.testing.assert_close(output, expected, rtol=1e-2, atol=3e-2)


@pytest.mark.parametrize("name", ["query", "key", "value", "all"])
@every_path
def test_inputs_of_another_type_than_the_module_are_refused(path, name):
    inputs = dict(zip(("query", "key", "value"), _inputs({}), strict=True))
    inputs = {key: x.float() if name in (key, "all") else x for key, x in inputs.items()}
    with _on(path) as module, pytest.raises((RuntimeError, ValueError), match="dtype"):
        module(**inputs)


def _nested() -> tuple[Tensor, list[Tensor]]:
    parts = [torch.randn(n, EMBED, dtype=torch.float64) for n in (3, 7, 5)]
    return torch.nested.nested_tensor(parts), parts


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("path", PATHS[1:])
def test_a_nested_batch_is_its_examples(path, need_weights):
    nested, parts = _nested()
    with torch.no_grad(), _on(path) as module:
        output, weights = module(nested, nested, nested, need_weights=need_weights, average_attn_weights=False)
        for i, (part, got) in enumerate(zip(parts, output.unbind(), strict=True)):
            expected, expected_weights = module(part, part, part, average_attn_weights=False)
            torch.testing.assert_close(got, expected)
            if need_weights:
                n = len(part)
                torch.testing.assert_close(weights[i, :, :n, :n], expected_weights)
                assert not weights[i, :, n:].any()
                assert not weights[i, :, :, n:].any()
    assert (weights is not None) == need_weights


@pytest.mark.parametrize("case", ["cross", "nested key only", "padding", "mask", "jagged"])
@every_path
def test_nested_input_outside_of_self_attention_is_refused(path, case):
    nested, parts = _nested()
    inputs, masks = [nested] * 3, {}
    if case == "cross":
        inputs[1] = nested.clone()
    elif case == "nested key only":
        inputs[0] = nested.to_padded_tensor(0.0)
    elif case == "padding":
        masks = {"key_padding_mask": torch.zeros(3, 7, dtype=torch.bool)}
    elif case == "mask":
        masks = {"attn_mask": torch.zeros(7, 7, dtype=torch.bool)}
    else:
        inputs = [torch.nested.nested_tensor(parts, layout=torch.jagged)] * 3
    with torch.no_grad(), _on(path) as module, pytest.raises((AssertionError, ValueError), match=r"(?i)nested"):
        module(*inputs, **masks)


@sampled
def test_nested_input_needs_the_batch_first(path):
    nested, _ = _nested()
    with _on(path) as module:
        module.batch_first = False
        with pytest.raises(ValueError, match=r"nested tensors are supported only .* batch_first=True"):
            module(nested, nested, nested)


@every_path
def test_projections_of_their_own_take_the_place_of_the_packed_one(path):
    """As quantisation and pruning tools do it."""
    inputs = _inputs({})
    with _on(path) as module:
        expected = module(*inputs)
        for name, part in zip("qkv", module.in_proj_weight.detach().chunk(3), strict=True):
            setattr(module, f"{name}_proj_weight", nn.Parameter(part.clone()))
        module.in_proj_weight, module._qkv_same_embed_dim = None, False
        results = module(*inputs)
    for ours, truth in zip(results, expected, strict=True):
        torch.testing.assert_close(ours, truth)


@every_path
def test_a_missing_bias_is_a_bias_of_zero(path):
    inputs = _inputs({})
    with _on(path) as module:
        nn.init.zeros_(module.in_proj_bias)
        expected = module(*inputs)
        module.in_proj_bias = None
        results = module(*inputs)
    for ours, truth in zip(results, expected, strict=True):
        torch.testing.assert_close(ours, truth)


@every_path
def test_without_bias_no_parameter_is_one(path):
    with _on(path, bias=False) as module:
        names = {name for name, _ in module.named_parameters() if not name.startswith("bayes_prior")}
    assert names == {"in_proj_weight", "out_proj.weight"}


@pytest.mark.parametrize("embed_dim", [10, 0])
def test_a_width_that_heads_do_not_divide_is_refused(embed_dim):
    with pytest.raises((AssertionError, ValueError), match="embed_dim"):
        MultiheadAttention(embed_dim, HEADS, config=ba.AttentionConfig("BAM-WC"))
