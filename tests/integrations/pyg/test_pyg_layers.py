"""The graph layers, constructed: equal to dense attention with every gradient, PyG's when off, and safe to use."""

import copy
import pickle

import pytest
import torch
from dense_layers import dense_layer
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv

import bayesattn as ba
from bayesattn.integrations.pyg import BayesianGATConv, BayesianGATv2Conv, BayesianTransformerConv, attention
from bayesattn.ops.segment import reference
from bayesattn_recipes.bench.harness import peak_memory

NODES, TARGETS, IN, OUT, HEADS, EDGE = 11, 6, 5, 4, 3, 2
PLAIN = {"gat": GATConv, "gatv2": GATv2Conv, "transformer": TransformerConv}
BAYESIAN = {"gat": BayesianGATConv, "gatv2": BayesianGATv2Conv, "transformer": BayesianTransformerConv}
SETTINGS = ("plain", "self-loops", "edge-features", "edge-features and loops", "bipartite", "mean-of-heads", "residual")
every_case = pytest.mark.parametrize(
    ("kind", "setting"),
    [(k, s) for k in PLAIN for s in SETTINGS if k != "transformer" or not ("loops" in s or s == "residual")],
)
every_kind = pytest.mark.parametrize("kind", PLAIN)


def edges(bipartite: bool = False) -> torch.Tensor:
    """Node 2 is isolated as a target, node 4 as a source; no loops, and no edge twice."""
    adjacency = torch.rand(NODES, TARGETS if bipartite else NODES, generator=torch.Generator().manual_seed(0)) < 0.4
    adjacency[:, 2], adjacency[4] = False, False
    index = adjacency.nonzero().T
    return index[:, index[0] != index[1]][:, torch.randperm(int((index[0] != index[1]).sum()))]


def case(kind: str, setting: str, classes=BAYESIAN, dtype=torch.float64, **options):
    """A layer in one of the settings, and its arguments."""
    torch.manual_seed(1)
    if kind != "transformer":
        options["add_self_loops"] = "loops" in setting
        options["residual"] = setting == "residual"
    options["concat"] = setting != "mean-of-heads"
    x, index, edge_attr = torch.randn(NODES, IN, dtype=dtype), edges(setting == "bipartite"), None
    if "edge-features" in setting:
        options["edge_dim"], edge_attr = EDGE, torch.randn(index.shape[1], EDGE, dtype=dtype)
    if setting == "bipartite":
        x = (x, torch.randn(TARGETS, 7, dtype=dtype))
    layer = classes[kind](IN if setting != "bipartite" else (IN, 7), OUT, heads=HEADS, **options).to(dtype)
    return layer, x, index, edge_attr


def fix_noise(monkeypatch, noise):
    monkeypatch.setattr(reference, "edge_log_noise", lambda seed, numbers, heads, config, dtype: noise[numbers].to(dtype))


CONFIGS = {
    "WC": ba.AttentionConfig("BAM-WC", gamma_beta=0.3),
    "WC paper": ba.AttentionConfig("BAM-WC", preset="paper", prior_per_head=True),
    "LC": ba.AttentionConfig("BAM-LC", preset="official-code"),
    "LC paper": ba.AttentionConfig("BAM-LC", preset="paper"),
    "WF": ba.AttentionConfig("BAM-WF"),
}


@pytest.mark.parametrize("backend", ["csr", "reference"])
@every_case
def test_equals_dense_attention_with_every_gradient(monkeypatch, kind, setting, backend):
    check_against_dense(monkeypatch, kind, setting, backend, CONFIGS["WC"], "neighborhood")


