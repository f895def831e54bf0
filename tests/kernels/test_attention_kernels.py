"""The Triton kernels against the reference with the same seed: output, KL and every gradient.

On a machine without a GPU they run in Triton's interpreter (`make test-kernels`), in float32 and float16: the
interpreter computes bfloat16 wrongly. On a GPU the same tests run in bfloat16 too, at larger sizes (`make test-gpu`).

The yardstick is plain torch in the same precision: the kernel's error against float64 may be at most twice that of the
reference formula computed in the inputs' own dtype.
"""

import pytest
import torch
from kernel_device import DEVICE, DTYPES, HAS_GPU, MARKS

import bayesattn as ba
from bayesattn.functional import attention
from bayesattn.ops.attention import launch, reference, weibull, weibull_node
from bayesattn.ops.attention import triton as fused
from bayesattn.ops.attention.masking import Allowed
from bayesattn.ops.common import draws
from bayesattn.ops.common.launch import LAUNCHES, Launch
from bayesattn.priors import ContextualPrior

pytestmark = MARKS
SEED = (77 << 40) + 12345


def make_mask(kind: str, b: int, h: int, m: int, n: int) -> torch.Tensor | None:
    if kind == "key padding":
        mask = torch.rand(b, 1, 1, n) > 0.3
        mask[-1] = False
    elif kind == "arbitrary":
        mask = torch.rand(b, h, m, n) > 0.4
        mask[0, 0, min(3, m - 1)] = False
    else:
        return None
    return mask.to(DEVICE)


def results_and_gradients(call, tensors, dtype, upstream):
    """Run `call` on copies of the tensors in `dtype`; return outputs and gradients of all of them."""
    # the prior, fourth, is never in low precision
    copies = [x.detach().to(dtype if i < 3 else x.dtype).requires_grad_() for i, x in enumerate(tensors)]
    outputs = [x for x in call(*copies) if x is not None]
    gradients = torch.autograd.grad(outputs, copies, [g.to(o.dtype) for g, o in zip(upstream, outputs, strict=False)])
    return [x.detach().double() for x in (*outputs, *gradients)]


def relative_error(x: torch.Tensor, truth: torch.Tensor) -> float:
    # inputs and upstream gradients are of order 1; a gradient that cancels to 0 has no scale of its own
    return float((x - truth).norm() / (truth.norm() + 0.01 * truth.numel() ** 0.5))


def check(
    shape, config, mask_kind="none", is_causal=False, dtype=torch.float32, contiguous=True, dropout_p=0.0, window=None
):
    b, h, hk, m, n, d, dv = shape
    query, key, value = (torch.randn(b, x, y, z, device=DEVICE) for x, y, z in ((h, m, d), (hk, n, d), (hk, n, dv)))
    tensors = [query, key, value]
    if config.prior_kind == "contextual":
        tensors.append(torch.randn(b, h, 1, n, dtype=torch.float64, device=DEVICE).log_softmax(-1))
    mask = make_mask(mask_kind, b, h, m, n)
    upstream = [torch.randn(b, h, m, dv, device=DEVICE), torch.randn(b, device=DEVICE)]

    def kernel(q, k, v, prior=None):
        if not contiguous:
            q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        prior = None if prior is None else prior.float()
        return attention(
            q, k, v, config=config, log_prior=prior, mask=mask, is_causal=is_causal, window=window, seed=SEED,
            backend="triton", need_kl=config.has_kl, dropout_p=dropout_p,
        )  # fmt: skip

    def plain(q, k, v, prior=None):
        # the reference, but its matrix products in the dtype of the inputs
        scores = ((q * torch.tensor(d**-0.5, dtype=q.dtype)) @ reference.expand_heads(k, h).transpose(-2, -1)).to(
            torch.promote_types(q.dtype, torch.float32)
        )
        dense = Allowed(mask, is_causal, (b, h, m, n), window).dense(q.device)
        weights = reference.sample_weights(scores, dense, SEED, config)
        weights = (reference.drop(weights, dropout_p, SEED) if dropout_p else weights).to(v.dtype)
        prior = None if prior is None else prior.to(scores.dtype)
        kl = reference.kl_from_scores(scores, prior, dense, config) if config.has_kl else None
        return weights @ reference.expand_heads(v, h), kl

    # the truth starts from the rounded inputs, so that only the arithmetic is judged
    rounded = [x.to(dtype) for x in tensors[:3]] + tensors[3:]
    truth = results_and_gradients(plain, rounded, torch.float64, upstream)
    yardstick = results_and_gradients(plain, rounded, dtype, upstream)
    before = sum(LAUNCHES.values())
    ours = results_and_gradients(kernel, rounded, dtype, upstream)
    assert sum(LAUNCHES.values()) >= before + 3, "the kernels did not run"
    for x, y, t in zip(ours, yardstick, truth, strict=True):
        assert torch.isfinite(x).all()
        if n == 1 or window == 1:
            # one key per row: its weight is exactly 1 in the plain formula, which leaves no error
            # to compare with; gradients cancel to 0 up to a rounding of each of the m summands
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(x, t, rtol=2 * eps, atol=m * eps)
        else:
            assert relative_error(x, t) <= 2.0 * relative_error(y, t) + 20 * torch.finfo(torch.float32).eps


