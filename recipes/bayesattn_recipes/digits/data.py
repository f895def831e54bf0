"""Small images with few labels, split once, with shifted and foreign test images made from the test split.

Nothing is downloaded. `digits` are scikit-learn's 1,797 handwritten digits of 8 × 8 pixels. `shapes` are generated pictures
of one to four colored shapes (`vision/shapes.py`), reduced to 16 × 16 pixels; the class is the color of the leftmost shape,
the upper one of two in a column, so it has to be found among the others. Few images are used for training: with many, the
model is almost always right and there is no uncertainty to look at.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from scipy import ndimage
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

from bayesattn.scalars import check_not_negative
from bayesattn_recipes.vision.shapes import COLORS, make_shapes_world

DatasetName = Literal["digits", "shapes"]


class Look(NamedTuple):
    """How the images of a data set are read: 4 × 4 patches, and the names of the classes."""

    patch: int
    channels: int
    class_names: tuple[str, ...]


LOOKS: dict[str, Look] = {
    "digits": Look(2, 1, tuple(map(str, range(10)))),
    "shapes": Look(4, 3, COLORS),
}
# patches along a side
GRID = 4
VALIDATION_SIZE = 300
TEST_SIZE = 600
# one split for every seed and variant: runs differ in initialization, batch order and noise, never in their data
SPLIT_SEED = 20200

# name: how the test images are changed; noise comes on top, at the requested strengths
SHIFTS = ("rotated", "moved", "blurred")
OUT_OF_DISTRIBUTION = "scrambled"


@dataclass(frozen=True)
class Split:
    """Images, standardized by the training images' mean and deviation, and their labels (None: no right answer)."""

    images: Float[Tensor, "n side side *channels"]
    labels: Int[Tensor, " n"] | None


@lru_cache(maxsize=4)
def load_splits(train_size: int, dataset: DatasetName = "digits") -> dict[str, Split]:
    """Return the `train`, `validation` and `test` splits: disjoint, every class in its natural share.

    Args:
        train_size: Training images, 20 to 400.
        dataset: Name of the data set.
    """
    if dataset == "shapes":
        return _draw_shapes({"train": train_size, "validation": VALIDATION_SIZE, "test": TEST_SIZE})
    pixels, labels = load_digits(return_X_y=True)
    rest, test = _divide(np.arange(len(labels)), labels, TEST_SIZE)
    rest, validation = _divide(rest, labels, VALIDATION_SIZE)
    train, _ = _divide(rest, labels, len(rest) - train_size)
    mean, deviation = pixels[train].mean(), pixels[train].std()
    return {
        name: Split(_as_images((pixels[chosen] - mean) / deviation), torch.from_numpy(labels[chosen]).long())
        for name, chosen in (("train", train), ("validation", validation), ("test", test))
    }


def _draw_shapes(sizes: dict[str, int]) -> dict[str, Split]:
    """Draw a world of shapes for every split, and standardize them as the training pictures."""
    drawn = {}
    for place, (name, size) in enumerate(sizes.items()):
        world = make_shapes_world(size, SPLIT_SEED + place)
        pixels = world.images.permute(0, 3, 1, 2).float() / 255.0
        images = F.adaptive_avg_pool2d(pixels, GRID * LOOKS["shapes"].patch).permute(0, 2, 3, 1)
        leftmost = [min(scene, key=lambda shape: (shape.column, shape.row)) for scene in world.scenes]
        drawn[name] = images, torch.tensor([COLORS.index(shape.color) for shape in leftmost])
    train = drawn["train"][0]
    mean, deviation = train.mean(), train.std(correction=0)
    return {name: Split(((images - mean) / deviation).contiguous(), labels) for name, (images, labels) in drawn.items()}


def _divide(indices: np.ndarray, labels: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Remove `size` of the indices, every class in proportion; return those left and those removed."""
    left, taken = train_test_split(indices, test_size=size, stratify=labels[indices], random_state=SPLIT_SEED)
    return np.asarray(left), np.asarray(taken)


def shift(split: Split, kind: str) -> Split:
    """Change the images and keep the labels: turned by 20°, moved by a pixel in a diagonal direction, or blurred."""
    images = split.images.numpy()
    edge = {"mode": "constant", "cval": float(images.min())}
    if kind == "rotated":
        moved = ndimage.rotate(images, 20.0, axes=(2, 1), reshape=False, order=1, **edge)
    elif kind == "moved":
        moved = ndimage.shift(images, (0, 1, 1, 0)[: images.ndim], order=0, **edge)
    elif kind == "blurred":
        moved = ndimage.gaussian_filter(images, sigma=(0, 0.8, 0.8, 0)[: images.ndim])
    else:
        raise ValueError(f"kind must be one of {', '.join(map(repr, SHIFTS))}, got {kind!r}")
    return Split(torch.from_numpy(moved).float(), split.labels)


def add_noise(split: Split, strength: float) -> Split:
    """Add Gaussian pixel noise of `strength` standard deviations of the training pixels; the labels stay.

    The pattern is the same at every strength, so nothing else differs between strengths.
    """
    check_not_negative(strength=strength)
    noise = torch.randn(split.images.shape, generator=torch.Generator().manual_seed(0))
    return Split(split.images + strength * noise, split.labels)


def scramble(split: Split) -> Split:
    """Shuffle the pixels of each image: the gray values of a digit, but no digit or shape, so there is no right label."""
    flat = split.images.flatten(1)
    order = np.random.default_rng(0).permuted(np.tile(np.arange(flat.shape[1]), (len(flat), 1)), axis=1)
    flat = flat.gather(1, torch.from_numpy(order))
    return Split(flat.reshape(split.images.shape), None)


def evaluation_splits(train_size: int, noise: tuple[float, ...], dataset: DatasetName = "digits") -> dict[str, Split]:
    """Return all evaluation splits of a run, by name, in the order of reports.

    `validation`, `test`, `noise-σ` for every strength above 0, the `SHIFTS`, and the out-of-distribution images.
    """
    splits = load_splits(train_size, dataset)
    test = splits["test"]
    return {
        "validation": splits["validation"],
        "test": test,
        **{f"noise-{strength:g}": add_noise(test, strength) for strength in noise if strength != 0.0},
        **{kind: shift(test, kind) for kind in SHIFTS},
        OUT_OF_DISTRIBUTION: scramble(test),
    }


def _as_images(pixels: np.ndarray) -> Tensor:
    return torch.from_numpy(pixels).float().reshape(-1, 8, 8)
