"""Attention on a graph: the edges into one node, their mean weights and standard deviations."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from torch import Tensor

from bayesattn.plots.style import COLORS, SEQUENTIAL, array, names, new_figure
from bayesattn.plots.style import title as set_title


def plot_edge_uncertainty(
    edge_index: Int[Tensor, "2 e"],
    weights: Float[Tensor, "s e"],
    node: int,
    *,
    labels: Sequence[str] | None = None,
    max_neighbors: int = 16,
    title: str = "",
) -> Figure:
    """Draw the neighborhood of a node: width of an edge is its mean weight, color its standard deviation.

    A bar chart beside it gives the same numbers with ± one standard deviation.

    Args:
        edge_index: Source and target of every edge (PyTorch Geometric's order).
        weights: Sampled attention weights of the edges, one head; draws first.
        node: The target whose incoming edges are drawn.
        labels: A name for every node of the graph; numbers if None.
        max_neighbors: Number of neighbors to show, those with the largest mean weight.
        title: Above the figure.

    Example:
        >>> import torch
        >>> edge_index = torch.tensor([[0, 1, 2, 0], [2, 2, 2, 1]])
        >>> figure = plot_edge_uncertainty(edge_index, torch.rand(8, 4), node=2)
        >>> figure.axes[0].get_title(), len(figure.axes[1].get_yticks())
        ('Edges into 2', 3)
    """
    sampled = array(weights)
    if sampled.ndim != 2 or len(sampled) < 2 or sampled.shape[1] != edge_index.shape[1]:
        raise ValueError(f"weights must have shape (at least 2 draws, {edge_index.shape[1]} edges), got {sampled.shape}")
    source, target = edge_index.detach().cpu().numpy()
    incoming = np.flatnonzero(target == node)
    if len(incoming) == 0:
        raise ValueError(f"node must be a target in edge_index, got {node}, which has no incoming edge")
    mean, deviation = sampled[:, incoming].mean(axis=0), sampled[:, incoming].std(axis=0, ddof=1)
    order = np.argsort(-mean, kind="stable")[:max_neighbors]
    mean, deviation, neighbors = mean[order], deviation[order], source[incoming][order]
    known = int(max(source.max(), target.max())) + 1
    called = names(labels, map(str, range(known)), "labels", len(labels) if labels is not None else known)
    if len(called) < known:
        raise ValueError(f"labels must have at least {known} entries, one per node, got {len(called)}")
    figure, axes = new_figure(7.6, 3.9, columns=2, gridspec_kw={"width_ratios": [1.25, 1]})
    ring, bars = axes[0]
    scale = Normalize(0.0, max(deviation.max(), 1e-12))
    color = colormaps[SEQUENTIAL](scale(deviation))
    angles = np.pi / 2 - 2 * np.pi * np.arange(len(order)) / len(order)
    for angle, weight, shade, neighbor in zip(angles, mean, color, neighbors, strict=True):
        x, y = np.cos(angle), np.sin(angle)
        width = 1 + 9 * weight / mean.max()
        # a dark rim keeps light colors visible on white
        for line, paint in ((width + 1.2, "black"), (width, shade)):
            ring.plot([0, x], [0, y], color=paint, linewidth=line, solid_capstyle="round", zorder=1)
        ring.scatter([x], [y], s=150, color="white", edgecolor="black", zorder=2)
        # a self loop is drawn as a neighbor of its own name
        name = f"{called[neighbor]} (self)" if neighbor == node else called[neighbor]
        side = "left" if x > 0.1 else "right" if x < -0.1 else "center"
        ring.text(1.16 * x, 1.2 * y, name, ha=side, va="center", fontsize=8)
    ring.scatter([0], [0], s=420, color=COLORS[1], edgecolor="black", zorder=3)
    if len(called[node]) <= 5:
        ring.text(0, 0, called[node], ha="center", va="center", fontsize=8, zorder=4)
    ring.set(xlim=(-1.6, 1.6), ylim=(-1.35, 1.35))
    set_title(ring, title or f"Edges into {node if labels is None else labels[node]}")
    ring.set_aspect("equal")
    ring.axis("off")
    bar = figure.colorbar(ScalarMappable(scale, SEQUENTIAL), ax=ring, shrink=0.75)
    bar.set_label("standard deviation of W", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    place = np.arange(len(order))
    bars.barh(place, mean, xerr=deviation, color=color, edgecolor="black", linewidth=0.5, capsize=2)
    bars.set_yticks(place, [called[neighbor] for neighbor in neighbors])
    bars.invert_yaxis()
    bars.set(xlabel="weight W: mean ± one standard deviation")
    bars.set_xlim(left=0)
    bars.spines[["top", "right"]].set_visible(False)
    return figure
