"""PyG's attention layers: exact when off, sampled when on, KL equal to dense attention over the adjacency matrix."""

import copy

import pytest
import torch
from torch import nn
from torch_geometric.nn import GAT, AGNNConv, GATConv, GATv2Conv, SuperGATConv, TransformerConv

import bayesattn as ba
from bayesattn.convert import bayesianize, conversion_report, load_bayesian, restore, save_bayesian
from helpers import kl_oracle

VARIANTS = ("BAM-NOKL", "BAM-LF", "BAM-LC", "BAM-WF", "BAM-WC")
NODES, TARGETS, IN, OUT, HEADS, EDGE = 11, 6, 5, 4, 3, 2
LAYERS = {"gat": GATConv, "gatv2": GATv2Conv, "transformer": TransformerConv}


def edges(bipartite: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    adjacency = torch.rand(NODES, TARGETS if bipartite else NODES, generator=generator) < 0.3
    adjacency[:, 2] = False
    return adjacency.nonzero().T.contiguous()


def case(kind: str, setting: str):
    """A layer and its arguments in one of the settings the layers know."""
    torch.manual_seed(1)
    options = {} if kind == "transformer" else {"add_self_loops": setting == "self-loops"}
    x = torch.randn(NODES, IN)
    if setting == "edge-features":
        index = edges()
        return LAYERS[kind](IN, OUT, heads=HEADS, edge_dim=EDGE, **options), (x, index, torch.randn(index.shape[1], EDGE))
    if setting == "bipartite":
        return LAYERS[kind]((IN, 7), OUT, heads=HEADS, **options), ((x, torch.randn(TARGETS, 7)), edges(True))
    if setting == "mean-of-heads":
        return LAYERS[kind](IN, OUT, heads=HEADS, concat=False, **options), (x, edges())
    return LAYERS[kind](IN, OUT, heads=HEADS, **options), (x, edges())


SETTINGS = ("plain", "self-loops", "edge-features", "bipartite", "mean-of-heads")
every_case = pytest.mark.parametrize(
    ("kind", "setting"), [(k, s) for k in LAYERS for s in SETTINGS if (k, s) != ("transformer", "self-loops")]
)


@pytest.mark.parametrize("variant", VARIANTS)
@every_case
def test_off_is_bit_identical_and_restore_leaves_no_trace(kind, setting, variant):
    layer, args = case(kind, setting)
    model = nn.ModuleDict({"conv": layer.eval()})
    before, trace, state = layer(*args), sorted(vars(layer)), copy.deepcopy(layer.state_dict())
    bayesianize(model, ba.AttentionConfig(variant))
    assert torch.equal(layer(*args), before)
    with ba.sampling(model), ba.record_kl():
        assert not torch.equal(layer(*args), before)
    assert {key for key in layer.state_dict() if "bayes_prior" not in key} == set(state)
    restore(model)
    assert type(layer) is LAYERS[kind]
    assert sorted(vars(layer)) == trace
    assert list(layer.state_dict()) == list(state)
    assert torch.equal(layer(*args), before)


@every_case
def test_vanishing_noise_gives_the_mean_and_its_weights(kind, setting):
    layer, args = case(kind, setting)
    layer.eval()
    before, (index, weights) = layer(*args, return_attention_weights=True)
    model = bayesianize(nn.ModuleDict({"conv": layer}), ba.AttentionConfig("BAM-LF", sigma_q=1e-7))
    with ba.sampling(model):
        after, (same_index, sampled) = layer(*args, return_attention_weights=True)
    assert torch.equal(index, same_index)
    # float32, and noise of 1e-7
    torch.testing.assert_close(sampled, weights, atol=2e-6, rtol=0.0)
    torch.testing.assert_close(after, before, atol=1e-5, rtol=0.0)


@every_case
def test_returned_weights_are_the_sampled_ones(kind, setting):
    layer, args = case(kind, setting)
    model = bayesianize(nn.ModuleDict({"conv": layer.eval()}), ba.AttentionConfig("BAM-WF", weibull_k=1.0))
    mean = layer(*args, return_attention_weights=True)[1][1]
    with ba.sampling(model):
        _, (index, weights) = layer(*args, return_attention_weights=True)
    assert (weights - mean).abs().max() > 0.05
    rows = torch.zeros(NODES, HEADS).index_add(0, index[1], weights.detach())
    has_edge = torch.zeros(NODES, dtype=torch.bool).index_fill(0, index[1], True)
    torch.testing.assert_close(rows, has_edge[:, None].expand(-1, HEADS).float())


def dense(layer, kind, args):
    """Scores over all pairs of nodes, keys of the nodes and the adjacency, from the layer's parameters by hand."""
    x, index = args[0], args[1]
    source, target = (x, x) if isinstance(x, torch.Tensor) else x
    split = lambda linear, value: linear(value).view(-1, HEADS, OUT)  # noqa: E731
    if kind == "gat":
        keys = split(layer.lin if layer.lin is not None else layer.lin_src, source)
        other = split(layer.lin if layer.lin is not None else layer.lin_dst, target)
        raw = (other * layer.att_dst).sum(-1)[:, None] + (keys * layer.att_src).sum(-1)[None]
        scores = nn.functional.leaky_relu(raw, layer.negative_slope)
    elif kind == "gatv2":
        keys, other = split(layer.lin_l, source), split(layer.lin_r, target)
        both = nn.functional.leaky_relu(other[:, None] + keys[None], layer.negative_slope)
        scores = (both * layer.att).sum(-1)
    else:
        keys, other = split(layer.lin_key, source), split(layer.lin_query, target)
        scores = torch.einsum("ihd,jhd->ijh", other, keys) / OUT**0.5
    adjacency = torch.zeros(len(target), len(source), dtype=torch.bool)
    adjacency[index[1], index[0]] = True
    return scores.permute(2, 0, 1)[None], keys, adjacency[None, None]


@pytest.mark.parametrize("variant", VARIANTS[1:])
@pytest.mark.parametrize("setting", ["plain", "bipartite"])
@pytest.mark.parametrize("kind", LAYERS)
def test_kl_is_that_of_dense_attention_over_the_adjacency(kind, setting, variant):
    layer, args = case(kind, setting)
    config = ba.AttentionConfig(variant, preset="paper", gamma_beta=0.3)
    model = bayesianize(nn.ModuleDict({"conv": layer}), config).train()
    with ba.record_kl(model) as kl:
        layer(*args)
    scores, keys, adjacency = dense(layer, kind, args)
    prior = None
    if layer.bayes_prior is not None:
        p = layer.bayes_prior
        logits = (torch.relu(keys @ p.weight_in[0] + p.bias_in[0]) @ p.weight_out[0] + p.bias_out[0]).squeeze(-1).T
        prior = torch.log_softmax(logits.masked_fill(~adjacency[0, 0].any(dim=0), -torch.inf), dim=-1)[None, :, None]
    expected = torch.tensor(kl_oracle(scores, prior, adjacency, config))
    assert list(kl.per_layer()) == ["conv"]
    torch.testing.assert_close(kl.per_call()[0][1].double(), expected, rtol=1e-4, atol=1e-4)
    kl.total().backward()
    if layer.bayes_prior is not None:
        assert layer.bayes_prior.weight_in.grad.abs().max() > 0


def test_a_model_of_pyg_trains_saves_and_loads(tmp_path):
    model = bayesianize(GAT(IN, 8, num_layers=2, out_channels=3, heads=2, v2=True), ba.AttentionConfig("BAM-WC"))
    x, index = torch.randn(NODES, IN), edges()
    assert len(conversion_report(model).converted) == 2
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        with ba.record_kl() as kl:
            nll = nn.functional.cross_entropy(model(x, index), torch.arange(NODES) % 3)
        ba.elbo(nll, kl.total(), labels_per_example=float(NODES), max_share=None).loss.backward()
        optimizer.step()
    save_bayesian(model.eval(), tmp_path)
    host = {key: value for key, value in model.state_dict().items() if "bayes_prior" not in key}
    other = GAT(IN, 8, num_layers=2, out_channels=3, heads=2, v2=True).eval()
    other.load_state_dict(host)
    load_bayesian(other, tmp_path)
    assert torch.equal(other(x, index), model(x, index))
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))
    prediction = ba.predict(other, [x, index], num_samples=4, seed=0)
    assert prediction.samples.shape == (4, NODES, 3)


