"""A text or an image with its doubtful parts shaded, the layers and heads where the doubt arises, and the answer."""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float, Shaped
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from bayesattn.plots.overlay import blend
from bayesattn.plots.style import BAD, NEUTRAL, SEQUENTIAL, array, main_title, names, new_figure, plain
from bayesattn.plots.style import title as set_title

# characters per line of text, and font size in points
COLUMNS, SIZE = 56, 9
# share of the variance that gets the darkest shade
DARKEST = 0.25


def plot_doubt(
    tokens: Sequence[str],
    by_token: Float[Tensor, " n"],
    by_head: Mapping[str, Float[Tensor, " h"]],
    probabilities: Float[Tensor, " c"],
    *,
    class_names: Sequence[str] | None = None,
    title: str = "",
) -> Figure:
    """Draw one example of `ba.uncertainty`: its text, its layers and heads, and its class probabilities.

    Args:
        tokens: The text at each key position; words, or the tokenizer's tokens.
        by_token: Variance of each.
        by_head: Variance by attention module and head, as `{name: heads[i] for name, heads in result.by_head.items()}`.
        probabilities: Probabilities of the classes.
        class_names: Names of the classes; numbers if None.
        title: Above the figure.

    Example:
        >>> import torch
        >>> by_token, by_head = torch.tensor([0.1, 0.7, 0.2]), {"layer 0": torch.tensor([0.6, 0.4])}
        >>> figure = plot_doubt(["a", "good", "film"], by_token, by_head, torch.tensor([0.3, 0.7]))
        >>> figure.axes[0].get_title()
        'words by their share of the variance'
    """
    variance = array(by_token)
    if variance.shape != (len(tokens),) or not len(tokens):
        raise ValueError(f"by_token must have one value for each of the {len(tokens)} tokens, got shape {variance.shape}")
    heads, chances, classes = _answer(by_head, probabilities, class_names)
    lines = len(_lines(tokens, COLUMNS))
    figure, axes = new_figure(9.0, max(2.4, 0.24 * lines + 1.0), columns=3, width_ratios=(5.0, 1.6, 1.4))
    # a short text stands at the top, its lines as close as those of a long one
    axes[0, 0].set(xlim=(0, COLUMNS), ylim=(max(lines, 6) - 0.3, -0.7))
    axes[0, 0].axis("off")
    shade_words(axes[0, 0], tokens, _shares(variance))
    set_title(axes[0, 0], "words by their share of the variance")
    _draw_answer(axes[0, 1], axes[0, 2], heads, chances, classes)
    main_title(figure, title)
    return figure


def plot_image_doubt(
    image: Shaped[Tensor, "height width 3"],
    by_token: Float[Tensor, " n"],
    by_head: Mapping[str, Float[Tensor, " h"]],
    probabilities: Float[Tensor, " c"],
    *,
    grid: tuple[int, int],
    class_names: Sequence[str] | None = None,
    title: str = "",
) -> Figure:
    """Draw one example of `ba.uncertainty` for an image transformer: the variance of its patches laid over the image.

    Args:
        image: RGB, uint8 or floats from 0 to 1.
        by_token: Variance by key position. Patches come last, row by row from the top left. Positions before them (class
            token, registers) have no place in the image; the title says how much of the variance is theirs.
        by_head: As for `plot_doubt`.
        probabilities: Probabilities of the classes.
        grid: Rows and columns of patches.
        class_names: Names of the classes; numbers if None.
        title: Above the figure.

    Example:
        >>> import torch
        >>> by_token = torch.tensor([0.2, 0.1, 0.4, 0.2, 0.1])  # the class token, then 2 × 2 patches
        >>> image, by_head = torch.rand(8, 8, 3), {"layer 0": torch.tensor([0.6, 0.4])}
        >>> figure = plot_image_doubt(image, by_token, by_head, torch.tensor([0.3, 0.7]), grid=(2, 2))
        >>> figure.axes[0].get_title(), "20%" in figure.axes[1].get_title()
        ('image', True)
    """
    count = grid[0] * grid[1]
    if by_token.ndim != 1 or min(grid) < 1 or len(by_token) < count:
        raise ValueError(
            f"by_token must have one value per patch of grid {grid}, patches last, got shape {tuple(by_token.shape)}"
        )
    heads, chances, classes = _answer(by_head, probabilities, class_names)
    shares = _shares(array(by_token))[-count:]
    over = blend(image, by_token[-count:], grid=grid)
    tall = 2.2 * min(1.3, image.shape[0] / image.shape[1])
    figure, axes = new_figure(10.5, max(2.6, tall + 0.9), columns=4, width_ratios=(2.2, 2.6, 1.7, 1.4))
    axes[0, 0].imshow(image.detach().cpu().numpy())
    set_title(axes[0, 0], "image")
    axes[0, 1].imshow(np.clip(over, 0.0, 1.0))
    others = 1.0 - shares.sum()
    note = f" (other tokens: {others:.0%})" if len(by_token) > count else ""
    set_title(axes[0, 1], f"patches by their share of the variance{note}")
    scale = ScalarMappable(Normalize(0.0, max(shares.max(), np.finfo(float).tiny)), SEQUENTIAL)
    figure.colorbar(scale, ax=axes[0, 1], shrink=0.8, pad=0.02).ax.tick_params(labelsize=7)
    for ax in axes[0, :2]:
        ax.axis("off")
    _draw_answer(axes[0, 2], axes[0, 3], heads, chances, classes)
    main_title(figure, title)
    return figure


