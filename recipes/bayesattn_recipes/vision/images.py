"""Pictures in a folder or an uncompressed tar file, read one at a time by name.

Only the place of every picture is kept in memory. A missing or undecodable picture raises an error with its name:
an attention map must never be drawn over the wrong picture.
"""

import io
import tarfile
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image, UnidentifiedImageError
from torch import Tensor

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp")


def decode_image(content: bytes, name: str, max_side: int | None = None) -> UInt8[Tensor, "height width 3"]:
    """Decode a picture into RGB, made smaller so that no side exceeds `max_side`.

    Raises:
        ValueError: The bytes are not a picture, or a damaged or far too large one.
    """
    try:
        with warnings.catch_warnings():
            # a few kilobytes may unpack to gigapixels, and below its hard limit Pillow only warns
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(content)) as image:
                rgb = image.convert("RGB")
    except UnidentifiedImageError:
        # Pillow's own message names an object in memory
        raise ValueError(f"image {name} cannot be decoded: unknown format. Give a whole JPEG, PNG or similar") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(f"image {name} cannot be decoded: {error}. Give a whole JPEG, PNG or similar") from None
    if max_side is not None:
        rgb.thumbnail((max_side, max_side))
    return torch.from_numpy(np.array(rgb))


def read_image(path: Path, max_side: int | None = None) -> UInt8[Tensor, "height width 3"]:
    """Read one picture file."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"image {path} cannot be read: {error.strerror}") from None
    return decode_image(content, str(path), max_side)


class ImageSource:
    """The pictures in a folder, or in a tar file without compression.

    Args:
        path: The folder or tar file; pictures in subfolders are named by their file name, which has to be unique.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._places: dict[str, Path | tuple[int, int]] = {}
        found = _in_folder(path) if path.is_dir() else _in_tar(path)
        for name, place in found:
            if name in self._places:
                raise ValueError(f"{path} holds two images named {name!r}. Each name must occur once")
            self._places[name] = place
        if not self._places:
            raise ValueError(f"{path} holds no image, that is, no file ending in {', '.join(SUFFIXES)}")

    @property
    def names(self) -> list[str]:
        """File names of all pictures, sorted."""
        return sorted(self._places)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def __len__(self) -> int:
        return len(self._places)

    def read(self, name: str, max_side: int | None = None) -> UInt8[Tensor, "height width 3"]:
        """Return one picture in RGB, made smaller so that no side exceeds `max_side`."""
        place = self._places.get(name)
        if place is None:
            raise ValueError(f"image {name!r} is not in {self.path}, which has {len(self)} images")
        if isinstance(place, Path):
            return read_image(place, max_side)
        offset, size = place
        with self.path.open("rb") as file:
            file.seek(offset)
            return decode_image(file.read(size), f"{name!r} of {self.path}", max_side)

    def unreadable(self, names: Iterable[str]) -> dict[str, str]:
        """Return, by name, why a picture cannot be read; for callers that skip and count such pictures."""
        reasons = {}
        for name in names:
            try:
                self.read(name)
            except ValueError as error:
                reasons[name] = str(error)
        return reasons


@dataclass(frozen=True)
class Pictures:
    """Images of a data set: tensors by name, or files with a suffix added to the name."""

    found: ImageSource | dict[str, UInt8[Tensor, "height width 3"]]
    suffix: str = ""

    def __contains__(self, name: str) -> bool:
        return name + self.suffix in self.found

    def read(self, name: str, max_side: int | None = None) -> UInt8[Tensor, "height width 3"]:
        """Return one image, files made smaller so that no side exceeds `max_side`."""
        if isinstance(self.found, ImageSource):
            return self.found.read(name + self.suffix, max_side)
        if name not in self.found:
            have = f"{len(self.found)} pictures ({next(iter(self.found))!r} first)"
            raise ValueError(f"image {name!r} is neither a file nor one of the data set's {have}")
        return self.found[name]


def _in_folder(path: Path) -> Iterable[tuple[str, Path]]:
    return ((file.name, file) for file in sorted(path.rglob("*")) if file.suffix.lower() in SUFFIXES and file.is_file())


def _in_tar(path: Path) -> list[tuple[str, tuple[int, int]]]:
    try:
        with tarfile.open(path, "r:") as archive:
            return [
                (Path(member.name).name, (member.offset_data, member.size))
                for member in archive
                if member.isfile() and Path(member.name).suffix.lower() in SUFFIXES
            ]
    except (OSError, tarfile.TarError) as error:
        raise ValueError(f"{path} cannot be read: {error}. Give a folder or an uncompressed tar file") from None
