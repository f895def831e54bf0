"""Graphs made worse on purpose: noisy features, edges added at random or taken away, wrong labels."""

from dataclasses import replace

import torch

from bayesattn.recipes.graph.data import Graph, undirected


def add_feature_noise(graph: Graph, strength: float, seed: int = 0) -> Graph:
    """Add Gaussian noise to every feature, of `strength` standard deviations of the training nodes' features.

    The same seed gives the same pattern at every strength.
    """
    if not 0.0 <= strength < float("inf"):
        raise ValueError(f"strength is {strength!r}; allowed: a finite number of at least 0")
    noise = torch.randn(graph.features.shape, generator=torch.Generator().manual_seed(seed))
    scale = strength * float(graph.features[graph.splits["train"]].std(correction=0))
    return replace(graph, features=graph.features + scale * noise if scale else graph.features)


def add_edges(graph: Graph, share: float, seed: int = 0) -> Graph:
    """Add undirected edges between random nodes, `share` times as many as there are; a few may exist already."""
    if not 0.0 <= share < float("inf"):
        raise ValueError(f"share is {share!r}; allowed: a finite number of at least 0")
    source, target = graph.edge_index
    count = round(share * int((source < target).sum()))
    new = torch.randint(graph.num_nodes, (2, count), generator=torch.Generator().manual_seed(seed))
    return replace(graph, edge_index=undirected(torch.cat([graph.edge_index, new], dim=1), graph.num_nodes))


def remove_edges(graph: Graph, share: float, seed: int = 0) -> Graph:
    """Take away a random `share` of the undirected edges; self-loops stay."""
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"share is {share!r}; allowed: 0 to 1")
    source, target = graph.edge_index
    once = graph.edge_index[:, source < target]
    order = torch.randperm(once.shape[1], generator=torch.Generator().manual_seed(seed))
    kept = once[:, order[round(share * len(order)) :]]
    return replace(graph, edge_index=undirected(kept, graph.num_nodes))


def change_labels(graph: Graph, share: float, seed: int = 0) -> Graph:
    """Give a random `share` of the training nodes another class, any with the same probability."""
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"share is {share!r}; allowed: 0 to 1")
    generator = torch.Generator().manual_seed(seed)
    train = graph.splits["train"]
    chosen = train[torch.randperm(len(train), generator=generator)[: round(share * len(train))]]
    shift = torch.randint(1, graph.num_classes, chosen.shape, generator=generator)
    labels = graph.labels.clone()
    labels[chosen] = (labels[chosen] + shift) % graph.num_classes
    return replace(graph, labels=labels)