def shade_words(
    ax: Axes,
    words: Sequence[str],
    shares: Float[np.ndarray, " n"],
    *,
    top: float = 0.0,
    spacing: float = 1.0,
    columns: int = COLUMNS,
    size: int = SIZE,
) -> int:
    """Write words in monospaced lines, each word shaded by its share, and return the number of lines.

    Args:
        ax: Axes whose unit is a letter across and a line down.
        words: The text.
        shares: Shares of the variance, one per word; `DARKEST` and more have the darkest shade.
        top: Position of the first line.
        spacing: Distance between lines.
        columns: Letters per line.
        size: Size of a letter, in points.
    """
    lines = _lines(words, columns)
    remaining = iter(shares)
    font = {"family": "monospace", "fontsize": size, "va": "center", "parse_math": False}
    for number, line in enumerate(lines):
        column = 0
        for word in line:
            color = (*to_rgb(BAD), 0.85 * min(1.0, next(remaining) / DARKEST))
            shade = {"facecolor": color, "edgecolor": "none", "pad": 1.5}
            ax.text(column, top + spacing * number, word, bbox=shade, **font)
            column += len(word) + 1
    return len(lines)


def _lines(words: Sequence[str], columns: int) -> list[list[str]]:
    """Return the words by line, one space apart, broken where a line is full."""
    lines: list[list[str]] = [[]]
    for word in words:
        if lines[-1] and sum(map(len, lines[-1])) + len(lines[-1]) + len(word) > columns:
            lines.append([])
        lines[-1].append(word)
    return lines


def _shares(variance: np.ndarray) -> np.ndarray:
    return variance / max(np.nansum(variance), np.finfo(float).tiny)


def _answer(
    by_head: Mapping[str, Tensor], probabilities: Tensor, class_names: Sequence[str] | None
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return layers × heads with NaN where a layer has fewer heads, the probabilities, and the names of the classes."""
    if not by_head:
        raise ValueError("by_head is empty. Give a result of the closed form: draws have no parts")
    heads = np.full((len(by_head), max(values.shape[0] for values in by_head.values())), np.nan)
    for row, values in enumerate(by_head.values()):
        heads[row, : values.shape[0]] = array(values)
    chances = array(probabilities)
    return heads, chances, names(class_names, map(str, range(len(chances))), "class_names", len(chances))


def _draw_answer(left: Axes, right: Axes, heads: np.ndarray, chances: np.ndarray, classes: list[str]) -> None:
    """Draw the map of layers and heads, and the bars of the classes."""
    image = left.imshow(_shares(heads), cmap=SEQUENTIAL, vmin=0.0, aspect="auto")
    figure = left.get_figure(root=True)
    assert figure is not None
    figure.colorbar(image, ax=left, shrink=0.8).ax.tick_params(labelsize=7)
    left.set(xlabel="head", ylabel="layer")
    for axis in (left.xaxis, left.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    set_title(left, "share of the variance")
    right.barh(range(len(chances)), chances, color=NEUTRAL)
    right.set(xlim=(0.0, 1.0), yticks=range(len(chances)), yticklabels=classes)
    right.invert_yaxis()
    plain(right)
    set_title(right, "probability")
