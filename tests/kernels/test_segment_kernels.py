"""The Triton kernels on edges against the reference with the same seed: output, KL and every gradient.

On a machine without a GPU they run in Triton's interpreter (`make test-kernels`), where bfloat16 is computed wrongly. The
yardstick is the reference in float32: the kernel's error against float64 may be at most a few times that.
"""

import pytest
import torch
from kernel_device import DEVICE, DTYPES, HAS_GPU, MARKS

import bayesattn as ba
from bayesattn.functional import Edges, edge_attention
from bayesattn.ops.common.launch import LAUNCHES
from bayesattn.ops.segment import launch, weibull, weibull_node
from bayesattn.ops.segment import triton as fused

pytestmark = MARKS
SEED = (77 << 40) + 12345


def graph(sources: int, targets: int, count: int) -> Edges:
    """Random edges, some twice, one source and one target with none, a hub on both sides."""
    source, target = torch.randint(0, sources, (count,)), torch.randint(0, targets, (count,))
    source[: count // 3], target[count // 3 : 2 * count // 3] = 0, 1
    source[source == sources - 1], target[target == targets - 1] = 0, 0
    return Edges.sort(source.to(DEVICE), target.to(DEVICE), sources, targets)


def results_and_gradients(edges, tensors, config, scope, backend, dtype, upstream):
    scores, value, *prior = [x.detach().clone() for x in tensors]
    copies = [scores.to(torch.promote_types(dtype, torch.float32)), value.to(dtype), *prior]
    copies = [x.requires_grad_() for x in copies]
    prior = copies[2].to(copies[0].dtype) if prior else None
    result = edge_attention(
        copies[0], copies[1], edges, config=config, log_prior=prior, prior_scope=scope, seed=SEED, backend=backend,
        need_kl=config.has_kl,
    )  # fmt: skip
    outputs = [x for x in (result.output, result.kl) if x is not None]
    gradients = torch.autograd.grad(
        outputs, copies[: 3 if config.has_kl else 2], [g.to(o.dtype) for g, o in zip(upstream, outputs, strict=False)]
    )
    return [x.detach().double() for x in (*outputs, *gradients)]


def relative_error(x: torch.Tensor, truth: torch.Tensor) -> float:
    # inputs and upstream gradients are of order 1; a gradient that cancels to 0 has no scale of its own
    return float((x - truth).norm() / (truth.norm() + 0.01 * truth.numel() ** 0.5))


def check(sizes, config, scope="graph", dtype=torch.float32):
    sources, targets, count, h, d = sizes
    edges = graph(sources, targets, count)
    tensors = [torch.randn(count, h, device=DEVICE), torch.randn(sources, h, d, device=DEVICE).to(dtype)]
    if config.prior_kind == "contextual":
        logits = torch.randn(sources, h, dtype=torch.float64, device=DEVICE)
        logits[edges.out_degree == 0] = -torch.inf
        tensors.append(logits.log_softmax(0))
    upstream = [torch.randn(targets, h, d, device=DEVICE), torch.randn(1, device=DEVICE)]
    truth = results_and_gradients(edges, tensors, config, scope, "reference", torch.float64, upstream)
    yardstick = results_and_gradients(edges, tensors, config, scope, "reference", dtype, upstream)
    before = LAUNCHES.copy()
    ours = results_and_gradients(edges, tensors, config, scope, "triton", dtype, upstream)
    kernels = {"edge_forward": 1, "edge_prepare": 1, "edge_backward": 1}
    if config.has_kl and config.family == "weibull" and (len(tensors) == 2 or scope == "graph"):
        kernels |= {"edge_kl": 1} | ({"edge_alpha": 1} if len(tensors) == 3 else {})
    assert LAUNCHES - before == kernels
    for name, x, y, t in zip(("output", "kl", "scores", "value", "prior"), ours, yardstick, truth, strict=False):
        assert torch.isfinite(x).all(), name
        # twice the reference's error, and what its entry-wise sums save against sums over whole rows
        assert relative_error(x, t) <= 2.0 * relative_error(y, t) + 20 * torch.finfo(torch.float32).eps, name


WEIBULL = ba.AttentionConfig("BAM-WC", weibull_k=2.0, gamma_beta=0.3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes",
    [(11, 7, 53, 8, 8), (5, 13, 37, 3, 5), (9, 9, 41, 1, 7), (7, 5, 29, 2, 33), (6, 4, 31, 19, 3), (4, 5, 17, 12, 100)],
)
def test_odd_sizes_and_heads(sizes, dtype):
    check(sizes, WEIBULL, dtype=dtype)


@pytest.mark.parametrize("scope", ["graph", "neighborhood"])
@pytest.mark.parametrize("preset", ["paper", "official-code", "default"])
@pytest.mark.parametrize("variant", ["BAM-WC", "BAM-WF", "BAM-LC", "BAM-LF"])
def test_every_variant_preset_and_scope(variant, preset, scope):
    config = ba.AttentionConfig(variant, preset=preset, weibull_k=0.7, sigma_q=1.3, gamma_beta=0.4, sigma_p=1.7)
    check((11, 7, 53, 3, 4), config, scope)


@pytest.fixture
def small_blocks(monkeypatch):
    """Give the KL's kernels several programs on a small graph."""
    monkeypatch.setattr(weibull, "BLOCK", 32)
    weibull._plan.cache_clear()  # it has looked at the number
    yield
    weibull._plan.cache_clear()


@pytest.mark.parametrize("reduction", ["sum", "row_mean", "mean"])
@pytest.mark.parametrize("form", ["raw", "log_softmax"])
@pytest.mark.parametrize("alpha", ["psi", "beta_psi"])
def test_every_form_of_the_weibull_kl(form, alpha, reduction, small_blocks):
    config = ba.AttentionConfig("BAM-WC", gamma_beta=0.7, score_form=form, alpha_form=alpha, kl_reduction=reduction)
    check((11, 7, 53, 13, 2), config)


def chain_and_node(edges, tensors, config, upstream):
    """Return output, KL and gradients by torch operations on rows, and by the one node."""
    results = []
    for is_one_node in (False, True):
        leaves = [x.detach().clone().requires_grad_() for x in tensors]
        with pytest.MonkeyPatch.context() as patch:
            if not is_one_node:
                patch.setattr(weibull_node, "is_one_node", lambda *_: False)
            result = edge_attention(*leaves[:2], edges, config=config, log_prior=leaves[2], seed=SEED, backend="triton")
        gradients = torch.autograd.grad([result.output, result.kl], leaves, upstream)
        results.append([x.detach() for x in (result.output, result.kl, *gradients)])
    return results


@pytest.mark.parametrize("preset", ["paper", "default"])
def test_the_node_gives_what_the_torch_operations_on_rows_give(preset):
    edges = graph(11, 7, 53)
    tensors = [torch.randn(53, 3), torch.randn(11, 3, 4), torch.randn(11, 3).log_softmax(0)]
    upstream = [torch.randn(7, 3, 4, device=DEVICE), torch.tensor([-1.7], device=DEVICE)]
    config = ba.AttentionConfig("BAM-WC", preset=preset, gamma_beta=0.3)
    for chain, node in zip(*chain_and_node(edges, [x.to(DEVICE) for x in tensors], config, upstream), strict=True):
        # sums of some hundred float32 terms of order 1, in another order
        torch.testing.assert_close(node, chain, rtol=1e-5, atol=1e-5)


def test_inputs_and_upstream_gradients_of_any_strides():
    edges = graph(11, 7, 53)
    scores, value, prior = torch.randn(53, 3), torch.randn(11, 3, 4), torch.randn(11, 3).log_softmax(0)
    upstream = [torch.randn(7, 3, 4, device=DEVICE), torch.tensor([0.6], device=DEVICE)]
    dense = [x.to(DEVICE) for x in (scores, value, prior)]
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in dense]
    results = []
    for tensors, grads in ((dense, upstream), (strided, [upstream[0].mT.contiguous().mT, upstream[1].expand(1)])):
        leaves = [x.detach().requires_grad_() for x in tensors]
        result = edge_attention(*leaves[:2], edges, config=WEIBULL, log_prior=leaves[2], seed=SEED, backend="triton")
        results.append([result.output, result.kl, *torch.autograd.grad([result.output, result.kl], leaves, grads)])
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)


