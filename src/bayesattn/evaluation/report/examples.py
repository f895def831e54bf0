"""The predictions worth a look: mistakes the model was sure of, and hits it was not, with the attention behind them."""

import base64
import io
from dataclasses import dataclass

import matplotlib.image
import numpy as np
import torch
from torch import Tensor

from bayesattn.evaluation.report.gather import Group
from bayesattn.plots.overlay import blend

# words for the stored attention maps, in the order shown
MAPS = {"prior": "prior Ψ", "mean": "mean W", "std": "std of W"}
NUM_EXAMPLES = 6


@dataclass(frozen=True)
class Example:
    """One prediction to show: words and small pictures (name and data URI)."""

    index: int
    text: str
    label: str
    predicted: str
    confidence: float
    p_value: float | None
    entropy: float
    pictures: list[tuple[str, str]]


def certain_mistakes(group: Group, split: str) -> list[Example]:
    """Return the wrong predictions of the group's first run with the highest confidence."""
    return _pick(group, split, wanted_accuracy=0.0, most_certain=True)


def uncertain_hits(group: Group, split: str) -> list[Example]:
    """Return the right predictions of the group's first run with the lowest confidence."""
    return _pick(group, split, wanted_accuracy=1.0, most_certain=False)


def _pick(group: Group, split: str, wanted_accuracy: float, most_certain: bool) -> list[Example]:
    predictions = group.runs[0].predictions
    part = predictions.splits[split]
    if part.labels is None:
        return []
    table = group.tabulate(part.samples[group.method], part.labels)
    candidates = (table.accuracy == wanted_accuracy).nonzero().flatten()
    order = table.confidence[candidates].argsort(descending=most_certain, stable=True)[:NUM_EXAMPLES]
    names = predictions.class_names
    return [
        Example(
            index=index,
            text="" if part.texts is None else part.texts[index],
            label=right_answer(part.labels[index], names),
            predicted=names[int(table.predicted[index])],
            confidence=float(table.confidence[index]),
            p_value=None if table.p_value is None else float(table.p_value[index]),
            entropy=float(table.entropy[index]),
            pictures=_pictures(group, split, index),
        )
        for index in candidates[order].tolist()
    ]


def right_answer(label: Tensor, names: list[str]) -> str:
    """Return the right class in words; if there are several, the most accepted one."""
    if label.ndim == 0:
        return names[int(label)]
    return names[int(label.argmax())] if bool(label.any()) else "none of the known answers"


def _pictures(group: Group, split: str, index: int) -> list[tuple[str, str]]:
    predictions = group.runs[0].predictions
    part = predictions.splits[split]
    pictures, picture = [], None
    if part.inputs is not None and part.inputs.ndim == 3:
        pictures.append(("input", as_png(part.inputs[index], "gray_r")))
    elif part.inputs is not None and part.inputs.ndim == 4:
        picture = part.inputs[index]
        pictures.append(("input", as_png(picture.numpy())))
    for name, words in MAPS.items():
        if name in part.attention:
            weights, grid = part.attention[name][index].mean(dim=0), predictions.key_grid
            if picture is not None and grid is not None:
                over = blend(picture, weights[-grid[0] * grid[1] :], grid=grid)
                pictures.append((words, as_png((over * 255.0).astype(np.uint8))))
            else:
                pictures.append((words, as_png(_on_grid(weights, grid), "viridis")))
    return pictures


def _on_grid(weights: Tensor, key_grid: tuple[int, int] | None) -> Tensor:
    """Lay the weights out as the keys lie in the image; other keys (a readout token) come first and are left out."""
    if key_grid is None or len(weights) < key_grid[0] * key_grid[1]:
        return weights[None]
    return weights[-key_grid[0] * key_grid[1] :].reshape(key_grid)


def as_png(values: Tensor | np.ndarray, colormap: str | None = None) -> str:
    """Return a data URI with one pixel per value, from the smallest (first color) to the largest, or per entry in RGB."""
    buffer = io.BytesIO()
    pixels = torch.nan_to_num(values.double()).numpy() if isinstance(values, Tensor) else values
    matplotlib.image.imsave(buffer, pixels, cmap=colormap, format="png")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
