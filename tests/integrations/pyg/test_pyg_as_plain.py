"""What users of PyG's three layers rely on, asked of ours in eval mode and, with vanishing noise, while they sample."""

import contextlib

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv
from torch_geometric.utils import to_torch_csc_tensor

import bayesattn as ba
from bayesattn.integrations.pyg import BayesianGATConv, BayesianGATv2Conv, BayesianTransformerConv

NODES, TARGETS, IN, OTHER, OUT, HEADS, EDGE = 11, 6, 5, 7, 4, 3, 2
PAIRS = {
    "gat": (BayesianGATConv, GATConv),
    "gatv2": (BayesianGATv2Conv, GATv2Conv),
    "transformer": (BayesianTransformerConv, TransformerConv),
}
# the noise of this shape is below the rounding of float64
QUIET = ba.AttentionConfig("BAM-WC", weibull_k=1e15)
every_kind = pytest.mark.parametrize("kind", PAIRS)
both_paths = pytest.mark.parametrize("path", ["eval", "sampling", "training"])


def _pair(kind: str, in_channels=IN, **options):
    """Ours and PyG's layer with the same parameters, none of which is zero."""
    ours_class, plain_class = PAIRS[kind]
    ours = ours_class(in_channels, OUT, heads=HEADS, config=QUIET, **options).double()
    plain = plain_class(in_channels, OUT, heads=HEADS, **options).double()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.normal_(std=0.5)
    ours.load_state_dict(plain.state_dict())
    return ours, plain.eval()


@contextlib.contextmanager
def _on(path: str, layer):
    layer.train(path == "training")
    with ba.sampling(layer) if path == "sampling" else contextlib.nullcontext():
        yield layer


def _edges(targets: int = NODES) -> Tensor:
    """No loops, no edge twice, in no order."""
    index = (torch.rand(NODES, targets) < 0.4).nonzero().T
    index = index[:, index[0] != index[1]]
    return index[:, torch.randperm(index.shape[1])]


def _x(nodes: int = NODES, width: int = IN) -> Tensor:
    return torch.randn(nodes, width, dtype=torch.float64)


def _sparse(index: Tensor, targets: int = NODES) -> Tensor:
    # PyG's convention: the transposed adjacency matrix; torch warns where nobody says whether it shall check
    with torch.sparse.check_sparse_tensor_invariants(enable=True):
        return to_torch_csc_tensor(index, size=(NODES, targets)).t()


def _assert_same(path: str, ours: Tensor, plain: Tensor) -> None:
    if path == "eval":
        assert torch.equal(ours, plain)
    else:
        # float64: sums over the edges of a node in another order
        torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-11)


@both_paths
@pytest.mark.parametrize("layout", ["edges", "sparse"])
@pytest.mark.parametrize("concat", [True, False])
@every_kind
def test_a_graph_may_be_a_list_of_edges_or_a_sparse_matrix(kind, concat, layout, path):
    ours, plain = _pair(kind, concat=concat, **({} if kind == "transformer" else {"add_self_loops": False}))
    x, index = _x(), _edges()
    graph = index if layout == "edges" else _sparse(index)
    with _on(path, ours):
        output = ours(x, graph)
    assert output.shape == (NODES, HEADS * OUT if concat else OUT)
    _assert_same(path, output, plain(x, graph))
    torch.testing.assert_close(output, plain(x, index), rtol=1e-9, atol=1e-11)


@both_paths
@pytest.mark.parametrize("layout", ["edges", "sparse"])
@every_kind
def test_the_weights_asked_for_are_those_of_the_edges_and_sum_to_one(kind, layout, path):
    ours, plain = _pair(kind)
    x, index = _x(), _edges()
    given = index if layout == "edges" else _sparse(index)
    with _on(path, ours):
        output, weights = ours(x, given, return_attention_weights=True)
        _assert_same(path, output, ours(x, given))
    expected, expected_weights = plain(x, given, return_attention_weights=True)
    _assert_same(path, output, expected)
    _assert_same(path, weights[1], expected_weights[1])
    if layout == "sparse":
        # a matrix of all heads
        _assert_same(path, weights[0].values(), expected_weights[0].values())
        return
    assert torch.equal(weights[0], expected_weights[0])
    sums = torch.zeros(NODES, HEADS, dtype=torch.float64).index_add(0, weights[0][1], weights[1])
    has_edge = torch.zeros(NODES, dtype=torch.bool).index_fill(0, weights[0][1], True)
    torch.testing.assert_close(sums[has_edge], torch.ones_like(sums[has_edge]))