def test_a_prior_shared_by_the_heads_gets_the_sum_of_their_gradients():
    edges = graph(11, 7, 53)
    scores, value = torch.randn(53, 3, device=DEVICE), torch.randn(11, 3, 4, device=DEVICE)
    shared = torch.randn(11, 1, device=DEVICE).log_softmax(0).requires_grad_()
    own = shared.detach().expand(11, 3).contiguous().requires_grad_()
    kls = [
        edge_attention(scores, value, edges, config=WEIBULL, log_prior=x, seed=SEED, backend="triton").kl
        for x in (shared, own)
    ]
    gradient, by_head = torch.autograd.grad(sum(kls), [shared, own])
    assert torch.equal(*kls)
    torch.testing.assert_close(gradient, by_head.sum(dim=1, keepdim=True))


@pytest.mark.parametrize("missing", ["output", "kl"])
def test_output_or_kl_alone_can_be_differentiated(missing):
    edges = graph(11, 7, 53)
    tensors = [torch.randn(53, 3), torch.randn(11, 3, 4), torch.randn(11, 3).log_softmax(0)]
    results = []
    for backend in ("triton", "reference"):
        leaves = [x.to(DEVICE).requires_grad_() for x in tensors]
        result = edge_attention(*leaves[:2], edges, config=WEIBULL, log_prior=leaves[2], seed=SEED, backend=backend)
        loss = result.kl.sum() if missing == "output" else result.output.square().sum()
        results.append(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_two_runs_agree_to_the_last_bit():
    sources, targets, count = (997, 1009, 20011) if HAS_GPU else (11, 7, 53)
    # no hub: torch adds the runs of a long row in any order on a GPU
    edges = Edges.sort(*(torch.randint(0, n, (count,), device=DEVICE) for n in (sources, targets)), sources, targets)
    tensors = [torch.randn(count, 8), torch.randn(sources, 8, 8), torch.randn(sources, 8).log_softmax(0)]
    upstream = [torch.randn(targets, 8, 8, device=DEVICE), torch.ones(1, device=DEVICE)]
    runs = [chain_and_node(edges, [x.to(DEVICE) for x in tensors], WEIBULL, upstream)[1] for _ in range(2)]
    assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))


