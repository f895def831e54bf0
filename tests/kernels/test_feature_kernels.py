"""Scores from the features of nodes, whose products and gradients the kernels compute: GAT's, against the reference."""

import pytest
import torch
from edge_truth import check_edges
from kernel_device import DEVICE, HAS_GPU, MARKS

import bayesattn as ba
from bayesattn.functional import Edges, edge_attention
from bayesattn.integrations.pyg import BayesianGATConv, attention
from bayesattn.ops.common.launch import LAUNCHES
from bayesattn.ops.prior.nodes import NodePrior
from bayesattn.ops.segment import features, launch
from bayesattn.ops.segment.pairs import FeatureScores
from bayesattn.priors import ContextualPrior

pytestmark = MARKS
SEED = (77 << 40) + 12345
NODES, HEADS, FEATURES, COUNT = 11, 3, 5, 53
CONFIGS = {
    "WC": ba.AttentionConfig("BAM-WC", weibull_k=2.0, gamma_beta=0.3),
    "WC raw": ba.AttentionConfig("BAM-WC", preset="paper", gamma_beta=0.3, prior_per_head=True),
    "WC detached": ba.AttentionConfig("BAM-WC", detach_keys=True),
    "WF": ba.AttentionConfig("BAM-WF"),
    "LC": ba.AttentionConfig("BAM-LC"),
    "NOKL": ba.AttentionConfig("BAM-NOKL"),
}


