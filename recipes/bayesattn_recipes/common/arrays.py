"""Read arrays written by other programs: no pickle, and a ValueError for anything wrong with them."""

import io
import lzma
import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

# what numpy and its decompressors raise on broken files
_BROKEN = (
    OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, OverflowError, MemoryError, RuntimeError,
    SyntaxError, struct.error, zlib.error, lzma.LZMAError, zipfile.BadZipFile,
)  # fmt: skip


def read_npz(path: Path, names: Sequence[str], optional: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """Return the arrays `names` of an npz file, and those of `optional` that it has.

    Raises:
        ValueError: The file is missing, broken, or lacks an array.
    """
    try:
        # opened here: numpy would leave a broken archive open
        with path.open("rb") as content, np.load(content, allow_pickle=False) as file:
            missing = [name for name in names if name not in file]
            if missing:
                raise ValueError(f"it lacks {', '.join(map(repr, missing))}")
            return {name: file[name] for name in (*names, *optional) if name in file}
    except _BROKEN as error:
        raise ValueError(
            f"{path} cannot be read: {_reason(error)}. It must be an npz file with {', '.join(names)}"
        ) from None


def read_packed_npy(path: Path) -> np.ndarray:
    """Return the array of an npy file compressed by xz.

    Raises:
        ValueError: The file is missing or broken.
    """
    try:
        with lzma.open(path) as file:
            return np.load(io.BytesIO(file.read()), allow_pickle=False)
    except _BROKEN as error:
        raise ValueError(f"{path} cannot be read: {_reason(error)}. It must be an npy file compressed by xz") from None


def check_numbers(array: np.ndarray, num_dimensions: int, what: str) -> np.ndarray:
    """Return the array if it holds real numbers in `num_dimensions` dimensions.

    Args:
        array: From a file.
        num_dimensions: Number of dimensions required.
        what: The array in words, for the error.
    """
    if array.ndim != num_dimensions or array.dtype.kind not in "biuf":
        raise ValueError(
            f"{what} must hold real numbers in {num_dimensions} dimensions, got shape {array.shape} and type {array.dtype}"
        )
    return array


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
