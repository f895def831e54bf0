"""Cora, Citeseer and PubMed from their eight raw files, with the public split.

    x, y        features and one-hot classes of the labeled training nodes, the first nodes of the graph
    allx, ally  the same for all nodes that are not test nodes; they begin with x and y
    tx, ty      the same for the test nodes, in the order of test.index
    graph       neighbors of every node

Validation nodes are the 500 after the training nodes. Citeseer's test.index leaves out 15 numbers of its range: nodes with
neighbors, but without features or class.
"""

from pathlib import Path

import numpy as np
import torch
from scipy import sparse

from bayesattn_recipes.graph.data import Graph, make_graph
from bayesattn_recipes.graph.pickles import read_pickle

NUM_VALIDATION = 500
CLASS_NAMES = {
    "cora": [
        "theory", "reinforcement learning", "genetic algorithms", "neural networks", "probabilistic methods",
        "case-based", "rule learning",
    ],
    "citeseer": ["agents", "AI", "DB", "IR", "ML", "HCI"],
    "pubmed": ["experimental", "type 1", "type 2"],
}  # fmt: skip


def load_planetoid(folder: Path, name: str) -> Graph:
    """Read a data set; features are divided by their sum, as usual."""
    parts = {part: read_pickle(folder / f"ind.{name}.{part}") for part in ("x", "y", "allx", "ally", "tx", "ty", "graph")}
    for part, value in parts.items():
        kind = sparse.csr_matrix if part in ("x", "allx", "tx") else dict if part == "graph" else np.ndarray
        if not isinstance(value, kind) or (isinstance(value, np.ndarray) and value.ndim != 2):
            raise ValueError(f"{folder / f'ind.{name}.{part}'} must hold a {kind.__name__}, got {type(value).__name__}")
    test = _read_test_index(folder / f"ind.{name}.test.index")
    num_train, num_known = len(parts["y"]), len(parts["ally"])
    if parts["allx"].shape[0] != num_known or parts["tx"].shape[0] != len(test) or len(parts["ty"]) != len(test):
        raise ValueError(f"files of {name} in {folder} do not match: each must have one row per node")
    if num_train + NUM_VALIDATION > num_known or test.min() < num_known:
        raise ValueError(f"splits of {name} in {folder} must not share a node")
    n = int(test.max()) + 1
    widths, classes = {parts[part].shape[1] for part in ("allx", "tx")}, {parts[part].shape[1] for part in ("ally", "ty")}
    if len(widths) > 1 or classes != {len(CLASS_NAMES[name])}:
        raise ValueError(
            f"files of {name} in {folder} must agree on the number of features and have {len(CLASS_NAMES[name])} classes, "
            f"got {widths} features and {classes} classes"
        )
    features = np.zeros((n, widths.pop()), dtype=np.float32)
    features[:num_known], features[test] = parts["allx"].toarray(), parts["tx"].toarray()
    one_hot = np.zeros((n, classes.pop()), dtype=np.int64)
    one_hot[:num_known], one_hot[test] = parts["ally"], parts["ty"]
    labels = np.where(one_hot.sum(axis=1) > 0, one_hot.argmax(axis=1), -1)
    total = features.sum(axis=1, keepdims=True)
    features = np.divide(features, total, out=features, where=total != 0)
    edges = [(source, target) for source, targets in parts["graph"].items() for target in targets]
    splits = {
        "train": torch.arange(num_train),
        "validation": torch.arange(num_train, num_train + NUM_VALIDATION),
        "test": torch.from_numpy(np.sort(test)),
    }
    return make_graph(
        name,
        torch.from_numpy(features),
        torch.from_numpy(labels),
        torch.tensor(edges, dtype=torch.int64).reshape(-1, 2),
        splits,
        CLASS_NAMES[name],
    )


def _read_test_index(path: Path) -> np.ndarray:
    try:
        lines = path.read_text(encoding="ascii").split()
        index = np.array([int(line) for line in lines], dtype=np.int64)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, OverflowError):
        raise ValueError(f"{path} is not a list of node numbers, one per line") from None
    # the largest number determines the number of nodes
    if not len(index) or index.min() < 0 or index.max() >= 100 * len(index) + 1_000_000:
        raise ValueError(f"{path} must hold numbers of nodes, of at least 0")
    return index
