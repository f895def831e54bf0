"""predict on graphs: no hint needed, whatever form the graph has, and every draw is one of the whole graph."""

import pytest
import torch
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GAT, global_mean_pool

import bayesattn as ba
from bayesattn.convert import bayesianize

IN, CLASSES, DRAWS = 5, 3, 4
QUIET = ba.AttentionConfig("BAM-NOKL", weibull_k=1e12)
NOISY = ba.AttentionConfig("BAM-WC", weibull_k=1.0)


def graph(nodes: int, seed: int) -> Data:
    generator = torch.Generator().manual_seed(seed)
    ring = torch.arange(nodes)
    index = torch.stack([torch.cat([ring, ring]), torch.cat([(ring + 1) % nodes, (ring + 2) % nodes])])
    return Data(x=torch.randn(nodes, IN, generator=generator), edge_index=index)


class NodeModel(nn.Module):
    def __init__(self, config: ba.AttentionConfig) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.gat = bayesianize(GAT(IN, 8, num_layers=2, out_channels=CLASSES, heads=2), config)

    def forward(self, x, edge_index):
        return self.gat(x, edge_index)


class DataModel(NodeModel):
    def forward(self, data):
        return super().forward(data.x, data.edge_index)


class GraphModel(NodeModel):
    def forward(self, x, edge_index, batch):
        return global_mean_pool(super().forward(x, edge_index), batch)


class BatchModel(NodeModel):
    def forward(self, data):
        return global_mean_pool(super().forward(data.x, data.edge_index), data.batch)


def form(name: str) -> tuple[type[NodeModel], object]:
    nodes, graphs = graph(11, 0), Batch.from_data_list([graph(n, n) for n in (7, 2, 5)])
    return {
        "arguments": (NodeModel, [nodes.x, nodes.edge_index]),
        "names": (NodeModel, {"x": nodes.x, "edge_index": nodes.edge_index}),
        # as many nodes as edge_index has rows
        "two nodes": (NodeModel, [graph(2, 1).x, graph(2, 1).edge_index]),
        "Data": (DataModel, nodes),
        "Batch": (DataModel, graphs),
        "batch vector": (GraphModel, [graphs.x, graphs.edge_index, graphs.batch]),
        "graphs of a Batch": (BatchModel, graphs),
    }[name]


FORMS = ("arguments", "names", "two nodes", "Data", "Batch", "batch vector", "graphs of a Batch")


def call(model: nn.Module, given) -> torch.Tensor:
    return model(**given) if isinstance(given, dict) else model(*given) if isinstance(given, list) else model(given)


@pytest.mark.parametrize("name", FORMS)
def test_every_draw_is_of_the_whole_graph(name):
    """With vanishing noise each draw is the eval output; nodes without neighbors are far from it."""
    kind, given = form(name)
    model = kind(QUIET).eval()
    expected = call(model, given).detach()
    for chunk_size in (None, 2):
        logits = ba.predict(model, given, num_samples=DRAWS, seed=0, chunk_size=chunk_size).logits
        torch.testing.assert_close(logits, expected.expand(DRAWS, *expected.shape), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FORMS)
def test_draws_are_those_of_a_loop(name):
    kind, given = form(name)
    model = kind(NOISY).eval()
    with torch.no_grad(), ba.sampling(model), torch.random.fork_rng([]):
        torch.manual_seed(6)
        by_hand = torch.stack([call(model, given) for _ in range(DRAWS)])
    logits = ba.predict(model, given, num_samples=DRAWS, seed=6).logits
    assert torch.equal(logits, by_hand)
    assert len({tuple(draw.flatten().tolist()) for draw in logits}) == DRAWS


def test_a_graph_said_to_be_a_batch_is_refused():
    model, nodes = NodeModel(NOISY), graph(11, 0)
    with pytest.raises(ValueError, match=r"batches of one length, got 11 in argument 0, 2 in argument 1"):
        ba.predict(model, [nodes.x, nodes.edge_index], num_samples=2, seed=0, batch_dims=0)
    # a node is no example: its noise is the graph's
    with pytest.raises(
        ValueError, match=r"with 11 seeds needs .* a multiple of 11, got a batch of 1.*predict without batch_dims"
    ):
        ba.predict(model, [nodes.x, nodes.edge_index], num_samples=2, seed=0, batch_dims=[0, None])
