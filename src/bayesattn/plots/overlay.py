"""A map of weights laid over the image it belongs to."""

import numpy as np
from jaxtyping import Float, Shaped
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from torch import Tensor

from bayesattn.plots.style import SEQUENTIAL, array

# how much of the picture shows through the map
PICTURE_SHARE = 0.45


def blend(
    image: Shaped[Tensor, "height width 3"], weights: Float[Tensor, " n"], *, grid: tuple[int, int]
) -> Float[np.ndarray, "height width 3"]:
    """Return the image in gray with one map over it in color, from 0 to the map's largest weight; RGB from 0 to 1."""
    picture = as_picture(image)
    if weights.numel() != grid[0] * grid[1]:
        raise ValueError(
            f"weights must have {grid[0] * grid[1]} entries, one for each cell of grid {grid}, got {weights.numel()}"
        )
    layer = on_grid(np.nan_to_num(array(weights)).reshape(grid), picture.shape[:2])
    return mix(picture, layer, ScalarMappable(Normalize(0.0, max(float(layer.max()), 1e-12)), SEQUENTIAL))


def as_picture(image: Shaped[Tensor, "height width 3"]) -> Float[np.ndarray, "height width 3"]:
    """Return an RGB image of bytes or of floats from 0 to 1 as floats."""
    if image.ndim != 3 or image.shape[-1] != 3 or 0 in image.shape:
        raise ValueError(f"image must have shape (height, width, 3), got {tuple(image.shape)}")
    values = array(image)
    return values if image.is_floating_point() else values / 255.0


def on_grid(cells: Float[np.ndarray, "rows columns"], size: tuple[int, ...]) -> Float[np.ndarray, "height width"]:
    """Return one weight per pixel, interpolated linearly between the centers of the cells."""
    for axis in (0, 1):
        middles = (np.arange(cells.shape[axis]) + 0.5) / cells.shape[axis]
        places = (np.arange(size[axis]) + 0.5) / size[axis]
        cells = np.apply_along_axis(lambda line, at=places, known=middles: np.interp(at, known, line), axis, cells)
    return cells


def mix(
    picture: Float[np.ndarray, "height width 3"], layer: Float[np.ndarray, "height width"], scale: ScalarMappable
) -> Float[np.ndarray, "height width 3"]:
    """Return the picture in gray, so that its colors do not mix with those of the map over it."""
    grey = np.repeat(picture.mean(axis=2, keepdims=True), 3, axis=2)
    color = np.asarray(scale.to_rgba(layer))[..., :3]
    return PICTURE_SHARE * grey + (1.0 - PICTURE_SHARE) * color