def test_without_a_kl_only_output_is_computed():
    check((11, 7, 53, 8, 4), ba.AttentionConfig("BAM-NOKL", weibull_k=0.1))


@pytest.mark.parametrize("scope", ["graph", "neighborhood"])
@pytest.mark.parametrize("variant", ["BAM-WC", "BAM-LC"])
def test_rows_split_into_runs_give_the_same(monkeypatch, variant, scope):
    monkeypatch.setattr(launch, "LONGEST_RUN", 5)
    check((11, 7, 53, 3, 4), ba.AttentionConfig(variant), scope)


@pytest.mark.parametrize("longest", [1, 4, 5, 100])
def test_runs_cover_every_edge_once(longest):
    edges = graph(11, 7, 53)
    for pointers in (edges.target_pointers, edges.source_pointers):
        begin, nodes = launch.split_rows(pointers, 53, longest)
        lengths = begin.diff()
        assert (lengths >= 0).all()
        assert int(lengths.max()) <= longest
        rows = torch.zeros(len(pointers) - 1, dtype=torch.int32, device=DEVICE).index_add(0, nodes, lengths)
        assert torch.equal(rows, pointers.diff())
        assert begin[0] == 0
        assert begin[-1] == 53


def test_outputs_are_fully_written(poisoned):
    check((11, 7, 53, 3, 5), WEIBULL)
    check((11, 7, 53, 3, 5), ba.AttentionConfig("BAM-LC"), "neighborhood")


