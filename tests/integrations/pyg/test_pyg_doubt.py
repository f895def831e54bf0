"""Doubt of graph models: exact against autograd on written-out attention, linearized draws within their standard error."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("torch_geometric")
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv, global_mean_pool

import bayesattn as ba
from bayesattn.doubt import graphs
from helpers import no_type_checks

NODES, FEATURES, HEADS, CLASSES = 13, 5, 2, 3
DRAWS = 40
NOISE = math.pi**2 / (6 * 5.0**2)


@pytest.fixture(autouse=True)
def _fewer_draws(monkeypatch):
    monkeypatch.setattr(graphs, "DRAWS", DRAWS)


class Graph(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.first = layer(FEATURES, 4, heads=HEADS)
        self.second = layer(4 * HEADS, CLASSES, heads=1)

    def forward(self, x, edge_index):
        return self.second(F.elu(self.first(x, edge_index)), edge_index)


def example(layer=GATConv):
    torch.manual_seed(0)
    edge_index = torch.randint(0, NODES, (2, 37)).unique(dim=1)
    return Graph(layer).double().eval(), [torch.randn(NODES, FEATURES).double(), edge_index]


def written_out(model, x, edge_index):
    """Return logits of two GAT layers as dense attention, with an array of zeros on the scores of each."""
    allowed = torch.eye(NODES, dtype=torch.bool)
    allowed[edge_index[1], edge_index[0]] = True
    added = []
    for number, layer in enumerate((model.first, model.second)):
        heads, width = layer.heads, layer.out_channels
        projected = layer.lin(x).view(NODES, heads, width)
        source, target = ((projected * att).sum(-1) for att in (layer.att_src, layer.att_dst))
        scores = F.leaky_relu(target[:, None] + source[None], 0.2).permute(2, 0, 1)
        added.append(torch.zeros_like(scores).requires_grad_())
        weights = (scores + added[-1]).masked_fill(~allowed, -torch.inf).softmax(-1)
        x = torch.einsum("hij,jhd->ihd", weights, projected).flatten(1) + layer.bias
        x = F.elu(x) if number == 0 else x
    return x, added


def test_equals_autograd_on_written_out_scores(monkeypatch):
    monkeypatch.setattr(graphs, "MOST_ENTRIES", 700)  # a few answers at a time
    model, inputs = example()
    logits, added = written_out(model, *inputs)
    result = ba.uncertainty(model, inputs)
    assert result.method == "closed-form"
    with torch.no_grad():
        plain = model(*inputs)
    assert torch.equal(result.probabilities, plain.softmax(-1))
    assert torch.allclose(plain, logits)
    top = logits.topk(2).indices
    for node in range(NODES):
        margin = logits[node, top[node, 0]] - logits[node, top[node, 1]]
        squares = [NOISE * g.square() for g in torch.autograd.grad(margin, added, retain_graph=True)]
        assert torch.allclose(result.by_head["first"][node], squares[0].sum(dim=(1, 2)))
        assert torch.allclose(result.by_layer["second"][node], squares[1].sum())
        assert torch.allclose(result.std[node].square(), sum(s.sum() for s in squares))
        assert torch.allclose(result.by_token[node], sum(s.sum(dim=(0, 1)) for s in squares))


@pytest.mark.parametrize("layer", [GATConv, GATv2Conv, TransformerConv])
def test_linearized_draws_are_within_their_standard_error(layer):
    model, inputs = example(layer)
    exact = ba.uncertainty(model, inputs)
    drawn = ba.uncertainty(model, inputs, method="linearized", seed=3)
    assert drawn.method == "linearized"
    assert drawn.by_layer == {}
    assert torch.equal(drawn.probabilities, exact.probabilities)
    error = math.sqrt(2.0 / DRAWS)
    assert ((drawn.std / exact.std).square() - 1.0).abs().max() < 4.0 * error


def test_a_seed_repeats_linearized_draws(monkeypatch):
    monkeypatch.setattr(graphs, "DRAWS", 2)
    model, inputs = example()
    first, again, other = (ba.uncertainty(model, inputs, method="linearized", seed=seed).std for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_equals_the_variance_of_draws_with_tiny_noise():
    model, inputs = example(TransformerConv)
    tiny, draws = ba.AttentionConfig("BAM-NOKL", weibull_k=3000.0), 150
    exact = ba.uncertainty(model, inputs, config=tiny)
    assert exact.by_token.shape == (NODES, NODES)
    assert torch.allclose(exact.by_token.sum(-1), exact.std.square())
    drawn = ba.uncertainty(model, inputs, config=tiny, method="draws", num_samples=draws)
    assert drawn.method == "draws"
    assert ((drawn.std / exact.std).square() - 1.0).abs().max() < 5.0 * math.sqrt(2.0 / (draws - 1))


def test_many_nodes_are_linearized_and_the_result_says_so(monkeypatch):
    monkeypatch.setattr(graphs, "MOST_EXACT", 5)
    model, inputs = example()
    assert ba.uncertainty(model, inputs).method == "linearized"
    assert ba.uncertainty(model, inputs, nodes=[1, 4, 6]).method == "closed-form"


def test_some_nodes():
    model, inputs = example()
    whole = ba.uncertainty(model, inputs)
    chosen = torch.tensor([7, 2])
    some = ba.uncertainty(model, inputs, nodes=chosen)
    assert torch.allclose(some.std, whole.std[chosen])
    assert torch.equal(some.label, whole.label[chosen])
    assert torch.allclose(some.by_token, whole.by_token[chosen])
    mask = torch.zeros(NODES, dtype=torch.bool)
    mask[chosen] = True
    assert torch.allclose(ba.uncertainty(model, inputs, nodes=mask).std, whole.std[[2, 7]])
    logit = ba.uncertainty(model, inputs, target=1, nodes=chosen)
    own = ba.uncertainty(model, inputs, target=lambda logits: logits[:, 1], nodes=chosen)
    assert torch.allclose(logit.std, own.std)


def test_graphs_of_a_batch_have_one_answer_each():
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = GATConv(FEATURES, CLASSES)

        def forward(self, x, edge_index, batch):
            return global_mean_pool(self.layer(x, edge_index), batch)

    torch.manual_seed(0)
    model, x = Classifier().double().eval(), torch.randn(8, FEATURES).double()
    edges = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 3]])
    whole = ba.uncertainty(model, [x, torch.cat([edges, edges + 4], 1), torch.tensor([0] * 4 + [1] * 4)])
    for number in range(2):
        alone = ba.uncertainty(model, [x[4 * number : 4 * number + 4], edges, torch.zeros(4, dtype=torch.long)])
        assert torch.allclose(whole.std[number], alone.std[0])


def test_a_model_of_bayesian_layers_and_a_plain_one_agree_and_stay_as_they_are():
    model, inputs = example()
    kinds = [type(module) for module in model.modules()]
    plain = ba.uncertainty(model, inputs)
    assert [type(module) for module in model.modules()] == kinds
    ba.bayesianize(model, ba.AttentionConfig("BAM-WC"))
    assert torch.equal(ba.uncertainty(model, inputs).std, plain.std)
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"nodes": [NODES]}, f"nodes must be positions of the {NODES} nodes"),
        ({"nodes": [0.5]}, "nodes must be a list of positions or a boolean mask, got"),
        ({"nodes": []}, "nodes must be a list of positions or a boolean mask, got"),
        ({"nodes": torch.zeros(NODES, dtype=torch.bool)}, "nodes must select at least one node, got a mask without True"),
        ({"target": lambda logits: logits[:, 0].detach()}, "does not depend on the attention"),
        ({"target": lambda logits: logits[:, 0].detach(), "method": "linearized"}, "does not depend on the attention"),
    ],
)
def test_bad_arguments_are_refused_by_name(options, match, monkeypatch):
    no_type_checks(monkeypatch)
    model, inputs = example()
    with pytest.raises(ValueError, match=match):
        ba.uncertainty(model, inputs, **options)
    assert type(model.first) is GATConv


@pytest.mark.parametrize("options", [{"method": "linearized"}, {"nodes": [0]}])
def test_sequences_have_no_nodes(options):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(5 * 8, 3))
    with pytest.raises(ValueError, match="are for graphs"):
        ba.uncertainty(model, torch.randn(4, 5, 8), **options)
