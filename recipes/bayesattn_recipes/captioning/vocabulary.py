"""Words and their numbers: a plain tokenizer, and a vocabulary that travels with the parameters of a model."""

import itertools
import re
from collections.abc import Iterable, Sequence

from jaxtyping import Int, UInt8
from torch import Tensor

from bayesattn_recipes.common.vocabulary import UNKNOWN as UNKNOWN
from bayesattn_recipes.common.vocabulary import WordVocabulary, frequent, tensor_to_text, text_to_tensor

# one number for the beginning and the end of a caption, as in the authors' base code: a beginning is never predicted
BOUNDARY = 0
SPECIAL_WORDS = ("<end>", "<unk>")

_WORD = re.compile(r"[^\W_]+(?:-[^\W_]+)*|'s\b")


def tokenize(sentence: str) -> list[str]:
    """Return the lower-case words of a sentence without punctuation; hyphenated words stay whole, a final 's is a word.

    Example:
        >>> tokenize("A tri-colored dog's ball , twice !")
        ['a', 'tri-colored', 'dog', "'s", 'ball', 'twice']
    """
    return _WORD.findall(sentence.lower())


class Vocabulary(WordVocabulary):
    """The words of captions."""

    reserved = SPECIAL_WORDS

    @classmethod
    def build(cls, captions: Iterable[str], min_count: int) -> "Vocabulary":
        """Collect the words that occur at least `min_count` times."""
        kept = frequent((word for caption in captions for word in tokenize(caption)), min_count)
        if not kept:
            raise ValueError(
                f"no word of the captions occurs {min_count} times. Lower min_count so that some words are kept"
            )
        return cls((*SPECIAL_WORDS, *kept))

    def encode(self, sentence: str, max_length: int) -> list[int]:
        """Return the numbers of the first `max_length` words, without any boundary; unknown words become `UNKNOWN`."""
        return self.numbers(tokenize(sentence)[:max_length])

    def decode(self, numbers: Sequence[int] | Int[Tensor, " t"]) -> list[str]:
        """Return the words up to the first boundary."""
        found = itertools.takewhile(lambda number: number != BOUNDARY, map(int, numbers))
        return [self.words[number] for number in found]

    def to_tensor(self) -> UInt8[Tensor, " bytes"]:
        """Return the words as bytes, one line each, to be stored with the parameters."""
        return text_to_tensor("\n".join(self.words))

    @classmethod
    def from_tensor(cls, data: UInt8[Tensor, " bytes"]) -> "Vocabulary":
        """Read what `to_tensor` wrote."""
        return cls(tuple(tensor_to_text(data).split("\n")))