@pytest.mark.parametrize("num_targets", [7, 0])
def test_a_graph_without_edges_gives_zero(num_targets, poisoned):
    none = torch.zeros(0, dtype=torch.long, device=DEVICE)
    edges = Edges.sort(none, none, 5, num_targets)
    value = torch.randn(5, 3, 4, device=DEVICE, requires_grad=True)
    prior = torch.zeros(5, 3, device=DEVICE, requires_grad=True)
    result = edge_attention(
        torch.zeros(0, 3, device=DEVICE), value, edges, config=WEIBULL, log_prior=prior, backend="triton"
    )
    (result.output.sum() + result.kl.sum()).backward()
    assert not result.output.any()
    assert not value.grad.any()
    assert not prior.grad.any()
    assert result.kl.item() == 0.0


def test_weights_on_request_are_those_of_the_output():
    edges = graph(11, 7, 53)
    scores, value = torch.randn(53, 3, device=DEVICE), torch.randn(11, 3, 4, device=DEVICE)
    result = edge_attention(scores, value, edges, config=WEIBULL, need_kl=False, need_weights=True, backend="triton")
    rows = torch.zeros(7, 3, 4, device=DEVICE).index_add(0, edges.target, result.weights[..., None] * value[edges.source])
    torch.testing.assert_close(rows, result.output)


def test_extreme_scores_stay_finite():
    edges = graph(11, 7, 53)
    scores = (torch.randn(53, 3, device=DEVICE) * 1e4).requires_grad_()
    value = torch.randn(11, 3, 4, device=DEVICE)
    for variant in ("BAM-WF", "BAM-LF"):
        config = ba.AttentionConfig(variant, preset="paper", gamma_beta=1e-15, gamma_alpha=1e-15, sigma_p=1e15)
        result = edge_attention(scores, value, edges, config=config, seed=1, backend="triton")
        (gradient,) = torch.autograd.grad(result.output.sum() + result.kl.sum(), scores)
        for x in (result.output, result.kl, gradient):
            assert torch.isfinite(x).all()


@pytest.mark.parametrize("kind", [fused.CONSTANT, fused.PER_SOURCE, fused.PER_EDGE])
def test_operators_pass_opcheck(kind):
    edges = graph(5, 4, 13)
    scores = torch.randn(13, 3, device=DEVICE, requires_grad=True)
    value = torch.randn(5, 3, 4, device=DEVICE, requires_grad=True)
    prior = [None, torch.rand(5, 3, device=DEVICE), torch.rand(13, 3, device=DEVICE)][kind]
    prior = None if prior is None else prior.requires_grad_()
    options = (True, 0.5, 0.25, kind, True, True)
    arguments = (scores, value, prior, torch.tensor(3, device=DEVICE), *fused.indices_of(edges), *options)
    torch.library.opcheck(fused.edge_attention_forward, arguments)


@pytest.mark.parametrize("has_prior", [False, True])
@pytest.mark.parametrize("forms", ["beta_psi log_softmax row_mean", "psi raw sum"])
def test_the_node_passes_opcheck(has_prior, forms):
    edges = graph(5, 4, 13)
    scores = torch.randn(13, 3, device=DEVICE, requires_grad=True)
    value = torch.randn(5, 3, 4, device=DEVICE, requires_grad=True)
    prior = torch.randn(5, 3, device=DEVICE).log_softmax(0).requires_grad_() if has_prior else None
    pointers = (edges.target_pointers, edges.source_pointers, edges.num_rows)
    seed = torch.tensor(3, device=DEVICE)
    *indices, num_targets = fused.indices_of(edges)
    arguments = (scores, value, prior, seed, [*indices, *pointers], num_targets, [2.0, 0.5, 0.25], forms)
    torch.library.opcheck(weibull_node.weibull_edges_forward, arguments)