WEIBULL = ba.AttentionConfig("BAM-WC", weibull_k=2.0, gamma_beta=0.3)


def set_passes(monkeypatch, in_one_pass: bool) -> None:
    for module in (fused, weibull):
        monkeypatch.setattr(module, "one_pass", lambda head_dim: in_one_pass)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [
        (2, 2, 1, 37, 63, 16, 16),
        (1, 4, 2, 70, 100, 20, 13),
        (2, 1, 1, 1, 33, 64, 64),
        (1, 2, 2, 65, 1, 48, 80),
        (1, 2, 1, 70, 131, 24, 40),
        (1, 2, 2, 67, 130, 80, 80),
    ],
)
@pytest.mark.parametrize("in_one_pass", [True, False])
def test_odd_shapes_and_grouped_heads(monkeypatch, shape, dtype, in_one_pass):
    set_passes(monkeypatch, in_one_pass)
    check(shape, WEIBULL, dtype=dtype)
    assert not in_one_pass or LAUNCHES["grad_key"] > 0


@pytest.mark.parametrize(("d", "dv"), [(20, 13), (24, 40), (48, 72)])
def test_kernels_get_rows_that_triton_reads_in_whole_vectors(monkeypatch, d, dv):
    call, read = Launch.__call__, []

    def noted(self, *pointers):
        if self.name in ("forward", "grad_key", "grad_query"):
            # query, key and value
            read.extend(pointers[:3])
        call(self, *pointers)

    monkeypatch.setattr(Launch, "__call__", noted)
    check((1, 2, 1, 33, 70, d, dv), WEIBULL, contiguous=False)
    assert len(read) >= 6
    for x in read:
        assert x.shape[-1] % launch.ROW_MULTIPLE == 0
        assert not any(stride % launch.ROW_MULTIPLE for stride in x.stride()[:-1])