@both_paths
@every_kind
def test_sources_and_targets_may_be_of_two_kinds(kind, path):
    ours, plain = _pair(kind, (IN, OTHER), **({} if kind == "transformer" else {"add_self_loops": False}))
    x, index = (_x(), _x(TARGETS, OTHER)), _edges(TARGETS)
    with _on(path, ours):
        output = ours(x, index)
        assert output.shape == (TARGETS, HEADS * OUT)
        _assert_same(path, output, plain(x, index))
        sparse = _sparse(index, TARGETS)
        _assert_same(path, ours(x, sparse), plain(x, sparse))


@both_paths
def test_targets_of_a_gat_may_have_no_features_but_a_number(path):
    ours, plain = _pair("gat", (IN, OTHER), add_self_loops=False)
    x, index, size = (_x(), None), _edges(TARGETS), (NODES, TARGETS)
    with _on(path, ours):
        output = ours(x, index, size=size)
    assert output.shape == (TARGETS, HEADS * OUT)
    _assert_same(path, output, plain(x, index, size=size))


FILLS = {"mean": "mean", "a number": 0.5, "a vector": torch.tensor([0.5, -0.25], dtype=torch.float64)}


@both_paths
@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS)
@pytest.mark.parametrize("kind", ["gat", "gatv2"])
def test_loops_get_the_edge_features_that_were_named(kind, fill, path):
    ours, plain = _pair(kind, edge_dim=EDGE, fill_value=fill)
    x, index = _x(), _edges()
    features = torch.randn(index.shape[1], EDGE, dtype=torch.float64)
    with _on(path, ours):
        _assert_same(path, ours(x, index, features), plain(x, index, features))


@both_paths
@pytest.mark.parametrize("kind", ["gat", "gatv2"])
def test_one_feature_per_edge_may_come_without_its_axis(kind, path):
    ours, plain = _pair(kind, edge_dim=1)
    x, index = _x(), _edges()
    features = torch.randn(index.shape[1], dtype=torch.float64)
    with _on(path, ours):
        _assert_same(path, ours(x, index, features), plain(x, index, features))


OPTIONS = {
    "gat": {"residual": {"residual": True}, "no bias": {"bias": False}, "slope": {"negative_slope": 0.5}},
    "gatv2": {"residual": {"residual": True}, "shared": {"share_weights": True}, "no bias": {"bias": False}},
    "transformer": {
        "gate": {"beta": True},
        "no root": {"root_weight": False},
        "gate of the mean": {"beta": True, "concat": False},
    },
}


@both_paths
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, cases in OPTIONS.items() for name in cases])
def test_options_of_the_constructor_mean_what_they_mean(kind, name, path):
    ours, plain = _pair(kind, **OPTIONS[kind][name])
    x, index = _x(), _edges()
    with _on(path, ours):
        _assert_same(path, ours(x, index), plain(x, index))


@both_paths
@pytest.mark.parametrize("nodes", [0, NODES])
@every_kind
def test_a_graph_may_have_no_edges_and_no_nodes(kind, nodes, path):
    ours, plain = _pair(kind)
    x, index = _x(nodes), torch.empty(2, 0, dtype=torch.int64)
    with _on(path, ours):
        _assert_same(path, ours(x, index), plain(x, index))


@every_kind
def test_widths_may_be_learned_from_the_first_call(kind):
    ours_class, _ = PAIRS[kind]
    layer = ours_class(-1, OUT, heads=HEADS, config=QUIET)
    x, index = torch.randn(NODES, IN), _edges()
    assert layer(x, index).shape == (NODES, HEADS * OUT)


@every_kind
def test_a_layer_prints_as_pyg_s(kind):
    ours, plain = _pair(kind)
    assert repr(plain).removeprefix(type(plain).__name__).split("\n")[0] in repr(ours)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # PyG compares sizes
@every_kind
def test_torchscript_is_refused_and_tracing_is_not(kind):
    ours, plain = _pair(kind)
    x, index = _x(), _edges()
    with pytest.raises(RuntimeError, match=rf"torch\.jit\.script cannot compile {type(ours).__name__}.*torch\.jit\.trace"):
        torch.jit.script(ours)
    with torch.no_grad():
        assert torch.equal(torch.jit.trace(ours.eval(), (x, index), check_trace=False)(x, index), plain(x, index))


@every_kind
def test_second_derivatives_are_those_of_pyg_or_refused(kind):
    """Of the plain backend they are right; of the default one they would be left out where another path exists."""
    ours, plain = _pair(kind)
    x, index = _x().requires_grad_(), _edges()
    with pytest.raises(RuntimeError, match=r"create_graph=True: .*backend='reference'"):
        torch.autograd.grad(ours(x, index).square().sum(), x, create_graph=True)
    ours.backend = "reference"
    seconds = []
    for layer in (ours, plain):
        (first,) = torch.autograd.grad(layer(x, index).square().sum(), x, create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), x)[0])
    torch.testing.assert_close(*seconds, rtol=1e-7, atol=1e-9)
