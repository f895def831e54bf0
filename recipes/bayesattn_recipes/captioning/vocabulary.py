"""Words and their numbers: a plain tokenizer, and a vocabulary that travels with the parameters of a model."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

# one number says "here a caption begins or ends", as in the authors' base code: nobody ever has to predict a begin
BOUNDARY, UNKNOWN = 0, 1
SPECIAL_WORDS = ("<end>", "<unk>")

_WORD = re.compile(r"[^\W_]+(?:-[^\W_]+)*|'s\b")


def tokenize(sentence: str) -> list[str]:
    """Return the lower-case words of a sentence without punctuation; hyphened words stay whole, a final 's is a word.

    Example:
        >>> tokenize("A tri-colored dog's ball , twice !")
        ['a', 'tri-colored', 'dog', "'s", 'ball', 'twice']
    """
    return _WORD.findall(sentence.lower())


@dataclass(frozen=True)
class Vocabulary:
    """Words by number; the first two are `SPECIAL_WORDS`.

    Args:
        words: All of them, each once.
    """

    words: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.words[: len(SPECIAL_WORDS)] != SPECIAL_WORDS:
            raise ValueError(f"words begins with {self.words[:2]!r}; allowed: {SPECIAL_WORDS!r}")
        if len(self._numbers) != len(self.words):
            twice = [word for word, count in Counter(self.words).items() if count > 1]
            raise ValueError(f"words holds {twice[:3]} more than once; allowed: each word once")

    @classmethod
    def build(cls, captions: Iterable[str], min_count: int) -> "Vocabulary":
        """Collect the words that occur at least `min_count` times, the most frequent first, ties in alphabetical order."""
        if min_count < 1:
            raise ValueError(f"min_count is {min_count!r}; allowed: an integer of at least 1")
        counts = Counter(word for caption in captions for word in tokenize(caption))
        kept = sorted((word for word, count in counts.items() if count >= min_count), key=lambda word: (-counts[word], word))
        if not kept:
            raise ValueError(f"no word of the captions occurs {min_count} times; allowed: a min_count that keeps some")
        return cls((*SPECIAL_WORDS, *kept))

    def __len__(self) -> int:
        return len(self.words)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}

    def encode(self, sentence: str, max_length: int) -> list[int]:
        """Return the numbers of the first `max_length` words, without any boundary; words not known become `UNKNOWN`."""
        return [self._numbers.get(word, UNKNOWN) for word in tokenize(sentence)[:max_length]]

    def decode(self, numbers: Sequence[int] | Int[Tensor, " t"]) -> list[str]:
        """Return the words up to the first boundary."""
        found = []
        for number in map(int, numbers):
            if number == BOUNDARY:
                break
            found.append(self.words[number])
        return found

    def to_tensor(self) -> UInt8[Tensor, " bytes"]:
        """Return the words as UTF-8 bytes, a line each, to be kept beside the parameters they belong to."""
        return torch.frombuffer(bytearray("\n".join(self.words).encode()), dtype=torch.uint8)

    @classmethod
    def from_tensor(cls, data: UInt8[Tensor, " bytes"]) -> "Vocabulary":
        """Read what `to_tensor` wrote."""
        return cls(tuple(bytes(data.tolist()).decode().split("\n")))