@pytest.mark.parametrize("layer", [AGNNConv(), SuperGATConv(IN, OUT)])
def test_other_attention_layers_are_refused_by_name(layer):
    with pytest.raises(ValueError, match=rf"{type(layer).__name__} .*no Bayesian counterpart"):
        bayesianize(nn.ModuleDict({"conv": layer}), ba.AttentionConfig("BAM-WC"))


@pytest.mark.parametrize("kind", LAYERS)
def test_a_sparse_adjacency_has_the_kl_of_its_edges(kind):
    layer, (x, index) = case(kind, "plain")
    bayesianize(nn.ModuleDict({"conv": layer}), ba.AttentionConfig("BAM-WC")).train()
    adjacency = torch.sparse_coo_tensor(
        index.flip(0), torch.ones(index.shape[1]), (NODES, NODES), check_invariants=True
    ).coalesce()
    with ba.record_kl() as kl:
        layer(x, adjacency)
        layer(x, index)
    (_, sparse), (_, plain) = kl.per_call()
    torch.testing.assert_close(sparse, plain)


@pytest.mark.compile
@pytest.mark.parametrize("kind", LAYERS)
def test_compiles_to_one_graph(kind):
    layer, args = case(kind, "plain")
    bayesianize(nn.ModuleDict({"conv": layer}), ba.AttentionConfig("BAM-WC")).train()

    def step(*args):
        with ba.record_kl() as kl:
            out = layer(*args)
        return out, kl.total()

    _, expected = step(*args)
    _, kl = torch.compile(step, fullgraph=True, backend="aot_eager")(*args)
    torch.testing.assert_close(kl, expected, rtol=1e-4, atol=1e-5)