@pytest.mark.parametrize(
    ("variant", "scope"),
    [("BAM-WC", "graph"), ("BAM-WF", "graph"), ("BAM-WC", "neighborhood"), ("BAM-LC", "neighborhood")],
)
def test_compiles_into_one_graph_with_the_same_results(variant, scope):
    config = ba.AttentionConfig(variant)
    edges = graph(11, 7, 53)
    inputs = [torch.randn(53, 3, device=DEVICE), torch.randn(11, 3, 4, device=DEVICE), torch.randn(11, 3, device=DEVICE)]
    inputs = [x.requires_grad_() for x in inputs]

    def loss(scores, value, prior, source, target):
        graph = Edges.sort(source, target, 11, 7, check=False)
        prior = prior.log_softmax(0) if config.prior_kind == "contextual" else None
        result = edge_attention(
            scores, value, graph, config=config, log_prior=prior, prior_scope=scope, seed=SEED, backend="triton"
        )
        return result.output.square().sum() + result.kl.sum()

    ends = (edges.source, edges.target)
    inputs = inputs if config.prior_kind == "contextual" else inputs[:2]
    rest = (None, *ends) if len(inputs) == 2 else ends
    expected = torch.autograd.grad(loss(*inputs, *rest), inputs)
    compiled = torch.compile(loss, fullgraph=True, backend="inductor" if HAS_GPU else "aot_eager")
    for ours, theirs in zip(torch.autograd.grad(compiled(*inputs, *rest), inputs), expected, strict=True):
        # the compiler may order sums differently
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dropout_p": 0.1}, "no dropout"),
        ({"sample": False}, "not sampled"),
        ({"value": torch.zeros(11, 3, 257)}, "257 features"),
        ({"value": torch.zeros(11, 3, 0)}, "no features"),
        ({"value": torch.zeros(11, 3, 4, dtype=torch.float64)}, "float64"),
    ],
)
def test_refuses_by_name_what_it_cannot_do(change, reason):
    options = {"value": torch.zeros(11, 3, 4), "config": ba.AttentionConfig("BAM-WF"), **change}
    options["value"] = options["value"].to(DEVICE)
    arguments = (torch.zeros(53, 3, device=DEVICE), options.pop("value"), graph(11, 7, 53))
    with pytest.raises(ValueError, match=f"backend 'triton' cannot be used here: .*{reason}"):
        edge_attention(*arguments, backend="triton", **options)
    edge_attention(*arguments, backend="auto", **options)


def test_a_call_without_heads_is_refused_by_name():
    edges, options = graph(11, 7, 53), {"config": ba.AttentionConfig("BAM-WF")}
    arguments = (torch.zeros(53, 0, device=DEVICE), torch.zeros(11, 0, 4, device=DEVICE), edges)
    with pytest.raises(ValueError, match="backend 'triton' cannot be used here: the values have no heads"):
        edge_attention(*arguments, backend="triton", **options)
    assert edge_attention(*arguments, backend="auto", **options).output.shape == (7, 0, 4)


def test_auto_takes_it_on_a_gpu():
    before = LAUNCHES["edge_forward"]
    edge_attention(
        torch.zeros(53, 3, device=DEVICE), torch.zeros(11, 3, 4, device=DEVICE), graph(11, 7, 53),
        config=ba.AttentionConfig("BAM-WF"),
    )  # fmt: skip
    # in the interpreter tensors are on the CPU, where `csr` is faster
    assert LAUNCHES["edge_forward"] - before == (1 if DEVICE == "cuda" else 0)
