"""Features of the regions of many images: cells of a grid, or boxes of a detector.

All other code uses one interface, `Regions`: names, and for chosen images the features with a mask that says which
regions exist. The mask comes from the files, never from zeros in the features: noise added to the features would make
padding look like regions.
"""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from bayesattn.files import read_tensors, write_tensors
from bayesattn.scalars import check_not_negative
from bayesattn_recipes.common.arrays import check_numbers, read_npz, read_packed_npy

REGIONS_SCHEMA = "bayesattn.regions/1"

# evenly spaced images that give the variance of the features: the standard error is below 1 %
_IMAGES_FOR_VARIANCE = 512
# files read at once: decompression runs outside Python's lock
_READERS = 8


class Regions:
    """Features of the regions of many images.

    Attributes:
        names: Names of the images, each once.
        dim: Features of a region.
        grid: Rows and columns that the regions form over the image, or None.
    """

    names: list[str]
    dim: int
    grid: tuple[int, int] | None = None

    def __len__(self) -> int:
        return len(self.names)

    def gather(self, indices: Int[Tensor, " b"]) -> tuple[Float[Tensor, "b r d"], Bool[Tensor, "b r"]]:
        """Return the features of these images in float32, and True where there is a region; padded to the longest."""
        raise NotImplementedError

    def boxes(self, index: int) -> Float[Tensor, "r 4"] | None:
        """Return left, top, right and bottom of an image's regions as fractions of the image; None for a grid."""
        return None

    @cached_property
    def variance(self) -> float:
        """Variance of the features over images and regions, averaged over their channels: the unit of feature noise."""
        count = min(len(self), _IMAGES_FOR_VARIANCE)
        chosen = torch.arange(count) * len(self) // count
        number, total, squares = 0, torch.zeros(self.dim).double(), torch.zeros(self.dim).double()
        for indices in chosen.split(32):
            values, mask = self.gather(indices)
            found = values[mask].double()
            number, total, squares = number + len(found), total + found.sum(dim=0), squares + found.square().sum(dim=0)
        return float((squares / number - (total / number).square()).mean())


class StoredRegions(Regions):
    """Features in memory, possibly as small integers with one step per channel.

    Args:
        names: Names of the images.
        values: Features, or integers that `step` turns into features.
        step: Factor of every channel; None for features that are stored as they are.
        mask: True where there is a region; None means everywhere.
        grid: Rows and columns, or None.
    """

    def __init__(
        self,
        names: Sequence[str],
        values: Shaped[Tensor, "n r d"],
        *,
        step: Float[Tensor, " d"] | None = None,
        mask: Bool[Tensor, "n r"] | None = None,
        grid: tuple[int, int] | None = None,
    ) -> None:
        images, regions, self.dim = values.shape
        if len(names) != images:
            raise ValueError(f"names must have {images} entries, one per image of values, got {len(names)}")
        if regions == 0 or (mask is not None and not bool(mask.any(dim=1).all())):
            has_none = torch.ones(images, dtype=torch.bool) if mask is None else ~mask.any(dim=1)
            empty = [name for name, is_empty in zip(names, has_none.tolist()) if is_empty][:3]
            raise ValueError(
                f"every image must have at least one region, but these have none: {', '.join(map(repr, empty))}"
            )
        if grid is not None and grid[0] * grid[1] != regions:
            raise ValueError(f"grid must have rows times columns = {regions} regions, got {grid}")
        self.names, self.grid = list(names), grid
        self._values, self._step, self._mask = values, step, mask

    def gather(self, indices: Int[Tensor, " b"]) -> tuple[Float[Tensor, "b r d"], Bool[Tensor, "b r"]]:
        """Return features and mask of these images."""
        # seven times as fast as `values[indices].float() * step`: copied row by row, and scaled in place
        values = self._values.index_select(0, indices)
        values = values.float() if self._step is None else values.to(torch.float32).mul_(self._step)
        if self._mask is None:
            return values, torch.ones(values.shape[:2], dtype=torch.bool)
        return values, self._mask[indices]


