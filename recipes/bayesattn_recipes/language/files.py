"""Read data files wherever they are: in a folder, beside it as `.xz`, or inside `glue.tar.xz`; and rows out of TSV text."""

import csv
import io
import lzma
import tarfile
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from bayesattn_recipes.common.sources import SOURCES

ARCHIVE = "glue.tar.xz"
OWN_LAYOUT = "train.tsv and, if you have one, dev.tsv: tab-separated, a header, the column label and one or two with texts"


def require_folder(data: Path | None, name: str) -> Path:
    """Return the data folder, or raise an error that says how to give one and what `glue`, `squad` or `own` must hold."""
    layout = f"It must hold {OWN_LAYOUT}" if name == "own" else str(SOURCES[name])
    if data is None:
        raise ValueError(f"data must be a folder, given by --data or the variable BAYESATTN_DATA, got nothing. {layout}")
    if not data.exists():
        raise ValueError(f"data {str(data)!r} does not exist. {layout}")
    return data


def find_text(data: Path, names: Sequence[str]) -> tuple[str, str] | None:
    """Return the text of the first of `names` that exists, and its place; None if none does.

    A name is looked up under `data` and `data/glue`, plain or as `.xz`, then in `glue.tar.xz` at the same two places, or
    in `data` itself if that is the archive.
    """
    for name in names:
        for folder in (data, data / "glue"):
            if (folder / name).is_file():
                return decode((folder / name).read_bytes(), str(folder / name)), str(folder / name)
            packed = folder / f"{name}.xz"
            if packed.is_file():
                return decode(unpack(packed), str(packed)), str(packed)
        for archive in (data, data / ARCHIVE, data / "glue" / ARCHIVE):
            if archive.is_file() and archive.name.endswith(".tar.xz"):
                members = _members(archive, archive.stat().st_mtime_ns)
                if name in members:
                    return decode(members[name], f"{archive}: {name}"), f"{archive}: {name}"
    return None


def unpack(path: Path) -> bytes:
    """Decompress an `.xz` file into memory."""
    try:
        return lzma.decompress(path.read_bytes())
    except lzma.LZMAError as error:
        raise ValueError(f"{path} cannot be decompressed: {error}") from None


def decode(content: bytes, where: str) -> str:
    """Return UTF-8 text without the byte-order mark that some of the files begin with."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ValueError(f"{where}, line {line}: not UTF-8 text ({error.reason})") from None


@lru_cache(maxsize=2)
def _members(archive: Path, modified: int) -> dict[str, bytes]:
    """Read the small files of an archive into memory; nothing is extracted to disk."""
    members = {}
    try:
        with tarfile.open(archive, "r:xz") as tar:
            for member in tar:
                file = tar.extractfile(member) if member.isfile() else None
                if file is not None:
                    members[member.name.removeprefix("./")] = file.read()
    except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
        raise ValueError(f"{archive} cannot be read as a tar.xz archive: {error}") from None
    return members


def parse_rows(text: str, where: str, *, quoted: bool = False) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, fields) of every row that is not blank.

    GLUE's files quote nothing: a quotation mark is part of the text, and a file in which they do not match (MRPC has 169
    such lines) would lose rows to a CSV reader. Files written by a CSV library say so by `quoted`.
    """
    if quoted:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter="\t", strict=True)
        try:
            for row in reader:
                if row:
                    yield reader.line_num, row
        except csv.Error as error:
            raise ValueError(f"{where}, line {reader.line_num}: {error}") from None
        return
    # not splitlines(): it would also cut at characters such as U+0085 and U+2028 inside a sentence
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.removesuffix("\r")
        if line:
            yield number, line.split("\t")