@pytest.mark.parametrize("mask_kind", ["none", "key padding", "arbitrary"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("variant", ["BAM-WC", "BAM-WF", "BAM-LC", "BAM-LF", "BAM-NOKL"])
def test_every_variant_and_mask(monkeypatch, variant, is_causal, mask_kind):
    set_passes(monkeypatch, is_causal)
    config = ba.AttentionConfig(variant, weibull_k=3.0, gamma_beta=0.2, sigma_q=0.7, sigma_p=1.3, kl_reduction="sum")
    check((2, 2, 1, 41, 67, 16, 16), config, mask_kind, is_causal)


@pytest.mark.parametrize("preset", ["paper", "official-code", "default"])
@pytest.mark.parametrize("variant", ["BAM-WC", "BAM-LC"])
def test_every_preset(variant, preset):
    check((1, 2, 2, 33, 40, 16, 16), ba.AttentionConfig(variant, preset=preset, weibull_k=0.5, sigma_q=2.0))


@pytest.mark.parametrize("reduction", ["sum", "row_mean", "mean"])
@pytest.mark.parametrize("preset", ["paper", "default"])
@pytest.mark.parametrize(("variant", "is_causal", "window"), [("BAM-WC", True, 5), ("BAM-WF", False, None)])
def test_the_kl_of_padded_keys_in_one_node_for_every_convention(variant, preset, reduction, is_causal, window):
    before = LAUNCHES["weibull_kl"]
    config = ba.AttentionConfig(variant, preset=preset, weibull_k=2.0, gamma_beta=0.3, kl_reduction=reduction)
    check((2, 4, 2, 71, 67, 16, 16), config, "key padding", is_causal, window=window)
    assert LAUNCHES["weibull_kl"] == before + 1


# blocks of 64 rows: within a block, of one, across two, of several, longer than the sequence
@pytest.mark.parametrize(
    ("lengths", "window"),
    [*(((197, 197), window) for window in (None, 1, 37, 64, 65, 128, 150, 500)),
     *((lengths, window) for lengths in ((131, 263), (263, 67)) for window in (None, 1, 65, 150))],
)  # fmt: skip
def test_the_kl_below_the_diagonal_and_in_windows(window, lengths):
    before = LAUNCHES["weibull_kl"]
    check((1, 2, 1, *lengths, 16, 24), WEIBULL, is_causal=True, window=window)
    assert LAUNCHES["weibull_kl"] == before + 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask_kind", ["none", "key padding"])
@pytest.mark.parametrize("in_one_pass", [True, False])
def test_the_causal_kl_of_grouped_heads_in_every_type(monkeypatch, dtype, mask_kind, in_one_pass):
    set_passes(monkeypatch, in_one_pass)
    check((2, 2, 1, 139, 131, 16, 16), WEIBULL, mask_kind, is_causal=True, dtype=dtype)
    check((1, 2, 2, 139, 131, 16, 16), WEIBULL, mask_kind, is_causal=True, dtype=dtype, window=70)


def test_the_causal_kl_of_a_wide_head():
    # float16 has the tiles of a GPU
    check((1, 2, 1, 150, 260, 128, 72), WEIBULL, is_causal=True, dtype=torch.float16)
    check((1, 1, 1, 290, 290, 128, 128), WEIBULL, is_causal=True, dtype=torch.float16, window=131)


@pytest.mark.parametrize("variant", ["BAM-WC", "BAM-LC", "BAM-NOKL"])
@pytest.mark.parametrize("mask_kind", ["none", "key padding", "arbitrary"])
def test_windows_of_every_variant(variant, mask_kind):
    check((2, 2, 1, 71, 67, 16, 16), ba.AttentionConfig(variant), mask_kind, is_causal=True, window=9)


@pytest.mark.parametrize("beta", [1e-15, 1e-2, 3.0, 1e4])
def test_the_paper_s_rates(beta):
    check((1, 2, 2, 13, 17, 16, 16), ba.AttentionConfig("BAM-WC", gamma_beta=beta, weibull_k=1000.0))
    check((1, 2, 2, 13, 17, 16, 16), ba.AttentionConfig("BAM-WF", gamma_beta=beta, gamma_alpha=1e-15, weibull_k=1.0))


@pytest.mark.parametrize("prior_shape", [(1, 1), (2, 1), (1, 3)])
def test_a_shared_prior_gathers_its_gradient(prior_shape):
    query, key, value = (torch.randn(2, 3, 19, 16, device=DEVICE) for _ in range(3))
    logits = torch.randn(*prior_shape, 1, 19, device=DEVICE)
    gradients = []
    for backend in ("triton", "reference"):
        prior = logits.log_softmax(-1).requires_grad_()
        _, kl = attention(query, key, value, config=WEIBULL, log_prior=prior, seed=SEED, backend=backend)
        gradients += torch.autograd.grad(kl.sum(), prior)
    # sums of 2 · 3 · 19² terms of order 1 in float32
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-4)


def test_either_result_may_be_without_gradient():
    inputs = [torch.randn(1, 2, 9, 16, device=DEVICE, requires_grad=True) for _ in range(3)]
    prior = torch.randn(1, 2, 1, 9, device=DEVICE).log_softmax(-1)
    options = {"config": WEIBULL, "log_prior": prior, "seed": SEED}
    for pick in (0, 1):
        gradients = []
        for backend in ("triton", "reference"):
            result = attention(*inputs, backend=backend, **options)[pick].sum()
            gradients.append(torch.autograd.grad(result, inputs, allow_unused=True))
        for ours, theirs in zip(*gradients):
            theirs = torch.zeros_like(ours) if theirs is None else theirs
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_non_contiguous_inputs():
    check((2, 2, 2, 34, 45, 16, 16), WEIBULL, contiguous=False)


@pytest.mark.skipif(not HAS_GPU, reason="too large for the interpreter")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 2, 1, 1000, 1000, 64, 64), (2, 2, 2, 511, 1537, 128, 128), (1, 1, 1, 300, 200, 256, 256)]
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_large_shapes(shape, dtype, is_causal):
    check(shape, WEIBULL, dtype=dtype, is_causal=is_causal)


