"""Words by number, and vocabularies that travel as bytes beside the parameters of a model."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from jaxtyping import UInt8
from torch import Tensor

from bayesattn.scalars import check_count

# stands for every unknown word
UNKNOWN = 1


@dataclass(frozen=True)
class WordVocabulary:
    """Words; the place of a word is its number. The first two are `reserved`; the second of these is `UNKNOWN`.

    Args:
        words: All of them, each once.
    """

    reserved: ClassVar[tuple[str, str]]

    words: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.words[:2] != self.reserved:
            raise ValueError(f"words must begin with {self.reserved!r}, got {self.words[:2]!r}")
        if len(self.word_index) != len(self.words):
            twice = [word for word, count in Counter(self.words).items() if count > 1]
            raise ValueError(f"words must hold each word once, got {twice[:3]} more than once")

    def __len__(self) -> int:
        return len(self.words)

    @cached_property
    def word_index(self) -> dict[str, int]:
        """The number of every word."""
        return {word: number for number, word in enumerate(self.words)}

    def numbers(self, words: Sequence[str]) -> list[int]:
        """Return the numbers of words."""
        return [self.word_index.get(word, UNKNOWN) for word in words]


def frequent(words: Iterable[str], min_count: int) -> list[str]:
    """Return the words that occur at least `min_count` times, the most frequent first, ties in alphabetical order."""
    check_count("min_count", min_count)
    ordered = sorted(Counter(words).items(), key=lambda item: (-item[1], item[0]))
    return [word for word, count in ordered if count >= min_count]


def text_to_tensor(text: str) -> UInt8[Tensor, " bytes"]:
    """Return a text as UTF-8 bytes."""
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).clone()


def tensor_to_text(data: UInt8[Tensor, " bytes"]) -> str:
    """Read what `text_to_tensor` wrote."""
    return bytes(data.tolist()).decode()
