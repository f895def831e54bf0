"""Maps of sampled attention, and the sampled attention on the edges into one node of a graph."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float, Int
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from torch import Tensor

from bayesattn.plots.style import COLORS, SEQUENTIAL, array, main_title, names, new_figure
from bayesattn.plots.style import title as set_title
from bayesattn.scalars import check_choice


def plot_attention(
    weights: Float[Tensor, "s m n"],
    *,
    prior_weights: Float[Tensor, " n"] | None = None,
    queries: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    num_shown: int = 2,
    title: str = "",
) -> Figure:
    """Draw prior Ψ, mean of W, standard deviation of W and a few samples of one head (the paper's Fig. 1).

    Args:
        weights: Sampled attention weights of one head; draws first.
        prior_weights: Ψ, one weight for every key, shared by all queries; left out if None.
        queries: Row names (words of the sentence, decoding steps); numbers if None.
        keys: Column names.
        num_shown: How many samples to draw.
        title: Above the figure.

    Example:
        >>> import torch
        >>> weights = torch.softmax(torch.randn(8, 3, 5), dim=-1)
        >>> figure = plot_attention(weights, prior_weights=torch.full((5,), 0.2), num_shown=1)
        >>> [ax.get_title() for ax in figure.axes if ax.get_title()]
        ['prior Ψ', 'mean of W', 'standard deviation of W', 'sample 1']
    """
    sampled = array(weights)
    if sampled.ndim != 3 or sampled.size == 0 or len(sampled) < 2:
        raise ValueError(f"weights must have shape (draws, queries, keys) with at least 2 draws, got {sampled.shape}")
    _, m, n = sampled.shape
    rows, columns = names(queries, map(str, range(m)), "queries", m), names(keys, map(str, range(n)), "keys", n)
    panels = [("mean of W", sampled.mean(axis=0)), ("standard deviation of W", sampled.std(axis=0, ddof=1))]
    panels += [(f"sample {index + 1}", sampled[index]) for index in range(min(num_shown, len(sampled)))]
    if prior_weights is not None:
        if tuple(prior_weights.shape) != (n,):
            raise ValueError(f"prior_weights must have shape ({n},), one per key, got {tuple(prior_weights.shape)}")
        panels.insert(0, ("prior Ψ", array(prior_weights)[None, :]))
    size = min(3.4, max(1.9, 0.28 * max(m, n)))
    figure, axes = new_figure(size * len(panels) + 0.6, size * min(1.4, max(0.6, m / n)) + 1.1, columns=len(panels))
    # one scale for all weights, so that they can be compared; the deviation has its own
    top = max(panel.max() for name, panel in panels if not name.startswith("standard"))
    for ax, (name, panel) in zip(axes[0], panels, strict=True):
        deviation = name.startswith("standard")
        image = ax.imshow(panel, cmap=SEQUENTIAL, vmin=0.0, vmax=None if deviation else top, aspect="auto")
        figure.colorbar(image, ax=ax, shrink=0.8, pad=0.03).ax.tick_params(labelsize=7)
        set_title(ax, name)
        _label(ax, rows if (len(panel) == m and len(panel) > 1) or m == 1 else ["all queries"], columns)
    for ax in axes[0, 1:] if prior_weights is None else axes[0, 2:]:
        ax.set_yticklabels([])
    main_title(figure, title)
    return figure


def plot_attention_heads(
    weights: Float[Tensor, "s h m n"],
    *,
    statistic: Literal["mean", "std"] = "mean",
    queries: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    steps: Sequence[int] | None = None,
    title: str = "",
) -> Figure:
    """Draw one map for every head; or, with `steps`, one bar of keys for every head and chosen query (decoding step).

    Args:
        weights: Sampled attention weights; draws first.
        statistic: `mean` or `std` over the draws.
        queries: Row names.
        keys: Column names.
        steps: Queries to show, one under the other; all as one map if None.
        title: Above the figure.

    Example:
        >>> import torch
        >>> weights = torch.softmax(torch.randn(8, 2, 3, 5), dim=-1)
        >>> figure = plot_attention_heads(weights, statistic="std")
        >>> [ax.get_title() for ax in figure.axes if ax.get_title()]
        ['head 1', 'head 2']
    """
    check_choice("statistic", statistic, ("mean", "std"))
    sampled = array(weights)
    if sampled.ndim != 4 or sampled.size == 0 or (statistic == "std" and len(sampled) < 2):
        raise ValueError(
            f"weights must have shape (draws, heads, queries, keys), with 2 draws for 'std', got {sampled.shape}"
        )
    _, heads, m, n = sampled.shape
    rows, columns = names(queries, map(str, range(m)), "queries", m), names(keys, map(str, range(n)), "keys", n)
    chosen = list(range(m)) if steps is None else list(steps)
    if not chosen or any(not 0 <= step < m for step in chosen):
        raise ValueError(f"steps must be one or more numbers from 0 to {m - 1}, got {chosen}")
    values = (sampled.mean(axis=0) if statistic == "mean" else sampled.std(axis=0, ddof=1))[:, chosen]
    rows = [rows[step] for step in chosen]
    across = min(heads, 4)
    down = -(-heads // across)
    width, height = max(1.8, 0.2 * n), max(1.3, 0.2 * len(chosen)) + 0.5
    figure, axes = new_figure(min(12.0, width * across + 1.2), min(12.0, height * down + 0.6), rows=down, columns=across)
    image = ScalarMappable(Normalize(0.0, values.max()), SEQUENTIAL)
    for unused in axes.flat[heads:]:
        unused.set_visible(False)
    for index, ax in enumerate(axes.flat[:heads]):
        ax.imshow(values[index], cmap=image.cmap, norm=image.norm, aspect="auto")
        set_title(ax, f"head {index + 1}")
        _label(ax, rows if index % across == 0 else [""] * len(rows), columns)
    name = "mean of W" if statistic == "mean" else "standard deviation of W"
    bar = figure.colorbar(image, ax=axes.ravel().tolist(), shrink=0.8)
    bar.set_label(name, fontsize=8)
    bar.ax.tick_params(labelsize=7)
    main_title(figure, title)
    return figure


def _label(ax, rows: list[str], columns: list[str]) -> None:
    # words get one tick each as long as they fit; numbers are thinned out
    for axis, labels, rotate in ((ax.yaxis, rows, False), (ax.xaxis, columns, True)):
        thin = max(1, -(-len(labels) // 24))
        axis.set_ticks(np.arange(0, len(labels), thin), [label[:18] for label in labels[::thin]])
        if rotate and max(map(len, labels)) > 2:
            for text in axis.get_ticklabels():
                text.set(rotation=60, ha="right", rotation_mode="anchor")
    ax.tick_params(length=0, labelsize=7)


def plot_edge_uncertainty(
    edge_index: Int[Tensor, "2 e"],
    weights: Float[Tensor, "s e"],
    node: int,
    *,
    labels: Sequence[str] | None = None,
    max_neighbors: int = 16,
    title: str = "",
) -> Figure:
    """Draw the neighborhood of a node: an edge's width is its mean weight, its color the standard deviation.

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
        # a self loop is drawn as a neighbor with its own name
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
