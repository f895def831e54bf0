"""Scores made of a source's and a target's part, which the kernels add up themselves: GAT's, against the reference."""

import pytest
import torch
from edge_truth import check_edges
from kernel_device import DEVICE, DTYPES, HAS_GPU, MARKS

import bayesattn as ba
from bayesattn.functional import Edges, edge_attention
from bayesattn.integrations.pyg import BayesianGATConv
from bayesattn.ops.common.launch import LAUNCHES
from bayesattn.ops.segment import launch, plain
from bayesattn.ops.segment.pairs import PairScores

pytestmark = MARKS
SEED = (77 << 40) + 12345
CONFIGS = {
    "WC": ba.AttentionConfig("BAM-WC", weibull_k=2.0, gamma_beta=0.3),
    "WC raw": ba.AttentionConfig("BAM-WC", preset="paper", gamma_beta=0.3),
    "WF": ba.AttentionConfig("BAM-WF"),
    "LC": ba.AttentionConfig("BAM-LC"),
    "NOKL": ba.AttentionConfig("BAM-NOKL"),
}


def graph(sources: int, targets: int, count: int) -> Edges:
    """Random edges, some twice, one source and one target with none, a hub on both sides."""
    source, target = torch.randint(0, sources, (count,)), torch.randint(0, targets, (count,))
    source[: count // 3], target[count // 3 : 2 * count // 3] = 0, 1
    source[source == sources - 1], target[target == targets - 1] = 0, 0
    return Edges.sort(source.to(DEVICE), target.to(DEVICE), sources, targets)


def inputs(edges: Edges, h: int, d: int, config: ba.AttentionConfig) -> list[torch.Tensor]:
    """The two parts of the scores, values, and ln Ψ where there is one."""
    sizes = [(edges.num_sources, h), (edges.num_targets, h), (edges.num_sources, h, d)]
    tensors = [torch.randn(size, device=DEVICE) for size in sizes]
    if config.prior_kind == "contextual":
        logits = torch.randn(sizes[0], device=DEVICE).masked_fill((edges.out_degree == 0)[:, None], -torch.inf)
        tensors.append(logits.log_softmax(0))
    return tensors


def results(edges, tensors, config, backend, upstream, *, slope=0.2, scope="graph"):
    """Return output, KL and the gradients of all inputs, in float64."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    result = edge_attention(
        PairScores(*leaves[:2], slope), leaves[2], edges, config=config, log_prior=leaves[3] if len(leaves) > 3 else None,
        prior_scope=scope, seed=SEED, backend=backend, need_kl=config.has_kl,
    )  # fmt: skip
    outputs = [x for x in (result.output, result.kl) if x is not None]
    gradients = torch.autograd.grad(outputs, leaves, [u.to(o.dtype) for u, o in zip(upstream, outputs, strict=False)])
    return [x.detach().double() for x in (*outputs, *gradients)]


def check(sizes, config, **options):
    sources, targets, count, h, d = sizes
    edges = graph(sources, targets, count)
    tensors = inputs(edges, h, d, config)
    upstream = [torch.randn(targets, h, d, device=DEVICE), torch.tensor([-1.7], device=DEVICE)]
    check_edges(
        lambda given, backend: results(edges, given, config, backend, upstream, **options),
        tensors,
        ("edge_forward", "edge_backward", "edge_pair_grad"),
    )


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_gradient_is_that_of_the_reference(config):
    check((11, 7, 53, 3, 4), config)


@pytest.mark.parametrize("sizes", [(11, 7, 53, 8, 8), (5, 13, 37, 1, 5), (7, 5, 29, 2, 33), (6, 4, 31, 19, 3)])
def test_odd_sizes_and_heads(sizes):
    check(sizes, CONFIGS["WC"])


@pytest.mark.parametrize("slope", [0.0, 1.0, 1.5])
def test_any_slope_that_keeps_the_sign(slope):
    check((11, 7, 53, 3, 4), CONFIGS["WC"], slope=slope)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_rows_split_into_runs_give_the_same(monkeypatch, config):
    monkeypatch.setattr(launch, "LONGEST_RUN", 5)
    check((11, 7, 53, 3, 4), config)


def test_a_prior_of_each_neighborhood():
    check((11, 7, 53, 3, 4), CONFIGS["WC"], scope="neighborhood")


@pytest.mark.parametrize("dtype", DTYPES)
def test_half_precision_is_added_up_in_float32(dtype):
    edges, config = graph(11, 7, 53), CONFIGS["WC"]
    tensors = [x.to(dtype) for x in inputs(edges, 3, 4, config)[:3]] + inputs(edges, 3, 4, config)[3:]
    upstream = [torch.randn(7, 3, 4, device=DEVICE), torch.tensor([0.6], device=DEVICE)]
    ours = results(edges, tensors, config, "triton", upstream)
    truth = results(edges, [x.double() for x in tensors], config, "reference", upstream)
    for x, y in zip(ours, truth, strict=True):
        # output and gradients are rounded to `dtype` once, the kernel's exponentials a little more
        error = 4 * torch.finfo(dtype).eps if dtype != torch.float32 else 3e-5
        torch.testing.assert_close(x, y, rtol=0.0, atol=error * float(y.abs().max().clamp(min=1.0)))


def test_parts_of_any_strides():
    edges, config = graph(11, 7, 53), CONFIGS["WC"]
    dense = inputs(edges, 3, 4, config)
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in dense]
    upstream = [torch.randn(7, 3, 4, device=DEVICE), torch.tensor([0.6], device=DEVICE)]
    found = [results(edges, tensors, config, "triton", upstream) for tensors in (dense, strided)]
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


@pytest.mark.parametrize("config", [CONFIGS["WC"], CONFIGS["NOKL"]], ids=["WC", "NOKL"])
def test_two_runs_agree_to_the_last_bit(config):
    # no hub: torch adds the runs of a long row in any order on a GPU
    nodes, count = (997, 20011) if HAS_GPU else (11, 53)
    edges = Edges.sort(*torch.randint(0, nodes, (2, count), device=DEVICE), nodes, nodes)
    tensors = inputs(edges, 8, 8, config)
    upstream = [torch.randn(nodes, 8, 8, device=DEVICE), torch.ones(1, device=DEVICE)]
    runs = [results(edges, tensors, config, "triton", upstream) for _ in range(2)]
    assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))


def test_outputs_are_fully_written(poisoned):
    check((11, 7, 53, 3, 5), CONFIGS["WC"])
    check((11, 7, 53, 3, 5), CONFIGS["NOKL"])


def test_a_graph_without_edges_gives_zero_gradients():
    none = torch.zeros(0, dtype=torch.long, device=DEVICE)
    edges = Edges.sort(none, none, 5, 7)
    upstream = [torch.randn(7, 3, 4, device=DEVICE), torch.ones(1, device=DEVICE)]
    tensors = [*inputs(edges, 3, 4, CONFIGS["NOKL"]), torch.zeros(5, 3, device=DEVICE)]
    assert not any(x.any() for x in results(edges, tensors, CONFIGS["WC"], "triton", upstream))


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_weights_on_request_and_other_backends_see_the_same_scores(backend):
    edges, config = graph(11, 7, 53), CONFIGS["NOKL"]
    source, target, value = inputs(edges, 3, 4, config)
    pair = PairScores(source, target, 0.2)
    options = {"config": config, "seed": SEED, "need_kl": False, "need_weights": True}
    truth = edge_attention(pair.on_edges(edges, plain), value, edges, backend="reference", **options)
    for name in ("triton", backend):
        found = edge_attention(pair, value, edges, backend=name, **options)
        # float32 in another order
        torch.testing.assert_close(found.output, truth.output, rtol=3e-5, atol=3e-5)
        torch.testing.assert_close(found.weights, truth.weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": torch.zeros(10, 3)}, "source of the scores must be .*11 sources.*, got .*\\(10, 3\\)"),
        ({"target": torch.zeros(7, 2)}, "target of the scores must be .* with the heads, .*, got"),
        ({"target": torch.zeros(7, 3, dtype=torch.float64)}, "target of the scores must be .*, got torch.float64"),
        ({"negative_slope": -0.1}, "negative_slope must be at least 0, got -0.1"),
    ],
)
def test_parts_that_do_not_fit_are_named(change, message):
    pair = PairScores(torch.zeros(11, 3), torch.zeros(7, 3), 0.2)._replace(**change)
    with pytest.raises(ValueError, match=message):
        edge_attention(pair, torch.zeros(11, 3, 4), graph(11, 7, 53), config=CONFIGS["WF"])


@pytest.mark.parametrize("variant", ["BAM-WC", "BAM-NOKL"])
def test_a_compiled_layer_computes_scores_by_torch_operations(variant):
    layer = BayesianGATConv(5, 4, heads=3, add_self_loops=False, config=ba.AttentionConfig(variant), backend="triton")
    layer = layer.to(DEVICE)
    x, index = torch.randn(11, 5, device=DEVICE), torch.randint(0, 11, (2, 37), device=DEVICE)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    before = LAUNCHES.copy()
    output = compiled(x, index)
    output.square().sum().backward()
    found = LAUNCHES - before
    assert torch.isfinite(output).all()
    assert torch.isfinite(layer.att_src.grad).all()
    assert found["edge_forward"] == found["edge_backward"] == 1
    assert found["edge_pair_grad"] == 0


def test_the_prior_in_the_same_node_is_the_prior_of_its_own(monkeypatch):
    from bayesattn.integrations.pyg import attention

    torch.manual_seed(3)
    layer = BayesianGATConv(5, 4, heads=3, config=CONFIGS["WC"], backend="triton").to(DEVICE)
    x, index = torch.randn(11, 5, device=DEVICE), torch.randint(0, 11, (2, 37), device=DEVICE)
    found = []
    for is_merged in (True, False):
        if not is_merged:
            monkeypatch.setattr(attention.EdgeAttentionModule, "_prior_of", lambda self, c, k: self._log_prior(k, c.edges))
        torch.manual_seed(7)
        with ba.record_kl() as kl:
            output = layer(x, index)
        nodes = {node.name() for node, _ in output.grad_fn.next_functions[0][0].next_functions[0][0].next_functions if node}
        assert any("LogNodePrior" in name for name in nodes) != is_merged
        total = kl.total()
        gradients = torch.autograd.grad([output.square().sum(), total], list(layer.parameters()), [None, total * 0 - 0.7])
        found.append([output.detach(), total.detach(), *gradients])
    # the same kernels on the same numbers, but for the order in which autograd adds the gradients of the features
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def test_keys_that_are_detached_get_no_gradient_from_the_prior():
    config = ba.AttentionConfig("BAM-WC", detach_keys=True)
    layer = BayesianGATConv(5, 4, heads=3, config=config, bias=False, backend="triton").to(DEVICE)
    x, index = torch.randn(11, 5, device=DEVICE), torch.randint(0, 11, (2, 37), device=DEVICE)
    reference = BayesianGATConv(5, 4, heads=3, config=config, bias=False, backend="reference").to(DEVICE)
    reference.load_state_dict(layer.state_dict())
    gradients = []
    for model in (layer, reference):
        with ba.record_kl() as kl:
            model(x, index)
        kl.total().backward()
        gradients.append([p.grad for p in model.parameters()])
    # the KL does not depend on the draw; float32 in another order
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