@pytest.mark.skipif(not HAS_GPU, reason="too many heads for the interpreter")
def test_more_heads_than_a_grid_s_second_axis_has_room_for():
    config, shape = ba.AttentionConfig("BAM-WC"), (7000, 10, 8, 16)
    inputs = [torch.randn(shape, device=DEVICE, requires_grad=True) for _ in range(3)]
    prior = ContextualPrior(16, 10, config).to(DEVICE)
    results = []
    for first in (0, 6990):
        part = [x[first:] for x in inputs]
        seeds = torch.arange(7000, device=DEVICE)[first:]
        output, kl = attention(*part, config=config, log_prior=prior(part[1]), seed=seeds, backend="triton")
        gradients = torch.autograd.grad(output.square().sum() + kl.sum(), inputs)
        results.append([output[-10:], kl[-10:], *(x[-10:] for x in gradients)])
    # the last examples alone, with the same noise
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("m", "n", "is_causal", "window"), [(7, 5, False, None), (7, 5, True, None), (5, 7, True, 3)])
def test_the_grid_has_every_block_of_every_head_on_one_axis(m, n, is_causal, window):
    query = launch.Layout((7000, 10, m, 16), (160 * m, 16 * m, 16, 1), torch.float32)
    key = launch.Layout((7000, 10, n, 16), (160 * n, 16 * n, 16, 1), torch.float32)
    band, noise = launch.Band(is_causal, window), launch.Noise(True, 1.0, 0.0, False)
    forward = launch.forward_launch(query, key, key, None, None, noise, 0.25, band, True)
    backward = launch.gradient_launches(
        query, key, key, None, None, query, (0, 0), noise, 0.25, band, True, 0, False, (1, 1, 1)
    )
    for found in (forward, *backward):
        assert found.grid == (70_000, 1, 1)
    assert launch.grid_of(129, 64, 70_000) == (210_000,)


def test_outputs_and_gradients_put_queries_before_heads():
    inputs = [torch.randn(2, 5, 3, 16, device=DEVICE).transpose(1, 2).requires_grad_() for _ in range(3)]
    prior = torch.randn(2, 3, 1, 5, device=DEVICE).log_softmax(-1)
    output, kl = attention(*inputs, config=WEIBULL, log_prior=prior, seed=SEED, backend="triton")
    assert output.transpose(1, 2).is_contiguous()
    assert output.grad_fn is kl.grad_fn
    _, grad_key, grad_value = torch.autograd.grad(output.sum() + kl.sum(), inputs)
    assert grad_key.transpose(1, 2).is_contiguous()
    assert grad_value.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("in_one_pass", [True, False])
def test_gradients_have_the_order_of_their_inputs(monkeypatch, in_one_pass):
    set_passes(monkeypatch, in_one_pass)
    rows_first = [torch.randn(2, 5, 3, 16, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)]
    mixed = [rows_first[0].contiguous(), rows_first[1], rows_first[2].contiguous()]
    found = []
    for inputs in ([x.contiguous() for x in rows_first], rows_first, mixed):
        leaves = [x.requires_grad_() for x in inputs]
        output, _ = attention(*leaves, config=WEIBULL, seed=SEED, backend="triton", need_kl=False)
        found.append(torch.autograd.grad(output.square().sum(), leaves))
        assert [x.stride() for x in found[-1]] == [x.stride() for x in leaves]
    for others in found[1:]:
        for x, y in zip(found[0], others, strict=True):
            torch.testing.assert_close(x, y)


def test_outputs_are_fully_written(poisoned):
    check((1, 2, 1, 37, 45, 16, 16), WEIBULL, "arbitrary")
    check((1, 2, 1, 37, 45, 16, 16), ba.AttentionConfig("BAM-LC"), "key padding", is_causal=True)
    check((1, 2, 1, 137, 145, 16, 16), WEIBULL, "key padding", is_causal=True, window=70)
    check((1, 2, 1, 145, 137, 16, 16), WEIBULL)


