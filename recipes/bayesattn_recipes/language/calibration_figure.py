"""The figure that compares the calibration of several models on several data sets."""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float, Shaped
from matplotlib.figure import Figure
from torch import Tensor

from bayesattn.metrics import reliability_bins
from bayesattn.plots.style import MARKERS, NEUTRAL, array, legend_below, main_title, names, new_figure, plain
from bayesattn.plots.style import title as set_title
from bayesattn.plots.uncertainty import look

Columns = tuple[Float[Tensor, " b"], Shaped[Tensor, " b"]]


def plot_calibration(panels: Mapping[str, Mapping[str, Columns]], *, num_bins: int = 10, title: str = "") -> Figure:
    """Draw accuracy against confidence of several models, a panel for each data set.

    Args:
        panels: For each data set and model its confidences and accuracies.
        num_bins: Largest number of bins; every mark stands for the same number of predictions.
        title: Title above the figure.

    Example:
        >>> import torch
        >>> confidence, accuracy = torch.tensor([0.6, 0.7, 0.8, 0.9]), torch.tensor([0.0, 1.0, 1.0, 1.0])
        >>> models = {"soft": (confidence, accuracy), "BAM": (confidence - 0.1, accuracy)}
        >>> figure = plot_calibration({"validation": models, "test": models}, num_bins=2)
        >>> [ax.get_title() for ax in figure.axes]
        ['validation', 'test']
    """
    figure, axes = new_figure(0.6 + 3.1 * len(panels), 3.5, columns=len(panels))
    # one style per model, even if a data set lacks some
    models = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    for ax, (panel, curves) in zip(axes[0], panels.items(), strict=True):
        ax.plot([0, 1], [0, 1], color=NEUTRAL, linewidth=1, linestyle="--")
        lowest = 1.0
        for name, (confidence, accuracy) in curves.items():
            bins = reliability_bins(confidence, accuracy, num_bins=num_bins, scheme="equal_count")
            index, label = models.index(name), names([name], (), "panels", 1)[0]
            marker = MARKERS[index % len(MARKERS)]
            sure, right = array(bins.confidence), array(bins.accuracy)
            ax.plot(sure, right, label=label, marker=marker, markersize=4, linewidth=1.4, **look(index))
            lowest = min(lowest, float(sure.min()), float(right.min()))
        # leave out the empty corner: most classifiers are never less confident than chance
        start = max(0.0, np.floor(10 * lowest) / 10 - 0.02)
        ax.set(xlim=(start, 1.02), ylim=(start, 1.02), xlabel="confidence")
        set_title(ax, panel)
        plain(ax)
    axes[0, 0].set_ylabel("accuracy")
    # the one legend names every model, whichever panel it is in
    known = {line.get_label(): line for ax in axes[0] for line in ax.get_legend_handles_labels()[0]}
    legend_below(figure, [known[label] for label in names(models, (), "panels", len(models))])
    main_title(figure, title)
    return figure
