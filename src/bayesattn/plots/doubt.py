"""A text with its doubtful words shaded, where in the model the doubt arises, and the answer it is about."""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from torch import Tensor

from bayesattn.plots.style import BAD, NEUTRAL, SEQUENTIAL, array, main_title, names, new_figure, plain
from bayesattn.plots.style import title as set_title

# characters of a line of text, and points of a letter
COLUMNS, SIZE = 56, 9
# share of the variance with the darkest shade
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
        tokens: What stands at each key position; words, or tokens as the tokenizer cuts them.
        by_token: Variance of each.
        by_head: Variance by attention module and head, as `{name: heads[i] for name, heads in result.by_head.items()}`.
        probabilities: Of the classes.
        class_names: Of the classes; numbers if None.
        title: Above the figure.
    """
    variance = array(by_token)
    if variance.shape != (len(tokens),) or not len(tokens):
        raise ValueError(f"by_token has shape {variance.shape} and there are {len(tokens)} tokens; give one value per token")
    if not by_head:
        raise ValueError("by_head is empty; give the closed form's parts, draws have none")
    widths = {heads.shape[0] for heads in by_head.values()}
    heads = np.full((len(by_head), max(widths)), np.nan)
    for row, values in enumerate(by_head.values()):
        heads[row, : values.shape[0]] = array(values)
    chances = array(probabilities)
    classes = names(class_names, map(str, range(len(chances))), "class_names", len(chances))
    places = _places(tokens)
    lines = places[-1][1] + 1
    figure, axes = new_figure(9.0, max(2.4, 0.24 * lines + 1.0), columns=3, width_ratios=(5.0, 1.6, 1.4))
    _draw_text(axes[0, 0], tokens, variance / max(variance.sum(), np.finfo(float).tiny), places, lines)
    image = axes[0, 1].imshow(heads / max(np.nansum(heads), np.finfo(float).tiny), cmap=SEQUENTIAL, vmin=0.0, aspect="auto")
    figure.colorbar(image, ax=axes[0, 1], shrink=0.8).ax.tick_params(labelsize=7)
    axes[0, 1].set(xlabel="head", ylabel="layer")
    set_title(axes[0, 1], "share of the variance")
    axes[0, 2].barh(range(len(chances)), chances, color=NEUTRAL)
    axes[0, 2].set(xlim=(0.0, 1.0), yticks=range(len(chances)), yticklabels=classes)
    axes[0, 2].invert_yaxis()
    plain(axes[0, 2])
    set_title(axes[0, 2], "probability")
    main_title(figure, title)
    return figure


def _places(tokens: Sequence[str]) -> list[tuple[int, int]]:
    """Return column and line of every token, one space apart, broken where a line is full."""
    places, column, line = [], 0, 0
    for token in tokens:
        if column and column + len(token) > COLUMNS:
            column, line = 0, line + 1
        places.append((column, line))
        column += len(token) + 1
    return places


def _draw_text(ax: Axes, tokens: Sequence[str], shares: np.ndarray, places: Sequence[tuple[int, int]], lines: int) -> None:
    ax.set(xlim=(0, COLUMNS), ylim=(lines - 0.3, -0.7))
    ax.axis("off")
    for token, share, (column, line) in zip(tokens, shares, places, strict=True):
        shade = {"facecolor": (*to_rgb(BAD), 0.85 * min(1.0, share / DARKEST)), "edgecolor": "none", "pad": 1.5}
        ax.text(column, line, token, family="monospace", fontsize=SIZE, va="center", parse_math=False, bbox=shade)
    set_title(ax, "words by their share of the variance")
