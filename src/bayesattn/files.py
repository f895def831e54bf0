"""Atomic writes and size-limited reads for the files of run folders."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

# larger than any file of its kind that this library writes; a file from elsewhere is not read without a limit
JSON_LIMIT = 64 * 2**20


class RunError(ValueError):
    """A run folder or a file in it is missing, truncated, or not what its name says."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write a whole file or nothing: into a temporary file in the same folder, which is then renamed.

    The content is on the disk before the file gets its name, and the name before this returns: even after a power cut there
    is either the old file or the new one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.", suffix=".part")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        # mkstemp makes files that only their owner can read; give this one the rights of an ordinary file
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        _to_disk(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":
        _to_disk(path.parent)


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a whole file or nothing."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def write_json(path: Path, value: Any) -> None:
    """Write JSON that other programs can read: NaN and infinity are refused, not written as words."""
    try:
        text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise ValueError(f"{path.name} would hold a number that is not finite. Use finite numbers, or null") from error
    write_bytes(path, (text + "\n").encode())


def check_file(path: Path) -> None:
    """Raise unless `path` is an ordinary file; reading a pipe or a device might never end."""
    if not path.exists():
        raise RunError(f"{path} does not exist")
    if not path.is_file():
        raise RunError(f"{path} must be a file, got {'a folder' if path.is_dir() else 'a device, pipe or socket'}")


def read_text(path: Path, limit: int, kind: str = "text") -> str:
    """Read an ordinary UTF-8 file of at most `limit` bytes; errors call its content `kind`."""
    check_file(path)
    try:
        with path.open("rb") as file:
            content = file.read(limit + 1)
        if len(content) > limit:
            raise RunError(f"{path} is larger than {limit} bytes, the limit for such a file")
        return content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{path} cannot be read as {kind}: {error}") from None


def read_json(path: Path, schema: str) -> dict[str, Any]:
    """Read a JSON object and check that it is of the given schema."""
    text = read_text(path, JSON_LIMIT, "JSON")
    try:
        value = json.loads(text)
    # an integer of more than 4,300 digits is a ValueError
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} cannot be read as JSON: {error}") from None
    found = value.get("schema") if isinstance(value, dict) else None
    if found != schema:
        raise RunError(f"{path} must have schema {schema!r}, got {found!r}")
    return value


def write_tensors(path: Path, tensors: dict[str, Tensor], meta: dict[str, str] | None = None) -> None:
    """Write named tensors as one safetensors file."""
    # safetensors refuses tensors that share memory, as the labels of several splits do
    own = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    with replacing(path) as temporary:
        try:
            safetensors.torch.save_file(own, temporary, meta)
        except safetensors.SafetensorError as error:
            raise OSError(f"{path} cannot be written: {error}") from None


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a safetensors file: its tensors and its metadata."""
    check_file(path)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    # types that torch does not have, or that this version does not know, raise errors of several kinds
    except (OSError, safetensors.SafetensorError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise RunError(f"{path} cannot be read as safetensors: {error}") from None