@pytest.mark.parametrize("scope", ["graph", "neighborhood"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@every_kind
def test_every_prior_and_scope_equals_dense_attention(monkeypatch, kind, config, scope):
    check_against_dense(monkeypatch, kind, "plain", "csr", config, scope)


def check_against_dense(monkeypatch, kind, setting, backend, config, scope):
    layer, x, index, edge_attr = case(kind, setting, config=config, prior_scope=scope, backend=backend)
    noise = torch.randn(index.shape[1] + (NODES if "loops" in setting else 0), HEADS, dtype=torch.float64)
    fix_noise(monkeypatch, noise)
    with ba.record_kl() as kl:
        output = layer(x, index, edge_attr)
    total = kl.total()
    expected, expected_kl = dense_layer(layer, kind, x, index, edge_attr, noise)
    parameters = list(layer.parameters())
    upstream = torch.randn_like(output)
    ours = torch.autograd.grad((output * upstream).sum() + total, parameters, allow_unused=True)
    theirs = torch.autograd.grad((expected * upstream).sum() + expected_kl, parameters, allow_unused=True)
    # float64: the two differ in the order of sums only
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(total, expected_kl, rtol=1e-9, atol=1e-9)
    for (name, _), a, b in zip(layer.named_parameters(), ours, theirs, strict=True):
        assert (a is None) == (b is None), name
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


@every_case
def test_eval_is_pyg_s_layer_bit_for_bit(kind, setting):
    layer, x, index, edge_attr = case(kind, setting, dtype=torch.float32, config=ba.AttentionConfig("BAM-WC"))
    plain, *_ = case(kind, setting, PLAIN, torch.float32)
    plain.load_state_dict({key: value for key, value in layer.state_dict().items() if "bayes_prior" not in key})
    assert torch.equal(layer.eval()(x, index, edge_attr), plain.eval()(x, index, edge_attr))
    # and a checkpoint of PyG's layer loads, leaving the prior as it is
    layer.load_state_dict(plain.state_dict())


@pytest.mark.parametrize("training", [True, False])
@every_case
def test_soft_is_pyg_s_layer_to_rounding(kind, setting, training):
    layer, x, index, edge_attr = case(kind, setting, config=ba.AttentionConfig("soft"))
    plain, *_ = case(kind, setting, PLAIN)
    plain.load_state_dict(layer.state_dict())
    ours = layer.train(training)(x, index, edge_attr, return_attention_weights=True)
    theirs = plain.train(training)(x, index, edge_attr, return_attention_weights=True)
    torch.testing.assert_close(ours, theirs)


@every_case
def test_someone_who_watches_the_messages_sees_the_same_draw(monkeypatch, kind, setting):
    layer, x, index, edge_attr = case(kind, setting, config=ba.AttentionConfig("BAM-WC"))
    fix_noise(monkeypatch, torch.randn(index.shape[1] + NODES, HEADS))
    results, seen = [], []
    for _ in range(2):
        with ba.record_kl() as kl:
            results.append((layer(x, index, edge_attr, return_attention_weights=True), kl.total()))
        layer.register_message_forward_hook(lambda *args: seen.append(args))
    assert len(seen) == 1
    torch.testing.assert_close(*results)


@every_kind
def test_both_directions_of_flow_sample(monkeypatch, kind):
    forth, x, index, _ = case(kind, "plain", config=ba.AttentionConfig("BAM-WF"))
    back, *_ = case(kind, "plain", config=ba.AttentionConfig("BAM-WF"), flow="target_to_source")
    fix_noise(monkeypatch, torch.randn(index.shape[1], HEADS))
    back.register_message_forward_hook(lambda *_: None)
    expected = back(x, index)
    back._message_forward_hooks.clear()
    torch.testing.assert_close(back(x, index), expected)
    assert not torch.allclose(forth(x, index), expected)


@every_kind
def test_edges_changed_in_place_are_noticed(kind):
    layer, x, index, _ = case(kind, "plain", config=ba.AttentionConfig("soft"))
    plain, *_ = case(kind, "plain", PLAIN)
    plain.load_state_dict(layer.state_dict())
    layer(x, index)
    index[0] = (index[0] + 1) % NODES
    torch.testing.assert_close(layer(x, index), plain(x, index))


@every_kind
def test_a_seed_repeats_a_draw(kind):
    layer, x, index, _ = case(kind, "plain", config=ba.AttentionConfig("BAM-WF", weibull_k=1.0))
    draws = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        draws.append(layer(x, index))
    assert torch.equal(draws[0], draws[1])
    assert not torch.allclose(draws[0], draws[2])


@every_kind
def test_an_isolated_node_gets_no_message_and_a_graph_may_have_no_edge(kind):
    layer, x, index, _ = case(kind, "plain", config=ba.AttentionConfig("BAM-WC"))
    alone = layer.lin_skip(x) if kind == "transformer" else layer.bias.expand(NODES, -1)
    with ba.record_kl() as kl:
        torch.testing.assert_close(layer(x, index)[2], alone[2])
        torch.testing.assert_close(layer(x, index[:, :0]), alone)
    assert kl.per_call()[1][1].tolist() == [0.0]
    kl.total().backward()
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in layer.parameters())


@every_kind
def test_an_edge_to_a_node_that_is_not_there_is_refused(kind):
    layer, x, index, _ = case(kind, "plain", config=ba.AttentionConfig("BAM-WF"))
    index[0, 3] = NODES
    with pytest.raises(ValueError, match=r"source of the edges must be in \[0, 10\], got entries in \[0, 11\]"):
        layer(x, index)


@every_kind
def test_value_dropout_spares_scores_and_prior(kind):
    layer, x, index, _ = case(kind, "plain", config=ba.AttentionConfig("BAM-WC"), value_dropout=0.5)
    same, *_ = case(kind, "plain", config=ba.AttentionConfig("BAM-WC"))
    kls, outputs = [], []
    for each in (layer, same):
        each.load_state_dict(same.state_dict())
        torch.manual_seed(0)
        with ba.record_kl() as kl:
            outputs.append(each(x, index))
        kls.append(kl.total())
    torch.testing.assert_close(*kls)
    assert not torch.allclose(*outputs)
    assert torch.equal(layer.eval()(x, index), same.eval()(x, index))


@every_kind
def test_dropout_of_soft_attention_is_sampled_in_eval_on_request(kind):
    layer, x, index, _ = case(kind, "plain", config=ba.AttentionConfig("soft"), dropout=0.5)
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), layer).eval()
    mean = layer(x, index)
    with ba.sampling(model, dropout=True):
        assert not torch.allclose(layer(x, index), mean)
    assert torch.equal(layer(x, index), mean)


