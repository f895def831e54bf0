"""Graphs with labeled nodes: the class that every loader returns, its checks, and the registry of data sets by name."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bayesattn_recipes.common.arrays import check_numbers, read_npz
from bayesattn_recipes.common.sources import explained

SPLITS = ("train", "validation", "test")
# test nodes of classes that were kept out of training
LEFT_OUT = "left-out"


@dataclass(frozen=True, eq=False)
class Graph:
    """A graph whose nodes have features and, some of them, labels.

    Attributes:
        name: Name of the data set.
        features: Features of every node; bags of words are mostly zeros, which the model exploits.
        labels: Class of every node; −1 if unknown.
        edge_index: Source and target of every directed edge: both directions of an undirected edge, one self-loop per node.
        splits: Nodes of `train`, `validation`, `test`, and of `left-out` if classes were kept out of training.
        class_names: One per class.
    """

    name: str
    features: Float[Tensor, "n f"]
    labels: Int[Tensor, " n"]
    edge_index: Int[Tensor, "2 e"]
    splits: dict[str, Int[Tensor, " k"]]
    class_names: list[str]

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.features.shape[0]

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)


def make_graph(
    name: str,
    features: Float[Tensor, "n f"],
    labels: Int[Tensor, " n"],
    edges: Int[Tensor, "m 2"],
    splits: dict[str, Int[Tensor, " k"]],
    class_names: list[str],
) -> Graph:
    """Check the parts, make the edges undirected and unique, and give every node one self-loop.

    With its self-loop, an isolated node attends to itself alone, so no neighborhood is empty.

    Raises:
        ValueError: An edge ends outside the graph, features are not finite, splits overlap, are empty or hold an unlabeled
            node.
    """
    n = len(features)
    if len(labels) != n:
        raise ValueError(f"{name} must have one label for each of its {n} nodes, got {len(labels)}")
    if not bool(torch.isfinite(features).all()):
        raise ValueError(f"features of {name} must be finite, got NaN or infinity")
    if edges.numel():
        low, high = int(edges.min()), int(edges.max())
        if low < 0 or high >= n:
            raise ValueError(f"edges of {name} must end at nodes from 0 to {n - 1}, got {low if low < 0 else high}")
    _check_splits(name, splits, labels, len(class_names))
    return Graph(name, features, labels, undirected(edges.T, n), splits, class_names)


def _check_splits(name: str, splits: dict[str, Tensor], labels: Tensor, num_classes: int) -> None:
    owner = torch.full((len(labels),), -1)
    for index, (split, nodes) in enumerate(splits.items()):
        if not len(nodes) or int(nodes.min()) < 0 or int(nodes.max()) >= len(labels):
            raise ValueError(f"split {split!r} of {name} must hold at least one node, all from 0 to {len(labels) - 1}")
        taken = owner[nodes].max()
        if taken >= 0:
            raise ValueError(f"splits {list(splits)[int(taken)]!r} and {split!r} of {name} must not share a node")
        owner[nodes] = index
        if len(nodes.unique()) != len(nodes):
            raise ValueError(f"split {split!r} of {name} must not hold a node twice")
        if int(labels[nodes].min()) < 0 or int(labels[nodes].max()) >= num_classes:
            raise ValueError(
                f"split {split!r} of {name} holds a node without a class. Classes must be from 0 to {num_classes - 1}"
            )


def undirected(edge_index: Int[Tensor, "2 m"], num_nodes: int) -> Int[Tensor, "2 e"]:
    """Return both directions of every edge, each once, with one self-loop per node, sorted by target and source."""
    source, target = edge_index
    loops = torch.arange(num_nodes)
    is_loop = source == target
    source, target = source[~is_loop], target[~is_loop]
    code = torch.cat([target * num_nodes + source, source * num_nodes + target, loops * (num_nodes + 1)]).unique()
    return torch.stack([code % num_nodes, code // num_nodes])


def leave_out_classes(graph: Graph, count: int) -> Graph:
    """Keep the last `count` classes out of every split; their nodes stay in the graph, their test nodes as split `left-out`.

    They are the out-of-distribution nodes: part of the graph in training, but without labels.
    """
    if count == 0:
        return graph
    kept = graph.num_classes - count
    if count < 0 or kept < 2:
        raise ValueError(f"left_out_classes must be from 0 to {graph.num_classes - 2} for {graph.name}, got {count}")
    splits = {name: nodes[graph.labels[nodes] < kept] for name, nodes in graph.splits.items()}
    test = graph.splits["test"]
    splits[LEFT_OUT] = test[graph.labels[test] >= kept]
    for name, nodes in splits.items():
        if not len(nodes):
            raise ValueError(
                f"left_out_classes={count} leaves split {name!r} of {graph.name} empty. Leave out fewer classes"
            )
    return replace(graph, splits=splits, class_names=graph.class_names[:kept])


def random_split(graph: Graph, number: int) -> Graph:
    """Draw new splits of the same sizes: the same number of training nodes per class, then validation and test nodes.

    Args:
        graph: A graph with its public splits.
        number: Number of the split, from 1 on; the seed of the draw.
    """
    if number < 1:
        raise ValueError(f"split must be above 0 for a random split (0 is the public one), got {number}")
    order = torch.randperm(graph.num_nodes, generator=torch.Generator().manual_seed(number))
    order = order[graph.labels[order] >= 0]
    counts = graph.labels[graph.splits["train"]].bincount(minlength=graph.num_classes)
    rank = torch.nn.functional.one_hot(graph.labels[order], graph.num_classes).cumsum(0)
    is_train = rank.gather(1, graph.labels[order, None]).squeeze(1) <= counts[graph.labels[order]]
    rest, (v, t) = order[~is_train], (len(graph.splits[name]) for name in ("validation", "test"))
    splits = {"train": order[is_train], "validation": rest[:v], "test": rest[v : v + t]}
    _check_splits(graph.name, splits, graph.labels, graph.num_classes)
    return replace(graph, splits=splits)


def _planetoid(name: str) -> Callable[[Path, int], Graph]:
    def load(folder: Path, split: int) -> Graph:
        from bayesattn_recipes.graph.planetoid import load_planetoid

        graph = load_planetoid(folder / "planetoid", name)
        return graph if split == 0 else random_split(graph, split)

    return load


def _heterophilous(name: str) -> Callable[[Path, int], Graph]:
    return lambda folder, split: load_heterophilous(folder / "heterophilous_graphs", name, split)


HETEROPHILOUS = ("actor", "chameleon_filtered", "squirrel_filtered", "minesweeper", "tolokers")
DATASETS: dict[str, Callable[[Path, int], Graph]] = {
    **{name: _planetoid(name) for name in ("cora", "citeseer", "pubmed")},
    **{name: _heterophilous(name) for name in HETEROPHILOUS},
}
GENERATED = "generated"
HETEROPHILOUS_SPLITS = 10


def split_of_seed(name: str, seed: int) -> int:
    """Return the official split that belongs to a seed: seed mod 10 if there are ten, else the only one."""
    return seed % HETEROPHILOUS_SPLITS if name in HETEROPHILOUS else 0


def load_graph(name: str, folder: Path | None = None, *, split: int = 0) -> Graph:
    """Load a data set by name.

    Args:
        name: `generated`, which needs no files, or one of `DATASETS`.
        folder: Folder of the data sets, with `planetoid/` and `heterophilous_graphs/` in it.
        split: Which of the official splits, for data sets with several; for Cora, Citeseer and PubMed 0 is the public
            split and any other number a random one of the same sizes.
    """
    if name == GENERATED:
        from bayesattn_recipes.graph.generated import generate_graph

        return generate_graph(seed=split)
    if name not in DATASETS:
        raise ValueError(f"dataset must be one of {', '.join([GENERATED, *DATASETS])}, got {name!r}")
    with explained(name, folder):
        if folder is None:
            raise ValueError(f"{name} needs data, the folder of the data sets. Give it with --data or BAYESATTN_DATA")
        return DATASETS[name](Path(folder), split)


def load_heterophilous(folder: Path, name: str, split: int) -> Graph:
    """Read one of the heterophilous graphs: an npz file with ten official splits, opened without pickle."""
    path = folder / f"{name}.npz"
    names = ("node_features", "node_labels", "edges", "train_masks", "val_masks", "test_masks")
    if not path.is_file():
        raise ValueError(f"{path} does not exist")
    found = read_npz(path, names)
    dimensions = (2, 1, 2, 2, 2, 2)
    features, labels, edges, *masks = (
        check_numbers(found[part], ndim, f"{part} of {path}") for part, ndim in zip(names, dimensions)
    )
    n = len(features)
    if edges.shape[1] != 2 or any(mask.shape != (len(masks[0]), n) for mask in masks):
        shapes = [found[part].shape for part in names]
        raise ValueError(
            f"arrays of {path} do not match: edges must have two ends and masks must cover {n} nodes, got shapes {shapes}"
        )
    # a class without nodes is possible, but not more classes than nodes
    if not n or labels.min() < 0 or labels.max() >= n:
        raise ValueError(f"node_labels of {path} must be classes from 0 to {n - 1}, one for each of {n} nodes")
    if not 0 <= split < len(masks[0]):
        raise ValueError(f"split must be from 0 to {len(masks[0]) - 1} for {name}, got {split}")
    labels = torch.from_numpy(labels).long()
    splits = {key: torch.from_numpy(mask[split].nonzero()[0]) for key, mask in zip(SPLITS, masks)}
    class_names = [str(label) for label in range(int(labels.max()) + 1)]
    return make_graph(name, torch.from_numpy(features).float(), labels, torch.from_numpy(edges).long(), splits, class_names)
