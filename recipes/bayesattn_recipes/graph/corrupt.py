"""Graphs made worse on purpose: noisy features, edges added at random or taken away, wrong labels and few of them."""

from dataclasses import replace

import torch

from bayesattn_recipes.graph.data import Graph, undirected


def add_feature_noise(graph: Graph, strength: float, seed: int = 0) -> Graph:
    """Add Gaussian noise to every feature, of `strength` standard deviations of the training nodes' features.

    The same seed gives the same pattern at every strength.
    """
    if not 0.0 <= strength < float("inf"):
        raise ValueError(f"strength is {strength!r}; allowed: a finite number of at least 0")
    noise = torch.randn(graph.features.shape, generator=torch.Generator().manual_seed(seed))
    scale = strength * float(graph.features[graph.splits["train"]].std(correction=0))
    return replace(graph, features=graph.features + scale * noise if scale else graph.features)


def replace_features(graph: Graph, share: float, seed: int = 0) -> Graph:
    """Move a random `share` of the features that are not 0 to random columns: words replaced by any others.

    Unlike Gaussian noise it leaves a bag of words a bag of words, of about the same length.
    """
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"share is {share!r}; allowed: 0 to 1")
    generator = torch.Generator().manual_seed(seed)
    rows, columns = graph.features.nonzero(as_tuple=True)
    values = graph.features[rows, columns]
    is_moved = torch.rand(len(rows), generator=generator) < share
    anywhere = torch.randint(graph.features.shape[1], columns.shape, generator=generator)
    features = torch.zeros_like(graph.features)
    features.index_put_((rows, torch.where(is_moved, anywhere, columns)), values, accumulate=True)
    return replace(graph, features=features)


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


def keep_labels(graph: Graph, share: float, seed: int = 0) -> Graph:
    """Keep a random `share` of the labels of every class for training, at least one."""
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"share is {share!r}; allowed: 0 to 1")
    generator = torch.Generator().manual_seed(seed)
    kept = []
    for label in range(graph.num_classes):
        own = graph.splits["train"][graph.labels[graph.splits["train"]] == label]
        count = min(len(own), max(1, round(share * len(own))))
        kept.append(own[torch.randperm(len(own), generator=generator)[:count]])
    return replace(graph, splits={**graph.splits, "train": torch.cat(kept).sort().values})


def rotate_classes(graph: Graph, count: int) -> Graph:
    """Number the classes anew, so that another one is the last: class c becomes c + `count`, modulo their number."""
    names = [graph.class_names[(label - count) % graph.num_classes] for label in range(graph.num_classes)]
    labels = torch.where(graph.labels >= 0, (graph.labels + count) % graph.num_classes, graph.labels)
    return replace(graph, labels=labels, class_names=names)
