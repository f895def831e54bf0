"""A generated graph for the demo and the tests: a stochastic block model with bags of words, made in milliseconds.

Nodes of a class share words and are linked more often than others, but both signals are weak, and some nodes sit in the
wrong neighborhood: a classifier is right on most nodes and should be uncertain about the others.
"""

import numpy as np
import torch

from bayesattn_recipes.graph.data import Graph, make_graph

# mean number of neighbors, drawn from a Poisson distribution: some nodes are isolated
MEAN_DEGREE = 4.0
# share of edges that stay within a class
HOMOPHILY = 0.65
# words drawn for each node, with repetition, and the probability that one comes from the class's own words
WORDS_PER_NODE = 12
TOPICAL_SHARE = 0.2


def generate_graph(
    num_nodes: int = 1000,
    num_classes: int = 5,
    num_words: int = 200,
    *,
    num_train: int = 100,
    num_validation: int = 200,
    seed: int = 0,
) -> Graph:
    """Draw a graph.

    Args:
        num_nodes: Nodes.
        num_classes: Classes, as equal in size as possible.
        num_words: Vocabulary; every class has its own tenth of it, drawn at random, so topics overlap.
        num_train: Labeled nodes, spread over the classes as evenly as possible.
        num_validation: Validation nodes; the rest are test nodes.
        seed: Seed of everything.
    """
    if num_classes < 2 or num_train + num_validation >= num_nodes:
        raise ValueError(
            f"the graph must have at least two classes, and nodes left for testing, got num_classes={num_classes}, "
            f"num_train={num_train}, num_validation={num_validation}, num_nodes={num_nodes}"
        )
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(num_nodes) % num_classes)
    num_edges = int(num_nodes * MEAN_DEGREE / 2)
    source = rng.integers(num_nodes, size=num_edges)
    members = [np.flatnonzero(labels == label) for label in range(num_classes)]
    stays = rng.random(num_edges) < HOMOPHILY
    inside = np.array([rng.choice(members[labels[node]]) for node in source])
    target = np.where(stays, inside, rng.integers(num_nodes, size=num_edges))
    topics = np.stack([rng.choice(num_words, size=num_words // 10, replace=False) for _ in range(num_classes)])
    is_topical = rng.random((num_nodes, WORDS_PER_NODE)) < TOPICAL_SHARE
    topical = np.take_along_axis(topics[labels], rng.integers(topics.shape[1], size=(num_nodes, WORDS_PER_NODE)), axis=1)
    words = np.where(is_topical, topical, rng.integers(num_words, size=(num_nodes, WORDS_PER_NODE)))
    features = np.zeros((num_nodes, num_words), dtype=np.float32)
    np.add.at(features, (np.arange(num_nodes)[:, None], words), 1.0 / WORDS_PER_NODE)
    # shuffled nodes, then dealt out class by class: the first num_train hold every class equally often
    order = rng.permutation(num_nodes)
    order = order[np.argsort(_rank_within_class(labels[order]), kind="stable")]
    parts = np.split(order, [num_train, num_train + num_validation])
    return make_graph(
        "generated",
        torch.from_numpy(features),
        torch.from_numpy(labels),
        torch.from_numpy(np.stack([source, target], axis=1)),
        {name: torch.from_numpy(np.sort(part)) for name, part in zip(("train", "validation", "test"), parts)},
        [f"class {label}" for label in range(num_classes)],
    )


def _rank_within_class(labels: np.ndarray) -> np.ndarray:
    """Return how many earlier entries have the same label."""
    rank = np.empty(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        where = labels == label
        rank[where] = np.arange(where.sum())
    return rank