@every_kind
def test_subclasses_copies_and_pickles_still_sample(kind):
    class Own(BAYESIAN[kind]):
        pass

    layer, x, index, _ = case(kind, "plain", {kind: Own}, config=ba.AttentionConfig("BAM-WF", weibull_k=1.0))
    plain, *_ = case(kind, "plain", config=ba.AttentionConfig("BAM-WF", weibull_k=1.0))
    mean = layer.eval()(x, index)
    for each in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(plain))):
        each.load_state_dict(layer.state_dict())
        assert torch.equal(each.eval()(x, index), mean)
        assert not torch.allclose(each.train()(x, index), mean)


@every_kind
def test_explaining_masks_edges_of_a_sampled_layer(kind):
    layer, x, index, _ = case(kind, "plain", config=ba.AttentionConfig("BAM-NOKL"))
    alone = layer.lin_skip(x) if kind == "transformer" else layer.bias.expand(NODES, -1)
    layer.explain, layer._apply_sigmoid = True, False
    layer._edge_mask = torch.zeros(index.shape[1], dtype=torch.float64)
    for training in (True, False):
        torch.testing.assert_close(layer.train(training)(x, index), alone)
    layer.explain = False
    assert not torch.allclose(layer.train()(x, index), alone)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"prior_scope": "all"}, "prior_scope must be one of 'graph', 'neighborhood', got 'all'"),
        ({"backend": "cuda"}, "backend must be one of 'auto', .*, got 'cuda'"),
        ({"value_dropout": 1.0}, "value_dropout must be at least 0 and below 1, got 1.0"),
        ({"config": "BAM-WC"}, "config must be an AttentionConfig, got str"),
    ],
)
@every_kind
def test_bad_options_are_named(monkeypatch, kind, option, message):
    from helpers import no_type_checks

    no_type_checks(monkeypatch)
    with pytest.raises(ValueError, match=message):
        BAYESIAN[kind](IN, OUT, **{"config": ba.AttentionConfig("BAM-WC"), **option})


