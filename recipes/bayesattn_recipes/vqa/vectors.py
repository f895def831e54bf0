"""Pretrained word vectors in GloVe's text format: a word and its numbers on every line, separated by spaces."""

from collections.abc import Mapping
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor


@torch.no_grad()
def load_vectors(embedding: Float[Tensor, "words d"], path: Path, word_index: Mapping[str, int]) -> int:
    """Copy the vectors of a file into the rows of their words and return their number; other rows stay as they are.

    Raises:
        ValueError: See `read_vectors`, or the file has none of the words.
    """
    vectors = read_vectors(path, word_index, embedding.shape[1])
    if not vectors:
        raise ValueError(f"word vectors {path} have none of the {len(word_index)} words. Give vectors of their language")
    for index, vector in vectors.items():
        embedding[index] = vector
    return len(vectors)


def read_vectors(path: Path, word_index: Mapping[str, int], dim: int) -> dict[int, Float[Tensor, " d"]]:
    """Return the vectors of the words that a vocabulary has, by their index; the file is read line by line.

    Args:
        path: Path of the file.
        word_index: The words wanted.
        dim: Numbers of a vector.

    Raises:
        ValueError: The file cannot be read, has a line of the wrong length, or a vector that is not finite.
    """
    vectors: dict[int, Float[Tensor, " d"]] = {}
    try:
        # some editors put a byte-order mark before the first word
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                # split from the right: a few "words" of GloVe's largest file contain spaces
                word, *values = line.rstrip().rsplit(" ", dim)
                if len(values) != dim or (" " in word and _is_number(word.rsplit(" ", 1)[1])):
                    raise ValueError(
                        f"{path}, line {number} must be a word and word_dim = {dim} numbers, separated by single spaces, "
                        f"got {line[:40]!r}"
                    )
                if word in word_index:
                    vectors[word_index[word]] = _parse(values, f"{path}, line {number}")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"word vectors {path} cannot be read: {error}") from None
    return vectors


def _parse(values: list[str], where: str) -> Float[Tensor, " d"]:
    if all(map(_is_number, values)):
        vector = torch.tensor([float(value) for value in values])
        if bool(vector.isfinite().all()):
            return vector
    raise ValueError(f"{where}: the vector has an entry that is not a finite number")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