def load_grid_features(stem: Path) -> StoredRegions:
    """Read features that were projected to principal components and rounded to int8: `STEM_meta.npz`, `STEM_int8.npy.xz`.

    The file name ends in the grid and the components, as in `resnet50_7x9_pca512`. The components are orthonormal: noise on
    every component is the projection of noise of the same variance on every channel of the backbone.
    """
    meta_path, values_path = Path(f"{stem}_meta.npz"), Path(f"{stem}_int8.npy.xz")
    meta = read_npz(meta_path, ("names", "step"))
    step = check_numbers(meta["step"], 1, f"step of {meta_path}").astype(np.float32)
    if meta["names"].ndim != 1:
        raise ValueError(f"names of {meta_path} must hold one name per image, got shape {meta['names'].shape}")
    names = [str(name) for name in meta["names"]]
    stored = read_packed_npy(values_path)
    if stored.ndim != 3 or stored.dtype != np.int8 or stored.shape[:2] != (len(step), len(names)):
        expected = f"({len(step)}, {len(names)}, regions) of int8"
        raise ValueError(f"{values_path} must have shape {expected}, got {stored.shape} of {stored.dtype}")
    # stored component by component, which compresses better; used image by image
    values = torch.from_numpy(np.ascontiguousarray(stored.transpose(1, 2, 0)))
    return StoredRegions(names, values, step=torch.from_numpy(step), grid=grid_in_name(stem.name, values.shape[1]))


def grid_in_name(name: str, num_regions: int | None = None) -> tuple[int, int] | None:
    """Return the grid in the name of a feature file, `resnet50_7x9_pca512`: rows and columns, if they match the regions."""
    for part in name.split("_"):
        rows, times, columns = part.partition("x")
        if times and rows.isdigit() and columns.isdigit() and num_regions in (None, int(rows) * int(columns)):
            return int(rows), int(columns)
    return None