@every_kind
def test_autocast_keeps_noise_and_kl_in_float32(kind):
    layer, x, index, _ = case(kind, "plain", dtype=torch.float32, config=ba.AttentionConfig("BAM-WC"))
    with torch.autocast("cpu", torch.bfloat16), ba.record_kl() as kl:
        output = layer(x, index)
    total = kl.total()
    assert total.dtype == torch.float32
    (output.float().sum() + total).backward()
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters() if p.grad is not None)


@pytest.mark.parametrize("scope", ["graph", "neighborhood"])
def test_memory_is_linear_in_the_edges(scope):
    per_edge = []
    for count in (20_000, 80_000):
        index = torch.randint(0, 500, (2, count))
        layer = BayesianGATConv(
            IN, 16, heads=4, config=ba.AttentionConfig("BAM-WC"), prior_scope=scope, add_self_loops=False
        )
        x = torch.randn(500, IN)

        def step(layer=layer, x=x, index=index):
            with ba.record_kl() as kl:
                loss = layer(x, index).sum()
            (loss + kl.total()).backward()

        step()
        per_edge.append(peak_memory(step, device="cpu") * 2**20 / count)
    # messages of all features alone are 4 · 16 · 4 = 256 bytes; PyG keeps several arrays of that size
    assert per_edge[1] < 1.05 * per_edge[0]
    assert per_edge[1] < (400 if scope == "graph" else 600)


@pytest.mark.compile
@pytest.mark.parametrize("training", [True, False])
def test_a_constructed_layer_compiles_to_one_graph(training):
    layer, x, index, _ = case("gat", "self-loops", dtype=torch.float32, config=ba.AttentionConfig("BAM-WC"))
    layer.train(training)

    def step(x, index):
        with ba.record_kl() as kl:
            out = layer(x, index)
        return out, kl.total()

    output, expected = step(x, index)
    compiled, kl = torch.compile(step, fullgraph=True, backend="aot_eager")(x, index)
    torch.testing.assert_close(kl, expected, rtol=1e-4, atol=1e-5)
    if not training:
        torch.testing.assert_close(compiled, output)


def test_the_same_tensor_of_edges_is_sorted_once_and_anew_after_a_write(monkeypatch):
    # as on a GPU, where comparing its entries would wait for the device
    monkeypatch.setattr(attention, "_COUNTING_DEVICES", ("cpu",))
    monkeypatch.setattr(torch, "equal", lambda *_: pytest.fail("compared"))
    layer, x, index, _ = case("gat", "plain", config=ba.AttentionConfig("BAM-WC"))
    layer(x, index)
    known = attention._SORTED[layer].edges
    layer(x, index)
    assert attention._SORTED[layer].edges is known
    monkeypatch.undo()
    index[1, 0] = (index[1, 0] + 1) % NODES
    layer(x, index)
    assert attention._SORTED[layer].edges is not known
    assert int(attention._SORTED[layer].edges.degree[index[1, 0]]) == int((index[1] == index[1, 0]).sum())


@pytest.mark.parametrize("change", ["another memory", "the other flow"])
def test_the_same_tensor_with_other_edges_is_sorted_anew(change, monkeypatch):
    monkeypatch.setattr(attention, "_COUNTING_DEVICES", ("cpu",))
    layer, x, index, _ = case("gat", "plain", config=ba.AttentionConfig("BAM-WC"))
    layer(x, index)
    known = attention._SORTED[layer].edges
    if change == "another memory":
        index.data = index.flip(0)  # which counts as no write
    else:
        layer.flow = "target_to_source"
    layer(x, index)
    assert torch.equal(attention._SORTED[layer].edges.degree, known.out_degree)


