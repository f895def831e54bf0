"""Batches of sampled neighborhoods: the mean KL of an epoch's batches is the KL of the whole graph, with its gradient."""

import pytest
import torch
import torch_geometric.typing
from torch import nn
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader

import bayesattn as ba
from bayesattn.integrations.pyg import BayesianGATConv, BayesianGATv2Conv, BayesianTransformerConv, neighbor_batch

NODES, SEEDS, IN, HEADS, OUT = 33, 11, 5, 3, 2
LAYERS = {"gat": BayesianGATConv, "gatv2": BayesianGATv2Conv, "transformer": BayesianTransformerConv}


class TwoLayers(nn.Module):
    def __init__(self, kind: str, config: ba.AttentionConfig, **options) -> None:
        super().__init__()
        torch.manual_seed(1)
        options = {"config": config, "prior_scope": "neighborhood", "heads": HEADS, **options}
        self.first = LAYERS[kind](IN, 4, **options)
        self.second = LAYERS[kind](4 * HEADS, OUT, **options)

    def forward(self, x, edge_index):
        return self.second(torch.tanh(self.first(x, edge_index)), edge_index)


def whole_graph() -> Data:
    """Every node has an edge to itself, which GAT's layers would add, too, and about four others."""
    generator = torch.Generator().manual_seed(0)
    adjacency = (torch.rand(NODES, NODES, generator=generator) < 0.12).fill_diagonal_(True)
    x = torch.randn(NODES, IN, generator=generator, dtype=torch.float64)
    return Data(x=x, edge_index=adjacency.nonzero().T.contiguous())


def batches(graph: Data, num_seeds: int = SEEDS) -> list[Data]:
    """What NeighborLoader gives for all neighbors of two steps: seeds first, edges in local numbers, `batch_size`."""
    source, target = graph.edge_index
    found = []
    for seeds in torch.randperm(NODES, generator=torch.Generator().manual_seed(2)).split(num_seeds):
        inner = torch.cat([seeds, source[torch.isin(target, seeds)]]).unique()
        is_taken = torch.isin(target, inner)
        others = source[is_taken].unique()
        nodes = torch.cat([seeds, others[~torch.isin(others, seeds)]])
        number = torch.full((NODES,), -1).index_put((nodes,), torch.arange(len(nodes)))
        edge_index = number[graph.edge_index[:, is_taken]]
        found.append(Data(x=graph.x[nodes], edge_index=edge_index, n_id=nodes, batch_size=len(seeds)))
    return found


def kl_and_gradient(model: nn.Module, graph: Data) -> torch.Tensor:
    with ba.record_kl() as scope:
        model(graph.x, graph.edge_index)
    kl = scope.total()
    gradients = torch.autograd.grad(kl, list(model.parameters()), allow_unused=True)
    return torch.cat([kl.view(1), *(g.flatten() for g in gradients if g is not None)])


def estimates(model: nn.Module, parts: list[Data], **options) -> torch.Tensor:
    found = []
    for part in parts:
        with neighbor_batch(model, batch_size=part.batch_size, num_nodes=NODES, **options):
            found.append(kl_and_gradient(model, part))
    return torch.stack(found)


@pytest.mark.parametrize("reduction", ["sum", "row_mean", "mean"])
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("variant", ["BAM-WC", "BAM-LF"])
def test_mean_over_an_epoch_s_batches_is_the_kl_of_the_graph_with_its_gradient(kind, variant, reduction):
    graph = whole_graph()
    model = TwoLayers(kind, ba.AttentionConfig(variant, kl_reduction=reduction)).double().eval()
    expected = kl_and_gradient(model, graph)
    found = estimates(model, batches(graph), num_edges=graph.num_edges).mean(dim=0)
    # the same terms in another order, in float64
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_batches_of_unequal_size_are_each_unbiased():
    graph = whole_graph()
    model = TwoLayers("gat", ba.AttentionConfig("BAM-WC", kl_reduction="sum")).double().eval()
    parts = batches(graph, num_seeds=7)
    assert [part.batch_size for part in parts] == [7, 7, 7, 7, 5]
    weights = torch.tensor([part.batch_size / NODES for part in parts], dtype=torch.float64)
    # N/B times the KL of the seeds: weighted by B/N, the batches add up to the graph
    found = weights @ estimates(model, parts)
    torch.testing.assert_close(found, kl_and_gradient(model, graph), rtol=1e-9, atol=1e-11)