class NpzFolder(Regions):
    """Bottom-up features with one npz file per image, read on demand.

    A file `COCO_train2014_000000000009.jpg.npz` holds `x` (channels, regions), and with boxes in pixels also `bbox`
    (regions, 4), `image_w` and `image_h`: the layout of the files that accompany MCAN.

    Args:
        folders: Folders of the files.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        found = [file for folder in folders for file in sorted(folder.glob("*.npz"))]
        self._files = {file.name.removesuffix(".npz"): file for file in found}
        if len(self._files) != len(found):
            raise ValueError(
                f"{len(found) - len(self._files)} images of {folders[0]} have two files. Each image must have one"
            )
        if not self._files:
            raise ValueError(f"no npz file found in {', '.join(map(str, folders))}. There must be one per image")
        self.names = sorted(self._files)
        self.dim = self._read(0)["x"].shape[0]

    def gather(self, indices: Int[Tensor, " b"]) -> tuple[Float[Tensor, "b r d"], Bool[Tensor, "b r"]]:
        """Read these images, several at a time."""
        with ThreadPoolExecutor(_READERS) as pool:
            parts = list(pool.map(self._regions, indices.tolist()))
        lengths = torch.tensor([len(part) for part in parts])
        values = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
        return values, torch.arange(values.shape[1]) < lengths[:, None]

    def boxes(self, index: int) -> Float[Tensor, "r 4"] | None:
        """Return the boxes of an image as fractions of its size."""
        arrays = self._read(index)
        if not {"bbox", "image_w", "image_h"} <= arrays.keys():
            return None
        path = self._files[self.names[index]]
        bbox = check_numbers(arrays["bbox"], 2, f"bbox of {path}")
        width, height = (float(check_numbers(arrays[name], 0, f"{name} of {path}")) for name in ("image_w", "image_h"))
        if bbox.shape[1] != 4 or not (width > 0.0 and height > 0.0):
            raise ValueError(
                f"{path}: bbox must have shape (regions, 4) in an image of positive size, got {bbox.shape} in {width} x "
                f"{height}"
            )
        return torch.from_numpy(bbox.astype(np.float32)) / torch.tensor([width, height, width, height])

    def _regions(self, index: int) -> Float[Tensor, "r d"]:
        name, found = self.names[index], self._read(index)["x"]
        if found.shape[0] != self.dim:
            raise ValueError(f"{self._files[name]}: x must have shape ({self.dim}, regions), got {found.shape}")
        if found.shape[1] == 0:
            raise ValueError(f"every image must have at least one region, but {name!r} has none")
        return torch.from_numpy(found.T.astype(np.float32))

    def _read(self, index: int) -> dict[str, Any]:
        path = self._files[self.names[index]]
        arrays = read_npz(path, ("x",), optional=("bbox", "image_w", "image_h"))
        check_numbers(arrays["x"], 2, f"x of {path}")
        return arrays


class H5Regions(Regions):
    """Bottom-up features of many images in one HDF5 file, read on demand. Needs `h5py`.

    Datasets: `image_ids` (images), `image_features` (images, regions, channels); optional `num_boxes` (images), the
    regions that exist, and `boxes` (images, regions, 4) as fractions of the image.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        try:
            import h5py  # type: ignore[import-not-found]
        except ModuleNotFoundError:
            raise ValueError(f"{path} needs the package 'h5py'. Install it with: pip install h5py") from None
        try:
            self._file = h5py.File(path, "r")
            missing = sorted({"image_ids", "image_features"} - self._file.keys())
        except OSError as error:
            raise ValueError(f"features {path} cannot be read: {error}") from None
        if missing:
            raise ValueError(f"features {path} must have image_ids and image_features, but lack {missing}")
        raw = self._file["image_ids"][()]
        self.names = [value.decode() if isinstance(value, bytes) else str(value) for value in raw.tolist()]
        shape = self._file["image_features"].shape
        if len(shape) != 3:
            raise ValueError(f"features {path}: image_features must have shape (images, regions, channels), got {shape}")
        images, self._num_regions, self.dim = shape
        counts = self._file["num_boxes"][()] if "num_boxes" in self._file else np.full(images, self._num_regions)
        self._counts = torch.from_numpy(np.asarray(counts).astype(np.int64))
        if len(self.names) != images or len(self._counts) != images:
            raise ValueError(f"features {path} must have one id per image, got {len(self.names)} ids for {images} images")
        if images and int(self._counts.min()) < 1:
            empty = self.names[int(self._counts.argmin())]
            raise ValueError(f"every image must have at least one region, but {empty!r} has none")
        if images and int(self._counts.max()) > self._num_regions:
            most, name = int(self._counts.max()), self.names[int(self._counts.argmax())]
            raise ValueError(f"features {path}: num_boxes of {name!r} must be at most {self._num_regions}, got {most}")

    def gather(self, indices: Int[Tensor, " b"]) -> tuple[Float[Tensor, "b r d"], Bool[Tensor, "b r"]]:
        """Read these images; HDF5 needs increasing indices without repetition, so they are reordered afterwards."""
        unique, back = indices.unique(sorted=True, return_inverse=True)
        counts = self._counts[indices]
        longest = int(counts.max())
        values = torch.from_numpy(self._file["image_features"][unique.numpy(), :longest].astype(np.float32))
        return values[back], torch.arange(longest) < counts[:, None]

    def boxes(self, index: int) -> Float[Tensor, "r 4"] | None:
        """Return the boxes of an image."""
        if "boxes" not in self._file:
            return None
        return torch.from_numpy(self._file["boxes"][index, : int(self._counts[index])].astype(np.float32))


def write_regions(path: Path, names: Sequence[str], values: Float[Tensor, "n r d"], grid: tuple[int, int] | None) -> None:
    """Write features of your own images as a safetensors file for `read_regions`."""
    meta = {"bayesattn": json.dumps({"schema": REGIONS_SCHEMA, "names": list(names), "grid": grid})}
    write_tensors(path, {"values": values.half()}, meta)


def read_regions(path: Path) -> StoredRegions:
    """Read what `write_regions` wrote."""
    tensors, header = read_tensors(path)
    try:
        meta = json.loads(header["bayesattn"])
        schema, names, grid, values = meta["schema"], meta["names"], meta["grid"], tensors["values"]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a feature file of bayesattn: {error}") from None
    if schema != REGIONS_SCHEMA or values.ndim != 3:
        raise ValueError(
            f"{path} must have schema {REGIONS_SCHEMA!r} and values (images, regions, channels), got schema {schema!r}"
        )
    return StoredRegions(names, values, grid=None if grid is None else (int(grid[0]), int(grid[1])))


def add_noise(
    values: Float[Tensor, "b r d"], variance: float, generator: torch.Generator | None = None
) -> Float[Tensor, "b r d"]:
    """Add Gaussian noise of this variance to every feature of every region, padding included; masks do not change."""
    check_not_negative(variance=variance)
    noise = torch.randn(values.shape, generator=generator, device=values.device)
    return values + variance**0.5 * noise
