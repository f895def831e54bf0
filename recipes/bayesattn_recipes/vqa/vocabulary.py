"""Words and answers of a model, and how texts are mapped to them. The vocabulary is stored in the run's checkpoint."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor

from bayesattn_recipes.common.vocabulary import UNKNOWN, WordVocabulary, frequent, tensor_to_text, text_to_tensor

PADDING = 0
RESERVED = ("<padding>", "<unknown>")

_NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_NUMBERS = {word: str(number) for number, word in enumerate(_NUMBER_WORDS)}
_NUMBERS["none"] = "0"
_ARTICLES = {"a", "an", "the"}
# words that annotators type without their apostrophe; those that are also words without it ("its") stay
_CONTRACTED = """
    ain't aren't can't could've couldn't didn't doesn't don't hadn't hasn't haven't how's i'm i've isn't it'll let's
    might've mightn't must've mustn't needn't shan't should've shouldn't somebody's someone's that's there's they'd
    they'll they're they've wasn't weren't what'll what're what's when's where's who'll who's won't would've wouldn't
    y'all you'd you'll you're you've
"""
_CONTRACTIONS = {word.replace("'", ""): word for word in _CONTRACTED.split()}


def tokenize(text: str) -> list[str]:
    """Return the lower-case words of a question: letters, digits and underscores; apostrophes are dropped."""
    return re.findall(r"\w+", re.sub("['’]", "", text.lower()))


def normalize_answer(answer: str) -> str:
    """Return an answer as VQA's evaluation compares it: lower case, numbers as digits, no articles, no punctuation.

    A comma between digits is dropped, a period between digits is kept, other punctuation becomes a space.
    """
    text = re.sub(r"(?<=\d),(?=\d)", "", answer.lower().strip())
    text = re.sub(r"(?<!\d)\.|\.(?!\d)", "", text)
    text = re.sub(r"[^a-z0-9.'_:$% ]+", " ", text)
    words = [_NUMBERS.get(word, word) for word in text.split()]
    return " ".join(_CONTRACTIONS.get(word, word) for word in words if word not in _ARTICLES)


@dataclass(frozen=True)
class Vocabulary(WordVocabulary):
    """Known words and answers; the position is the index, and the first two words are padding and unknown.

    Args:
        words: Words of questions.
        answers: Answers that can be given.
        max_words: Longest question; the rest is cut off.
    """

    reserved = RESERVED

    answers: tuple[str, ...]
    max_words: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.answers) < 2:
            raise ValueError(f"answers must hold at least two, got {self.answers}")

    @cached_property
    def answer_index(self) -> dict[str, int]:
        """The number of every answer."""
        return {answer: number for number, answer in enumerate(self.answers)}

    @classmethod
    def build(
        cls,
        questions: Iterable[str],
        answers: Iterable[str],
        *,
        word_min_count: int = 1,
        answer_min_count: int = 1,
        max_words: int = 14,
    ) -> "Vocabulary":
        """Count words and answers and keep the frequent ones, the most frequent first, ties in alphabetical order."""
        words = (word for question in questions for word in tokenize(question))
        return cls((*RESERVED, *frequent(words, word_min_count)), tuple(frequent(answers, answer_min_count)), max_words)

    def encode(self, questions: Sequence[str]) -> tuple[Int[Tensor, "b t"], Bool[Tensor, "b t"]]:
        """Return word indices, padded at the end to the longest question, and True where there is a word.

        A question without any word becomes one unknown word, so attention always has a key.
        """
        rows = []
        for question in questions:
            rows.append(torch.tensor(self.numbers(tokenize(question)[: self.max_words]) or [UNKNOWN]))
        lengths = torch.tensor([len(row) for row in rows])
        words = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING)
        return words, torch.arange(words.shape[1]) < lengths[:, None]

    def unknown(self, question: str) -> list[str]:
        """Return the words of a question that are not known."""
        return [word for word in tokenize(question) if word not in self.word_index]

    def to_tensor(self) -> UInt8[Tensor, " bytes"]:
        """Return the vocabulary as bytes, to be stored in a checkpoint with the parameters."""
        return text_to_tensor(json.dumps([self.words[2:], self.answers, self.max_words]))

    @classmethod
    def from_tensor(cls, content: UInt8[Tensor, " bytes"]) -> "Vocabulary":
        """Read back what `to_tensor` wrote."""
        try:
            words, answers, max_words = json.loads(tensor_to_text(content))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"the checkpoint's vocabulary cannot be read: {error}") from None
        lists = isinstance(words, list) and isinstance(answers, list) and all(isinstance(w, str) for w in (*words, *answers))
        if not lists or type(max_words) is not int or max_words < 1:
            raise ValueError(
                "the checkpoint's vocabulary cannot be read: it must hold words, answers and the longest question's length"
            )
        return cls((*RESERVED, *words), tuple(answers), max_words)
