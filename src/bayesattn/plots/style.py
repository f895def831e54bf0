"""One look for all figures: sizes, the Okabe-Ito palette, and marks that survive a gray-scale printer.

Figures are made without pyplot: no global state, no window, nothing to close; they save with `figure.savefig(path)`.
"""

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

# Okabe and Ito (2008), distinguishable with every common color vision; ordered so that neighbors differ in lightness
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
LINES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
GOOD, BAD, NEUTRAL = COLORS[0], COLORS[4], "#666666"
SEQUENTIAL = "cividis"


def new_figure(
    width: float = 4.8, height: float = 3.6, rows: int = 1, columns: int = 1, **options: Any
) -> tuple[Figure, np.ndarray]:
    """Return a figure (inches) and its axes as a rows × columns array."""
    figure = Figure(figsize=(width, height), layout="constrained", dpi=144)
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    for ax in axes.flat:
        ax.tick_params(labelsize=8)
        ax.xaxis.label.set_size(9)
        ax.yaxis.label.set_size(9)
    return figure, axes


def title(ax: Axes, text: str) -> None:
    """Write a title in the size that fits small figures; it may come from data, so it is not read as mathematics."""
    spec, figure = ax.get_subplotspec(), ax.get_figure(root=True)
    assert figure is not None
    columns = 1 if spec is None else spec.get_gridspec().ncols
    # the title spans the axes only; to their left are tick labels and the axis label
    width = figure.get_figwidth() / columns - (0.7 if columns == 1 else 0.0)
    ax.set_title(wrapped(text, width, 10), fontsize=10, parse_math=False)


def main_title(figure: Figure, text: str) -> None:
    """Write a title above all axes, in the same way; an empty one takes no space."""
    if text:
        figure.suptitle(wrapped(text, figure.get_figwidth(), 11), fontsize=11, parse_math=False)


def wrapped(text: str, width: float, size: int) -> str:
    """Return a text in lines of at most `width` inches; with a line wider than the figure, constrained layout gives up."""
    # a letter is about 0.6 times as wide as its size in points
    return textwrap.fill(text, max(8, int(72 * width / (0.6 * size))))


def plain(ax: Axes) -> None:
    """Remove the box and put a light grid behind the data."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(color="#dddddd", linewidth=0.6)
    ax.set_axisbelow(True)


def legend(ax: Axes, **options: Any) -> None:
    """Draw a small legend without a frame."""
    ax.legend(fontsize=8, frameon=False, **options)


def legend_below(figure: Figure, handles: Sequence[Artist]) -> None:
    """Draw the legend below the axes, in its own space: many or long model names would hide the lines."""
    width = figure.get_figwidth() - 0.6
    for handle in handles:
        handle.set_label(wrapped(str(handle.get_label()), width, 8))
    lines = [str(handle.get_label()).split("\n") for handle in handles]
    columns = 2 if all(wrapped(text, width / 2 - 0.4, 8) == text for parts in lines for text in parts) else 1
    rows = -(-sum(map(len, lines)) // columns)
    figure.set_figheight(figure.get_figheight() + 0.1 + 0.17 * rows)
    figure.legend(handles=list(handles), loc="outside lower center", ncols=columns, fontsize=8, frameon=False)


def array(value: Tensor) -> np.ndarray:
    """Return a tensor of any device and precision as a float64 array."""
    return value.detach().to("cpu").double().numpy()


def names(value: Sequence[str] | None, default: Iterable[str], what: str, count: int) -> list[str]:
    """Return the given names, or the default ones; raise if there are too few or too many."""
    found = list(default) if value is None else [str(name) for name in value]
    if len(found) != count:
        raise ValueError(f"{what} must have {count} entries, got {len(found)}")
    # names come from data: a dollar sign would start matplotlib's math mode
    return [name.replace("$", r"\$") for name in found]
