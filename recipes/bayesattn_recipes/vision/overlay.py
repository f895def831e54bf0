"""Attention over the image it looks at: prior, mean and deviation, for one question or word by word (Fig. 1)."""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float, Shaped
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from torch import Tensor

from bayesattn.plots.overlay import as_picture, mix, on_grid
from bayesattn.plots.style import SEQUENTIAL, array, names, new_figure
from bayesattn.plots.style import title as set_title

# words for the maps of a run, in the order shown; a map with another name is shown under that name
MAPS = {"prior": "prior Ψ", "mean": "mean of W", "std": "standard deviation of W"}
SHORT = {**MAPS, "std": "deviation of W"}
WORDS_PER_LINE = 8


def plot_overlay(
    image: Shaped[Tensor, "height width 3"],
    maps: Mapping[str, Float[Tensor, "t n"]],
    *,
    grid: tuple[int, int] | None = None,
    boxes: Float[Tensor, "n 4"] | None = None,
    columns: Sequence[str] | None = None,
    title: str = "",
) -> Figure:
    """Draw the image and, over gray copies of it, attention maps: one row per map, one column per word.

    Args:
        image: RGB, uint8 or floats from 0 to 1.
        maps: By name (`prior`, `mean`, `std`), weights of the regions at each of `t` steps. A map with one row is the same
            at every step and is drawn once. Prior and mean share a color scale, the deviation has its own.
        grid: Rows and columns that the regions form, row by row from the top left.
        boxes: Left, top, right, bottom of every region as fractions of the image; give `grid` or `boxes`.
        columns: One word per step; a single step needs none.
        title: Title above the figure, such as the question and its answer, or the caption.

    Example:
        >>> import torch
        >>> maps = {"mean": torch.softmax(torch.randn(3, 4), dim=-1), "std": torch.rand(3, 4)}
        >>> figure = plot_overlay(torch.rand(8, 8, 3), maps, grid=(2, 2), columns=["a", "red", "bus"], title="a red bus")
        >>> figure.get_suptitle()
        'a red bus'
    """
    picture = as_picture(image)
    drawn = {name: _laid_out(name, values, picture.shape[:2], grid, boxes) for name, values in maps.items()}
    if not drawn:
        raise ValueError("maps must hold at least one map, got none")
    steps = max(map(len, drawn.values()))
    if any(len(layers) not in (1, steps) for layers in drawn.values()):
        lengths = {name: len(layers) for name, layers in drawn.items()}
        raise ValueError(f"maps must have one row or {steps}, got {lengths}")
    words = names(columns, [""] if steps == 1 else map(str, range(steps)), "columns", steps)
    scales = _scales(drawn)
    figure = _one_line(picture, drawn, scales) if steps == 1 else _by_word(picture, drawn, scales, words)
    if title:
        figure.suptitle(title, fontsize=10, parse_math=False, wrap=True)
    return figure


def _laid_out(
    name: str, values: Tensor, size: tuple[int, ...], grid: tuple[int, int] | None, boxes: Tensor | None
) -> list[np.ndarray]:
    """Return every row of a map as one weight per pixel of the image."""
    if (grid is None) == (boxes is None):
        raise ValueError(f"give either grid or boxes, got {'both' if boxes is not None else 'neither'}")
    expected = len(boxes) if boxes is not None else (grid or (0, 0))[0] * (grid or (0, 0))[1]
    if values.ndim != 2 or values.shape[1] != expected or len(values) == 0:
        raise ValueError(
            f"map {name!r} must have shape (steps, {expected}), one weight per region, got {tuple(values.shape)}"
        )
    rows = np.nan_to_num(array(values))
    if boxes is not None:
        return [_on_boxes(row, array(boxes), size) for row in rows]
    assert grid is not None
    return [on_grid(row.reshape(grid), size) for row in rows]