def test_an_equal_tensor_of_edges_is_not_sorted_again():
    layer, x, index, _ = case("gat", "plain", config=ba.AttentionConfig("BAM-WC"))
    layer(x, index)
    known = attention._SORTED[layer].edges
    layer(x, index.clone())
    assert attention._SORTED[layer].edges is known


@pytest.mark.parametrize("name", ["gat", "gatv2", "transformer"])
def test_a_call_that_failed_leaves_nothing_to_the_next(name, monkeypatch):
    layer, x, index, edge_attr = case(name, "plain", config=ba.AttentionConfig("BAM-WC"))
    expected = layer.eval()(x, index, edge_attr)

    def fail(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(attention, "edge_attention", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        layer.train()(x, index, edge_attr)
    assert torch.equal(layer.eval()(x, index, edge_attr), expected)


# sparse features


def _bag_of_words(*, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(23, 31, generator=generator, dtype=dtype)
    x = x * (torch.rand(23, 31, generator=generator) < 0.1)
    return x, torch.randint(0, 23, (2, 60), generator=generator)


@pytest.mark.parametrize("variant", ["soft", "BAM-NOKL", "BAM-WC"])
@pytest.mark.parametrize(
    "options", [{}, {"dropout": 0.4, "value_dropout": 0.3}, {"flow": "target_to_source", "concat": False}]
)
def test_sparse_features_give_the_draw_kl_and_gradient_of_dense_ones(variant, options):
    x, index = _bag_of_words()
    layer = BayesianGATConv(31, 4, heads=3, config=ba.AttentionConfig(variant), **options).double()
    results = []
    # a second pattern in between: the layer must not take the first one's transposed pattern for it
    other = x.roll(1, dims=1).to_sparse_csr()
    for features in (x, x.to_sparse_csr(), other, x.to_sparse_csr()):
        torch.manual_seed(0)
        with ba.record_kl() as kl:
            output = layer(features, index)
        loss = output.square().sum() + (0.1 * kl.total() if len(kl) else 0.0)
        gradients = torch.autograd.grad(loss, list(layer.parameters()), allow_unused=True)
        results.append([output, *(gradient for gradient in gradients if gradient is not None)])
    dense, *sparse = results
    assert not torch.allclose(sparse[1][0], dense[0])
    for found in (sparse[0], sparse[2]):
        for ours, theirs in zip(found, dense, strict=True):
            # float64; gradients that cancel leave rounding errors
            assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)


def test_sparse_features_are_pygs_in_eval_mode_and_where_messages_are_watched():
    x, index = _bag_of_words(dtype=torch.float32)
    layer = BayesianGATConv(31, 4, heads=3, config=ba.AttentionConfig("BAM-WC"))
    assert torch.allclose(layer.eval()(x.to_sparse_csr(), index), layer(x, index), atol=1e-6)
    layer.train()
    seen = []
    layer.register_message_forward_hook(lambda layer, inputs, output: seen.append(output))
    torch.manual_seed(0)
    layer(x.to_sparse_csr(), index).sum().backward()
    assert seen
    assert layer.lin.weight.grad is not None


def test_pattern_of_sparse_features_is_built_once_for_many_steps(monkeypatch):
    from bayesattn.integrations.pyg import features

    x, index = _bag_of_words(dtype=torch.float32)
    layer = BayesianGATConv(31, 4, config=ba.AttentionConfig("soft"))
    sorts, plain = [], torch.argsort
    monkeypatch.setattr(features.torch, "argsort", lambda *a, **k: sorts.append(1) or plain(*a, **k))
    sparse = x.to_sparse_csr()
    layer(sparse, index).sum().backward()
    monkeypatch.undo()
    known = features._PATTERNS[layer]
    dropped = torch.sparse_csr_tensor(
        sparse.crow_indices(), sparse.col_indices(), 2 * sparse.values(), x.shape, check_invariants=False
    )
    layer(dropped, index).sum().backward()
    assert sorts
    assert features._PATTERNS[layer] is known