def graph(nodes: int = NODES, count: int = COUNT) -> Edges:
    """Random edges, some twice, a node that is nobody's source or target, and a hub."""
    source, target = torch.randint(0, nodes - 1, (2, count), device=DEVICE)
    source[: count // 3] = 0
    return Edges.sort(source, target, nodes, nodes)


def inputs(nodes: int = NODES, heads: int = HEADS, width: int = FEATURES) -> list[torch.Tensor]:
    """Features, and the vectors for sources and targets."""
    return [torch.randn(size, device=DEVICE) for size in ((nodes, heads, width), (1, heads, width), (1, heads, width))]


def results(edges, tensors, config, backend, upstream, *, slope=0.2):
    """Return output, KL, and the gradients of features, vectors and the prior's network, in float64."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    x, heads = leaves[0], leaves[0].shape[1]
    torch.manual_seed(2)
    prior, network = None, []
    if config.prior_kind == "contextual":
        module = ContextualPrior(x.shape[2], heads, config).to(DEVICE, torch.promote_types(x.dtype, torch.float32))
        used, network = (edges.out_degree > 0).view(1, 1, -1), list(module.parameters())
        prior = module.fused_of_nodes(x, used) if backend == "triton" else module.of_nodes(x, used)
        assert isinstance(prior, NodePrior) == (backend == "triton")
    result = edge_attention(
        FeatureScores(*leaves, slope), x, edges, config=config, log_prior=prior, seed=SEED, backend=backend,
        need_kl=config.has_kl,
    )  # fmt: skip
    outputs = [y for y in (result.output, result.kl) if y is not None]
    given = [u.to(y.dtype) for u, y in zip(upstream, outputs, strict=False)]
    gradients = torch.autograd.grad(outputs, [*leaves, *network], given)
    return [y.detach().double() for y in (*outputs, *gradients)]


def check(config, nodes=NODES, count=COUNT, heads=HEADS, width=FEATURES, **options):
    edges, tensors = graph(nodes, count), inputs(nodes, heads, width)
    upstream = [torch.randn(nodes, heads, width, device=DEVICE), torch.tensor([-1.7], device=DEVICE)]
    check_edges(
        lambda given, backend: results(edges, given, config, backend, upstream, **options),
        tensors,
        ("node_scores", "edge_forward", "node_grad"),
    )


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_gradient_is_that_of_the_reference(config):
    check(config)


@pytest.mark.parametrize("sizes", [(13, 41, 8, 8), (5, 37, 1, 7), (7, 29, 2, 67), (6, 31, 19, 3)])
def test_odd_sizes_and_heads(sizes):
    check(CONFIGS["WC"], *sizes)


def test_more_blocks_of_nodes_than_programs(monkeypatch):
    monkeypatch.setattr(features, "PROGRAMS", 2)
    monkeypatch.setattr(launch, "NODE_TILE", 32)
    features._grad_launch.cache_clear()
    check(CONFIGS["WC"])
    features._grad_launch.cache_clear()


@pytest.mark.parametrize("config", [CONFIGS["WC"], CONFIGS["NOKL"]], ids=["WC", "NOKL"])
def test_rows_split_into_runs_give_the_same(monkeypatch, config):
    monkeypatch.setattr(launch, "LONGEST_RUN", 5)
    check(config)


@pytest.mark.parametrize("slope", [0.0, 1.5])
def test_any_slope_that_keeps_the_sign(slope):
    check(CONFIGS["WC"], slope=slope)


@pytest.mark.parametrize("dtype", [torch.float16, *([torch.bfloat16] if HAS_GPU else [])])
@pytest.mark.parametrize("of_vectors", ["the same", "float32"])
def test_half_precision_is_multiplied_in_float32(dtype, of_vectors):
    edges, config = graph(), CONFIGS["WC"]
    x, *vectors = inputs()
    tensors = [x.to(dtype), *(y.to(dtype if of_vectors == "the same" else torch.float32) for y in vectors)]
    upstream = [torch.randn(x.shape, device=DEVICE), torch.tensor([0.6], device=DEVICE)]
    ours = results(edges, tensors, config, "triton", upstream)
    truth = results(edges, [y.double() for y in tensors], config, "reference", upstream)
    for y, z in zip(ours, truth, strict=True):
        # gradients of values and keys are rounded to `dtype` before they are added up, the sum once more
        torch.testing.assert_close(y, z, rtol=0.0, atol=6 * torch.finfo(dtype).eps * float(z.abs().max().clamp(min=1.0)))


def test_a_gradient_beyond_float16_becomes_its_largest_number():
    x, *vectors = (y.half() for y in inputs())
    of_scores = [torch.full((NODES, HEADS), 1e6, device=DEVICE) for _ in range(2)]
    found = features.gradients(x, *vectors, *of_scores, torch.zeros_like(x), None)
    assert all(torch.isfinite(y).all() for y in found)
    assert all(y.abs().max() == torch.finfo(torch.float16).max for y in found)


def test_tensors_of_any_strides():
    edges, dense = graph(), inputs()
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in dense]
    upstream = [torch.randn(dense[0].shape, device=DEVICE), torch.tensor([0.6], device=DEVICE)]
    found = [results(edges, tensors, CONFIGS["WC"], "triton", upstream) for tensors in (dense, strided)]
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def test_outputs_are_fully_written(poisoned):
    check(CONFIGS["WC"])
    check(CONFIGS["NOKL"])


@pytest.mark.parametrize("nodes", [0, 7])
def test_a_graph_without_edges_gives_zero_gradients(nodes):
    none = torch.zeros(0, dtype=torch.long, device=DEVICE)
    edges, tensors = Edges.sort(none, none, nodes, nodes), inputs(nodes)
    upstream = [torch.randn(tensors[0].shape, device=DEVICE)]
    assert not any(x.any() for x in results(edges, tensors, CONFIGS["NOKL"], "triton", upstream))


def test_features_that_are_not_the_values_are_multiplied_by_torch():
    edges, (x, *vectors) = graph(), inputs()
    before = LAUNCHES.copy()
    options = {"config": CONFIGS["NOKL"], "seed": SEED, "need_kl": False}
    found, truth = (
        edge_attention(FeatureScores(x, *vectors, 0.2), 2 * x, edges, backend=backend, **options).output
        for backend in ("triton", "reference")
    )
    # float32 in another order
    torch.testing.assert_close(found, truth, rtol=3e-5, atol=3e-5)
    assert (LAUNCHES - before)["node_scores"] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"features": torch.zeros(10, 3, 5)},
            "features of the scores must have shape .*, got \\(10, 3, 5\\) for 11 sources and 11 targets",
        ),
        (
            {"att_target": torch.zeros(1, 3, 4)},
            r"att_target of the scores must have shape \(1, 3, 5\) .*, got .*\(1, 3, 4\)",
        ),
        (
            {"att_target": torch.zeros(1, 3, 5, dtype=torch.float64)},
            "att_target of the scores must have .*, got torch.float64",
        ),
        ({"att_source": torch.zeros(1, 3, 5, device="meta")}, "att_source of the scores must .* on cpu .*, got .* on meta"),
        ({"negative_slope": -0.1}, "negative_slope must be at least 0, got -0.1"),
    ],
)
def test_parts_that_do_not_fit_are_named(change, message):
    scores = FeatureScores(torch.zeros(11, 3, 5), torch.zeros(1, 3, 5), torch.zeros(1, 3, 5), 0.2)._replace(**change)
    with pytest.raises(ValueError, match=message):
        edge_attention(scores, torch.zeros(11, 3, 5), graph(), config=CONFIGS["WF"])


OPTIONS = {
    "self loops": {"add_self_loops": True},
    "no loops, no bias": {"add_self_loops": False, "bias": False},
    "mean of heads, residual": {"concat": False, "residual": True},
    "edges turned": {"flow": "target_to_source"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("config", [CONFIGS["WC"], CONFIGS["NOKL"]], ids=["WC", "NOKL"])
def test_a_layer_from_its_features_on_is_the_layer_through_pyg(monkeypatch, config, options):
    torch.manual_seed(3)
    layer = BayesianGATConv(4, FEATURES, heads=HEADS, config=config, backend="triton", **options).to(DEVICE)
    x, index = torch.randn(NODES, 4, device=DEVICE), torch.randint(0, NODES, (2, COUNT), device=DEVICE)
    found = []
    for from_features in (True, False):
        if not from_features:
            monkeypatch.setattr(BayesianGATConv, "_takes_features", lambda *_: False)
        before = LAUNCHES.copy()
        torch.manual_seed(7)
        with ba.record_kl() as kl:
            output = layer(x, index)
        loss = output.square().sum() + (kl.total() if config.has_kl else 0.0)
        found.append([output.detach(), *torch.autograd.grad(loss, list(layer.parameters()), allow_unused=True)])
        assert ((LAUNCHES - before)["node_scores"] == 1) == from_features
    # the same draw; float32 in another order
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_self_loops_of_the_same_tensor_are_added_once(monkeypatch):
    # on a GPU the same tensor is known to be the same
    monkeypatch.setattr(attention, "_COUNTING_DEVICES", (DEVICE,))
    layer = BayesianGATConv(4, FEATURES, heads=HEADS, config=CONFIGS["WC"], backend="triton").to(DEVICE)
    x, index = torch.randn(NODES, 4, device=DEVICE), torch.randint(0, NODES, (2, COUNT), device=DEVICE)
    layer(x, index)
    known = attention._SORTED[layer].edges
    assert len(known) == int((index[0] != index[1]).sum()) + NODES
    monkeypatch.setattr(attention, "add_self_loops", lambda *_, **__: pytest.fail("added again"))
    layer(x, index)
    assert attention._SORTED[layer].edges is known
    layer.add_self_loops = False
    layer(x, index)
    assert len(attention._SORTED[layer].edges) == COUNT


@pytest.mark.parametrize("watch", ["hook", "value dropout", "two sides", "edge features"])
def test_what_kernels_cannot_see_goes_through_pyg(watch):
    edge_dim = 2 if watch == "edge features" else None
    in_channels = (4, 4) if watch == "two sides" else 4
    options = {"value_dropout": 0.5 if watch == "value dropout" else 0.0, "edge_dim": edge_dim, "add_self_loops": False}
    layer = BayesianGATConv(in_channels, FEATURES, config=CONFIGS["WC"], backend="triton", **options).to(DEVICE)
    if watch == "hook":
        layer.register_message_forward_hook(lambda *_: None)
    x, index = torch.randn(NODES, 4, device=DEVICE), torch.randint(0, NODES, (2, COUNT), device=DEVICE)
    before = LAUNCHES.copy()
    layer(x, index, None if edge_dim is None else torch.randn(COUNT, edge_dim, device=DEVICE))
    assert (LAUNCHES - before)["node_scores"] == 0