def _on_boxes(weights: np.ndarray, boxes: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """Give every pixel the largest weight of the boxes that cover it."""
    layer = np.zeros(size)
    height, width = size
    for weight, (left, top, right, bottom) in zip(weights, boxes, strict=True):
        rows = slice(int(top * height), max(int(np.ceil(bottom * height)), int(top * height) + 1))
        columns = slice(int(left * width), max(int(np.ceil(right * width)), int(left * width) + 1))
        layer[rows, columns] = np.maximum(layer[rows, columns], weight)
    return layer


def _scales(drawn: Mapping[str, list[np.ndarray]]) -> dict[str, ScalarMappable]:
    """Return one color scale for all weights, so that they can be compared, and one for every deviation."""
    top = max((float(np.max(layers)) for name, layers in drawn.items() if name != "std"), default=0.0)
    tops = {name: float(np.max(layers)) if name == "std" else top for name, layers in drawn.items()}
    return {name: ScalarMappable(Normalize(0.0, max(largest, 1e-12)), SEQUENTIAL) for name, largest in tops.items()}


def _one_line(picture: np.ndarray, drawn: Mapping[str, list[np.ndarray]], scales: dict[str, ScalarMappable]) -> Figure:
    height = 2.3 * min(1.3, picture.shape[0] / picture.shape[1])
    figure, axes = new_figure(2.5 * (1 + len(drawn)) + 0.3, height + 0.9, columns=1 + len(drawn))
    _show(axes[0, 0], picture, "image")
    for ax, (name, layers) in zip(axes[0, 1:], _ordered(drawn), strict=True):
        _show(ax, mix(picture, layers[0], scales[name]), MAPS.get(name, name))
        figure.colorbar(scales[name], ax=ax, shrink=0.8, pad=0.02).ax.tick_params(labelsize=7)
    return figure


def _by_word(
    picture: np.ndarray, drawn: Mapping[str, list[np.ndarray]], scales: dict[str, ScalarMappable], words: list[str]
) -> Figure:
    """Draw lines of a few words; the picture and the maps without steps stand at the start of the first line."""
    fixed = [(name, layers[0]) for name, layers in _ordered(drawn) if len(layers) == 1]
    moving = [(name, layers) for name, layers in _ordered(drawn) if len(layers) > 1]
    across, lines = min(len(words), WORDS_PER_LINE), -(-len(words) // WORDS_PER_LINE)
    lead = -(-(1 + len(fixed)) // len(moving))
    tall = 1.45 * min(1.3, picture.shape[0] / picture.shape[1]) + 0.2
    figure, axes = new_figure(
        1.45 * (lead + across) + 1.0, tall * lines * len(moving) + 0.6, rows=lines * len(moving), columns=lead + across
    )
    for ax in axes.flat:
        ax.set_axis_off()
    leading = [("image", picture), *((MAPS.get(name, name), mix(picture, layer, scales[name])) for name, layer in fixed)]
    for index, (label, content) in enumerate(leading):
        _show(axes[index % len(moving), index // len(moving)], content, label)
    for step, word in enumerate(words):
        line, column = divmod(step, across)
        for offset, (name, layers) in enumerate(moving):
            ax = axes[line * len(moving) + offset, lead + column]
            _show(ax, mix(picture, layers[step], scales[name]), word if offset == 0 else "")
    for offset, (name, _) in enumerate(moving):
        # beside the first line only: bars over interleaved rows would overlap
        bar = figure.colorbar(scales[name], ax=axes[offset].tolist(), shrink=0.9, pad=0.01, aspect=12)
        bar.set_label(SHORT.get(name, name), fontsize=8)
        bar.ax.tick_params(labelsize=7)
    return figure


def _ordered(drawn: Mapping[str, list[np.ndarray]]) -> list[tuple[str, list[np.ndarray]]]:
    order = [*(name for name in MAPS if name in drawn), *(name for name in drawn if name not in MAPS)]
    return [(name, drawn[name]) for name in order]


def _show(ax, content: np.ndarray, label: str) -> None:
    ax.imshow(np.clip(content, 0.0, 1.0))
    ax.set_axis_off()
    set_title(ax, label.replace(r"\$", "$"))