def test_who_watches_the_messages_gets_the_same_kl():
    part = batches(whole_graph())[0]
    model = TwoLayers("gat", ba.AttentionConfig("BAM-WC")).double().eval()
    plain = estimates(model, [part])
    model.first.register_message_forward_hook(lambda module, inputs, output: None)
    torch.testing.assert_close(estimates(model, [part]), plain, rtol=1e-9, atol=1e-11)


def test_after_the_scope_a_graph_counts_whole_again():
    graph = whole_graph()
    model = TwoLayers("gat", ba.AttentionConfig("BAM-WC")).double().eval()
    before = kl_and_gradient(model, graph)
    with pytest.raises(RuntimeError, match="mine"), neighbor_batch(model, batch_size=3, num_nodes=NODES):
        raise RuntimeError("mine")
    torch.testing.assert_close(kl_and_gradient(model, graph), before, rtol=0.0, atol=0.0)


def test_training_on_batches_learns():
    graph = whole_graph()
    labels = (graph.x[:, 0] > 0).long()
    model = TwoLayers("gat", ba.AttentionConfig("BAM-WC"))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    losses = []
    for _ in range(25):
        for part in batches(graph):
            with ba.record_kl() as kl, neighbor_batch(model, batch_size=part.batch_size, num_nodes=NODES):
                logits = model(part.x.float(), part.edge_index)[: part.batch_size]
            nll = nn.functional.cross_entropy(logits, labels[part.n_id[: part.batch_size]])
            optimizer.zero_grad()
            ba.elbo(nll, kl.total(), labels_per_example=float(NODES), max_share=None).loss.backward()
            optimizer.step()
            losses.append(float(nll.detach()))
    assert sum(losses[-6:]) < 0.8 * sum(losses[:6])


@pytest.mark.skipif(
    not (torch_geometric.typing.WITH_PYG_LIB or torch_geometric.typing.WITH_TORCH_SPARSE),
    reason="PyG's NeighborLoader needs pyg-lib or torch-sparse",
)
def test_batches_of_the_loader_itself():
    graph = whole_graph()
    model = TwoLayers("gat", ba.AttentionConfig("BAM-WC")).double().eval()
    loader = NeighborLoader(graph, num_neighbors=[-1, -1], batch_size=SEEDS, shuffle=True)
    found = estimates(model, list(loader)).mean(dim=0)
    torch.testing.assert_close(found, kl_and_gradient(model, graph), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("options", "layer", "message"),
    [
        ({"batch_size": 0, "num_nodes": 9}, {}, "batch_size must be from 1 to 9, the number of nodes, got 0"),
        ({"batch_size": 10, "num_nodes": 9}, {}, "batch_size must be from 1 to 9, the number of nodes, got 10"),
        (
            {"batch_size": 2, "num_nodes": 9, "num_edges": 0},
            {},
            "num_edges must be an integer of at least 1, or None, got 0",
        ),
        (
            {"batch_size": 2, "num_nodes": 9},
            {"prior_scope": "graph"},
            "prior_scope must be 'neighborhood' in batches, got 'graph'",
        ),
    ],
)
def test_impossible_batches_are_refused(options, layer, message):
    model = TwoLayers("gat", ba.AttentionConfig("BAM-WC"), **layer)
    with pytest.raises(ValueError, match=message), neighbor_batch(model, **options):
        pass


def test_a_mean_over_edges_needs_their_number_and_a_model_needs_a_layer():
    model = TwoLayers("gat", ba.AttentionConfig("BAM-WC", kl_reduction="mean")).double()
    with pytest.raises(ValueError, match=r"num_edges must be the number of edges .* kl_reduction is 'mean', got None"):
        estimates(model, batches(whole_graph())[:1])
    scope = neighbor_batch(nn.Linear(2, 2), batch_size=1, num_nodes=2)
    with (
        pytest.raises(ValueError, match=r"model must have at least one layer of bayesattn.integrations.pyg, got Linear"),
        scope,
    ):
        pass