def test_one_seed_per_example_does_not_depend_on_the_place_in_the_batch():
    query, key, value = (torch.randn(3, 2, 9, 16, device=DEVICE) for _ in range(3))
    config = ba.AttentionConfig("BAM-NOKL", weibull_k=1.0)
    seeds = torch.tensor([5, 6, 7], device=DEVICE)
    options = {"config": config, "backend": "triton", "need_kl": False}
    together, _ = attention(query, key, value, seed=seeds, **options)
    alone, _ = attention(query[1:2], key[1:2], value[1:2], seed=seeds[1:2], **options)
    torch.testing.assert_close(together[1:2], alone, rtol=0.0, atol=0.0)


def test_extreme_scores_stay_finite():
    query = torch.full((1, 1, 5, 16), 50.0, device=DEVICE, requires_grad=True)
    key = torch.randn(1, 1, 7, 16, device=DEVICE) * 50.0
    for variant in ("BAM-WF", "BAM-LF"):
        config = ba.AttentionConfig(variant, preset="paper", gamma_beta=1e-15, gamma_alpha=1e-15, sigma_p=1e15)
        output, kl = attention(query, key, key, config=config, seed=1, backend="triton")
        (gradient,) = torch.autograd.grad(output.sum() + kl.sum(), query)
        assert torch.isfinite(output).all()
        assert torch.isfinite(kl).all()
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("in_one_pass", [True, False])
@pytest.mark.parametrize("kl_weight", [1.0, 30.0])
@pytest.mark.parametrize("variant", ["BAM-WF", "BAM-LF"])
def test_float16_gradients_saturate_instead_of_overflowing(monkeypatch, variant, kl_weight, in_one_pass):
    """True gradients of up to 1e8, and of a score up to 6e5 at the larger weight; float16 ends at 65504."""
    monkeypatch.setattr(fused, "one_pass", lambda head_dim: in_one_pass)
    query = (60.0 * torch.randn(1, 2, 37, 16, device=DEVICE)).half().requires_grad_()
    key, value = ((60.0 * torch.randn(1, 1, 41, 16, device=DEVICE)).half().requires_grad_() for _ in range(2))
    config = ba.AttentionConfig(
        variant, preset="paper", gamma_beta=1.0, gamma_alpha=1.0, sigma_p=1.0, sigma_q=1e-3, weibull_k=1e3
    )
    gradients = []
    for backend in ("triton", "reference"):
        output, kl = attention(query, key, value, config=config, seed=SEED, backend=backend)
        gradients.append(torch.autograd.grad(kl_weight * kl.sum() + output.float().sum(), (query, key, value)))
    for ours, truth in zip(*gradients, strict=True):
        assert torch.isfinite(ours).all()
        if kl_weight == 1.0:
            # beyond, the gradient of a score itself saturates on its way into the tensor cores
            saturated = truth.abs() == 65504.0
            assert torch.equal(ours[saturated], truth[saturated])
    assert any(bool((truth.abs() == 65504.0).any()) for truth in gradients[1])


def test_operators_pass_opcheck():
    tensors = [torch.randn(1, 2, 5, 16, device=DEVICE, requires_grad=True) for _ in range(3)]
    seed = torch.tensor(3, device=DEVICE)
    options = (None, None, seed, True, 0.5, 0.25, 0.1, True, 3, True, True)
    torch.library.opcheck(fused.attention_forward, (*tensors, *options))


@pytest.mark.parametrize("prior_kind", ["fixed", "given", "network"])
@pytest.mark.parametrize("has_valid", [True, False])
def test_the_one_node_passes_opcheck(prior_kind, has_valid):
    # a network needs a key head per query head
    key_heads, prior, weights = 2 if prior_kind == "network" else 1, None, [None] * 4
    tensors = [torch.randn(2, heads, 5, 16, device=DEVICE, requires_grad=True) for heads in (2, key_heads, key_heads)]
    if prior_kind == "given":
        prior = torch.randn(2, 2, 1, 5, device=DEVICE).log_softmax(-1).requires_grad_()
    elif prior_kind == "network":
        shapes = [(1, 16, 3), (1, 1, 3), (1, 3, 1), (1, 1, 1)]
        weights = [torch.randn(shape, device=DEVICE, requires_grad=True) for shape in shapes]
    valid = torch.tensor([[True] * 5, [True] * 3 + [False] * 2], device=DEVICE)[:, None, None] if has_valid else None
    options = ([2.0, 0.3, 0.5, 0.5, 0.25, 0.1], "beta_psi log_softmax row_mean", has_valid, 3 if has_valid else None)
    inputs = (*tensors, prior, *weights, prior_kind == "network", valid, torch.tensor(3, device=DEVICE))
    torch.library.opcheck(weibull_node.weibull_forward, (*inputs, *options))


