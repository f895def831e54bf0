"""Sentence-aligned text files, plain or compressed, read strictly: errors name the line."""

import gzip
import lzma
import zlib
from pathlib import Path
from typing import NamedTuple

OPENERS = {"": open, ".gz": gzip.open, ".xz": lzma.open}


class Pairs(NamedTuple):
    """Sentences and their translations, in order."""

    sources: list[str]
    targets: list[str]


def find_file(folder: Path, name: str) -> Path:
    """Return `folder/name`, or the same with .gz or .xz at its end."""
    for suffix in OPENERS:
        path = folder / f"{name}{suffix}"
        if path.is_file():
            return path
    raise ValueError(f"{folder / name} does not exist, plain or as .gz or .xz")


def read_lines(path: Path) -> list[str]:
    """Read the lines of a UTF-8 file; see `decode_lines` for what is refused."""
    try:
        with OPENERS.get(path.suffix, open)(path, "rb") as file:
            content = file.read()
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} cannot be unpacked: {error}") from None
    return decode_lines(content, str(path))


def decode_lines(content: bytes, name: str) -> list[str]:
    """Return the lines of UTF-8 text, blanks at their ends removed.

    Only a line feed ends a line: Unicode's other separators occur inside sentences, and would misalign the two files.

    Raises:
        ValueError: Invalid UTF-8, or an empty line; the message has its number, from 1.
    """
    lines = content.split(b"\n")
    if lines and not lines[-1]:
        lines.pop()
    decoded = []
    for number, line in enumerate(lines, start=1):
        try:
            text = line.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise ValueError(f"{name}, line {number} is not UTF-8: {error.reason} at byte {error.start + 1}") from None
        if not text:
            raise ValueError(f"{name}, line {number} is empty. Every line must hold one sentence")
        decoded.append(text)
    return decoded


def read_pairs(source: Path, target: Path) -> Pairs:
    """Read two files whose lines are translations of each other."""
    pairs = Pairs(read_lines(source), read_lines(target))
    if len(pairs.sources) != len(pairs.targets):
        raise ValueError(
            f"{source} and {target} must have the same number of lines, each a sentence and its translation, got "
            f"{len(pairs.sources)} and {len(pairs.targets)}"
        )
    return pairs


def read_tab_separated(path: Path) -> Pairs:
    """Read a file of `target TAB source` lines (Tatoeba's export); further columns are ignored."""
    pairs = Pairs([], [])
    for number, line in enumerate(read_lines(path), start=1):
        columns = [column.strip() for column in line.split("\t")]
        if len(columns) < 2 or not columns[0] or not columns[1]:
            raise ValueError(f"{path}, line {number} must have two columns, English, tab, German, got fewer")
        pairs.targets.append(columns[0])
        pairs.sources.append(columns[1])
    return pairs
