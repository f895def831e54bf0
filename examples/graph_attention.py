"""A Bayesian graph attention network: convert PyG's GAT, train it in a bare loop, ask which nodes it is unsure about.

    python examples/graph_attention.py

The graph is made up: two communities with mostly inner edges; some nodes have as many friends on the other side.
"""

import argparse

import torch
import torch.nn.functional as F
from torch_geometric.nn import GAT

import bayesattn as ba
from bayesattn.convert import bayesianize, conversion_report


def make_graph(nodes: int = 120, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return features that say little, edges that say more, and the community of each node."""
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.arange(nodes) % 2).long()
    chance = torch.where(labels[:, None] == labels[None], 0.15, 0.03)
    adjacency = torch.rand(nodes, nodes, generator=generator) < chance
    features = torch.randn(nodes, 8, generator=generator)
    features[:, 0] += labels - 0.5
    return features, adjacency.nonzero().T, labels


def main(epochs: int) -> float:
    """Train on 20 nodes and return the accuracy on the others."""
    torch.manual_seed(0)
    x, edge_index, labels = make_graph()
    model = bayesianize(
        GAT(8, 16, num_layers=2, out_channels=2, heads=4, v2=True, dropout=0.3), ba.AttentionConfig("BAM-WC")
    )
    print(conversion_report(model))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-3)
    schedule, train = ba.KLSchedule("sigmoid", anneal_rate=0.1), torch.arange(20)
    for epoch in range(epochs):
        model.train()
        optimizer.zero_grad()
        with ba.record_kl(model) as kl:
            nll = F.cross_entropy(model(x, edge_index)[train], labels[train])
        # one graph, 20 labels: they share its KL
        loss = ba.elbo(nll, kl.total(), kl_weight=schedule(epoch), labels_per_example=float(len(train)))
        loss.loss.backward()
        optimizer.step()
    # a graph cannot be repeated like a batch, so one draw at a time
    prediction = ba.predict(model, [x, edge_index], num_samples=20, seed=0)
    right = (prediction.mean.argmax(dim=-1) == labels)[20:]
    sure = (prediction.entropy <= prediction.entropy[20:].median())[20:]
    print(f"accuracy {right.float().mean():.3f}; of the surer half {right[sure].float().mean():.3f}")
    return float(right.float().mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=100)
    main(parser.parse_args().epochs)