@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize("variant", ["BAM-WC", "BAM-WF", "BAM-LC"])
def test_compiles_into_one_graph_with_the_same_results(variant, has_padding):
    config = ba.AttentionConfig(variant)
    inputs = [torch.randn(2, heads, 9, 16, device=DEVICE, requires_grad=True) for heads in (4, 2, 2)]
    # shared by the heads
    prior = torch.randn(2, 1, 1, 9, device=DEVICE).log_softmax(-1).requires_grad_() if variant != "BAM-WF" else None
    mask = torch.arange(9, device=DEVICE).expand(2, 1, 1, 9) < torch.tensor([9, 5], device=DEVICE)[:, None, None, None]
    leaves = [*inputs, *([] if prior is None else [prior])]

    def loss(query, key, value, prior):
        options = {"config": config, "log_prior": prior, "mask": mask if has_padding else None, "seed": SEED}
        output, kl = attention(query, key, value, **options, backend="triton")
        return output.square().sum() + kl.sum()

    expected = torch.autograd.grad(loss(*inputs, prior), leaves)
    compiled = torch.compile(loss, fullgraph=True, backend="inductor" if HAS_GPU else "aot_eager")
    before = LAUNCHES["weibull_kl"]
    found = torch.autograd.grad(compiled(*inputs, prior), leaves)
    assert LAUNCHES["weibull_kl"] == before + (variant != "BAM-LC")
    for ours, theirs in zip(found, expected, strict=True):
        # the compiler may order sums differently
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"bias": torch.zeros(5, 5)}, "no additive bias"),
        ({"scale": -1.0}, "scale is -1.0"),
        ({"config": ba.AttentionConfig("BAM-WF", weibull_k=0.1)}, "weibull_k is 0.1"),
        ({"config": ba.AttentionConfig("BAM-LF", sigma_q=9.0)}, "sigma_q is 9.0"),
    ],
)
def test_refuses_by_name_what_it_cannot_do(change, reason):
    query = torch.randn(1, 2, 5, 16, device=DEVICE)
    options = {"config": ba.AttentionConfig("BAM-WF"), **change}
    if "bias" in options:
        options["bias"] = options["bias"].to(DEVICE)
    with pytest.raises(ValueError, match=f"backend 'triton' cannot be used here: .*{reason}"):
        attention(query, query, query, backend="triton", **options)
    attention(query, query, query, backend="auto", **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("variant", "mask_kind", "is_causal"),
    [
        ("BAM-WC", "none", False),
        ("BAM-WC", "key padding", False),
        ("BAM-WF", "arbitrary", False),
        ("BAM-LC", "none", True),
        ("BAM-NOKL", "none", False),
    ],
)
def test_dropout_is_that_of_the_reference(variant, mask_kind, is_causal, dtype):
    config = ba.AttentionConfig(variant)
    check((2, 2, 1, 37, 67, 16, 24), config, mask_kind, is_causal=is_causal, dtype=dtype, dropout_p=0.3)


def test_dropout_of_a_wide_head_takes_two_passes_with_the_same_bits():
    check((1, 2, 1, 37, 45, 128, 72), ba.AttentionConfig("BAM-WC"), dropout_p=0.1)


def test_everything_may_be_dropped():
    query, p = torch.randn(1, 2, 5, 16, device=DEVICE), 1.0 - 2.0**-20  # nearer to 1 than to the grid's last step
    output, _ = attention(query, query, query, config=ba.AttentionConfig("BAM-WF"), dropout_p=p, backend="triton")
    assert not output.any()


def test_kernels_draw_the_specified_noise():
    assert draws.ROUNDS.value == ba.noise.PHILOX_ROUNDS
