"""Figures about predictions: calibration, selective prediction, PAvPU, p-values, entropies.

Functions that compare models take a mapping from name to data and draw one line each.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float, Shaped
from matplotlib.figure import Figure
from torch import Tensor

from bayesattn.metrics import PAvPU, reliability_bins, risk_coverage
from bayesattn.metrics.calibration import Scheme
from bayesattn.plots.style import (
    BAD,
    COLORS,
    GOOD,
    LINES,
    MARKERS,
    NEUTRAL,
    array,
    legend,
    legend_below,
    names,
    new_figure,
    plain,
)
from bayesattn.plots.style import title as set_title
from bayesattn.scalars import check_choice

Columns = tuple[Float[Tensor, " b"], Shaped[Tensor, " b"]]


def plot_reliability(
    confidence: Float[Tensor, " b"],
    accuracy: Shaped[Tensor, " b"],
    *,
    num_bins: int = 10,
    scheme: Scheme = "equal_width",
    title: str = "",
) -> Figure:
    """Draw accuracy against confidence; the diagonal is perfect calibration.

    Args:
        confidence: Probability of the predicted class.
        accuracy: Acc_i of the predictions.
        num_bins: Maximum number of bins.
        scheme: Bins of equal width or equal count.
        title: Above the figure.

    Example:
        >>> import torch
        >>> confidence, accuracy = torch.tensor([0.65, 0.75, 0.85, 0.95]), torch.tensor([0.0, 1.0, 1.0, 1.0])
        >>> figure = plot_reliability(confidence, accuracy, num_bins=5)
        >>> figure.axes[0].get_title()
        'Reliability (ECE 0.150)'
    """
    bins = reliability_bins(confidence, accuracy, num_bins=num_bins, scheme=scheme)
    figure, axes = new_figure(4.2, 4.6, rows=2, sharex=True, gridspec_kw={"height_ratios": [4, 1]})
    top, bottom = axes[:, 0]
    sure, right = array(bins.confidence), array(bins.accuracy)
    top.plot([0, 1], [0, 1], color=NEUTRAL, linewidth=1, linestyle="--", label="perfect")
    top.vlines(sure, np.minimum(sure, right), np.maximum(sure, right), color=BAD, linewidth=5, alpha=0.35, label="gap")
    top.plot(sure, right, color=GOOD, marker="o", markersize=5, linewidth=1.5, label="model")
    top.set(xlim=(0, 1), ylim=(0, 1), ylabel="accuracy")
    set_title(top, title or f"Reliability (ECE {float(bins.error):.3f})")
    legend(top, loc="upper left")
    share = array(bins.count) / array(bins.count).sum()
    bottom.bar(sure, share, width=0.6 / num_bins, color=GOOD)
    bottom.set(xlabel="confidence", ylabel="share")
    for ax in (top, bottom):
        plain(ax)
    return figure


def plot_risk_coverage(curves: Mapping[str, Columns | Sequence[Columns]], *, title: str = "") -> Figure:
    """Draw the error of the answered predictions against the share that is answered.

    Args:
        curves: For each model its confidences and accuracies, or those of several runs: their curves and AURC are averaged.
        title: Above the figure.

    Example:
        >>> import torch
        >>> confidence, accuracy = torch.tensor([0.9, 0.8, 0.7, 0.6]), torch.tensor([1.0, 1.0, 0.0, 1.0])
        >>> figure = plot_risk_coverage({"soft": (confidence, accuracy)})
        >>> figure.axes[0].lines[0].get_label()
        'soft (AURC 0.146)'
    """
    figure, axes = new_figure()
    ax, highest = axes[0, 0], 0.0
    for index, (name, given) in enumerate(_some(curves).items()):
        runs = [given] if isinstance(given, tuple) else list(given)
        found = [risk_coverage(confidence, accuracy) for confidence, accuracy in runs]
        area = np.mean([float(curve.risk.mean()) for curve in found])
        coverage = array(found[0].coverage)
        risk = np.mean([np.interp(coverage, array(curve.coverage), array(curve.risk)) for curve in found], axis=0)
        label = f"{names([name], (), 'curves', 1)[0]} (AURC {area:.3f})"
        ax.plot(coverage, risk, label=label, linewidth=1.6, **look(index))
        highest = max(highest, float(risk[len(risk) // 20 :].max()))
    # the first few predictions swing between no error and all: they must not set the scale
    ax.set(xlim=(0, 1), ylim=(0, 1.1 * highest or 1.0), xlabel="coverage", ylabel="error of the answers")
    set_title(ax, title or "Risk and coverage")
    plain(ax)
    legend_below(figure, ax.lines)
    return figure


def plot_pavpu(
    curves: Mapping[str, Sequence[PAvPU]], *, over: Literal["threshold", "num_samples"] = "threshold", title: str = ""
) -> Figure:
    """Draw PAvPU with its interval against the threshold, or against the number of samples.

    Args:
        curves: For each model the results of `pavpu_by_threshold` or `pavpu_by_num_samples`.
        over: `threshold` or `num_samples`.
        title: Above the figure.

    Example:
        >>> import torch
        >>> from bayesattn.metrics import pavpu_by_threshold
        >>> samples, accuracy = torch.softmax(torch.randn(5, 6, 3), dim=-1), torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
        >>> figure = plot_pavpu({"BAM": pavpu_by_threshold(samples, accuracy, [0.01, 0.05, 0.1])})
        >>> figure.axes[0].get_title()
        'PAvPU (paired, probability, M = 5)'
    """
    check_choice("over", over, ("threshold", "num_samples"))
    figure, axes = new_figure()
    ax = axes[0, 0]
    for index, (name, points) in enumerate(_some(curves).items()):
        if len(points) == 0:
            raise ValueError(f"curves[{name!r}] must hold at least one PAvPU, got none")
        points = sorted(points, key=lambda point: getattr(point, over))
        x = [getattr(point, over) for point in points]
        color = COLORS[index % len(COLORS)]
        ax.fill_between(x, [p.low for p in points], [p.high for p in points], color=color, alpha=0.15, linewidth=0)
        label = names([name], (), "curves", 1)[0]
        marker = MARKERS[index % len(MARKERS)]
        ax.plot(x, [p.value for p in points], label=label, marker=marker, markersize=4, linewidth=1.6, **look(index))
    every = [point for points in curves.values() for point in points]
    ax.set(xscale="log", xlabel="p-value threshold" if over == "threshold" else "samples M", ylabel="PAvPU")
    fixed = [f"M = {point.num_samples}" if over == "threshold" else f"threshold {point.threshold:g}" for point in every]
    behind = {f"{point.test}, {point.space}, {rest}" for point, rest in zip(every, fixed, strict=True)}
    set_title(ax, title or f"PAvPU ({'; '.join(sorted(behind))})")
    ticks = sorted({getattr(point, over) for point in every})
    if len(ticks) <= 8:
        ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        ax.minorticks_off()
    plain(ax)
    legend_below(figure, ax.lines)
    return figure


def plot_p_values(
    p_value: Float[Tensor, " b"], accuracy: Shaped[Tensor, " b"], *, threshold: float = 0.05, title: str = ""
) -> Figure:
    """Draw the distribution of p-values for right and wrong answers; good uncertainty puts the wrong ones to the right.

    Args:
        p_value: From `top_two_p_value`.
        accuracy: Acc_i; above one half counts as right.
        threshold: Drawn as a line; left of it is certain.
        title: Above the figure.

    Example:
        >>> import torch
        >>> p_value, accuracy = torch.tensor([0.01, 0.02, 0.4, 0.03]), torch.tensor([1.0, 1.0, 0.0, 1.0])
        >>> figure = plot_p_values(p_value, accuracy)
        >>> [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
        ['right (3)', 'wrong (1)']
    """
    figure, axes = new_figure()
    ax = axes[0, 0]
    p, right = array(p_value), array(accuracy) > 0.5
    if len(p) == 0 or len(p) != len(right):
        raise ValueError(f"p_value and accuracy must have one common length of at least 1, got {len(p)} and {len(right)}")
    edges = np.linspace(0, 1, 21)
    _shares(ax, p[right], edges, GOOD, "right", filled=True)
    _shares(ax, p[~right], edges, BAD, "wrong", filled=False)
    ax.axvline(threshold, color="black", linewidth=1, linestyle=":")
    ax.annotate(
        f"certain: p ≤ {threshold:g}", (threshold, 0.97), xycoords=("data", "axes fraction"),
        xytext=(4, 0), textcoords="offset points", fontsize=8, va="top",
    )  # fmt: skip
    ax.set(xlim=(0, 1), xlabel="p-value", ylabel="share of each group")
    set_title(ax, title or "p-values of right and wrong answers")
    plain(ax)
    legend(ax, loc="upper right", bbox_to_anchor=(1.0, 0.9))
    return figure


def plot_entropy(
    entropy_in: Float[Tensor, " n"],
    entropy_out: Float[Tensor, " m"],
    *,
    title: str = "",
    xlabel: str = "predictive entropy (nats)",
) -> Figure:
    """Draw the distribution of the entropy for inputs like the training data and for others.

    Args:
        entropy_in: Entropy of inputs from the training distribution.
        entropy_out: Entropy of inputs from elsewhere.
        title: Above the figure.
        xlabel: Label of the axis, for a score other than entropy.

    Example:
        >>> import torch
        >>> figure = plot_entropy(torch.tensor([0.1, 0.2, 0.15]), torch.tensor([0.8, 1.0]))
        >>> [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
        ['in distribution (3)', 'out of distribution (2)']
    """
    inside, outside = array(entropy_in), array(entropy_out)
    if len(inside) == 0 or len(outside) == 0:
        raise ValueError(f"entropies must have at least one value each, got {len(inside)} and {len(outside)}")
    figure, axes = new_figure()
    ax = axes[0, 0]
    both = np.concatenate([inside, outside])
    edges = np.linspace(both.min(), both.max() if both.max() > both.min() else both.min() + 1.0, 31)
    _shares(ax, inside, edges, GOOD, "in distribution", filled=True)
    _shares(ax, outside, edges, BAD, "out of distribution", filled=False)
    ax.set(xlabel=xlabel, ylabel="share of each group")
    set_title(ax, title or "Uncertainty in and out of distribution")
    plain(ax)
    legend(ax, loc="best")
    return figure


def _shares(ax, values: np.ndarray, edges: np.ndarray, color: str, label: str, *, filled: bool) -> None:
    # filled against outlined keeps the two apart without color
    share = np.histogram(values, edges)[0] / max(1, len(values))
    ax.stairs(
        share,
        edges,
        color=color,
        fill=filled,
        alpha=0.55 if filled else 1.0,
        linewidth=1.8,
        label=f"{label} ({len(values)})",
    )


def look(index: int) -> dict[str, str]:
    """Return color and line of the model with this number."""
    return {"color": COLORS[index % len(COLORS)], "linestyle": LINES[index % len(LINES)]}


def _some(curves: Mapping) -> Mapping:
    if len(curves) == 0:
        raise ValueError("curves must hold at least one model, got none")
    return curves
