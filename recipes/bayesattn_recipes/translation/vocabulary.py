"""Joint byte-pair encoding of both languages, learned from the training text (Hugging Face `tokenizers`)."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from bayesattn.files import RunError, write_bytes
from bayesattn_recipes.common.beam import Marks

PAD, UNKNOWN, START, END = range(4)
MARKS = Marks(start=START, end=END, pad=PAD)
SPECIAL = ("<pad>", "<unk>", "<s>", "</s>")
FILE = "vocabulary.json"
# marks the beginning of a word, as in SentencePiece
SPACE = "▁"


class Vocabulary:
    """Map sentences to token numbers and back; punctuation is split off, spaces are part of the tokens.

    Args:
        tokenizer: From `learn` or `load`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def learn(cls, sentences: Iterable[str], size: int, *, lowercase: bool = False) -> "Vocabulary":
        """Learn merges until there are `size` tokens, or no pair of tokens occurs twice.

        Args:
            sentences: Training text of both languages.
            size: Tokens, special ones included.
            lowercase: Whether to lower-case all text.
        """
        tokenizer = Tokenizer(models.BPE(unk_token=SPECIAL[UNKNOWN]))
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), *([normalizers.Lowercase()] if lowercase else [])])
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Metaspace(SPACE), pre_tokenizers.Punctuation("isolated")]
        )
        tokenizer.decoder = decoders.Metaspace(SPACE)
        trainer = trainers.BpeTrainer(
            vocab_size=size, min_frequency=2, special_tokens=list(SPECIAL), show_progress=False, limit_alphabet=1000
        )
        tokenizer.train_from_iterator(sentences, trainer)
        return cls(tokenizer)

    def save(self, folder: Path) -> None:
        """Write `vocabulary.json`."""
        write_bytes(folder / FILE, self._tokenizer.to_str(pretty=True).encode())

    @classmethod
    def load(cls, folder: Path) -> "Vocabulary":
        """Read `vocabulary.json`."""
        path = folder / FILE
        try:
            found = cls(Tokenizer.from_str(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise RunError(f"{path} cannot be read: {error.strerror}") from None
        # the Rust library raises plain exceptions
        except Exception as error:
            raise RunError(f"{path} is not a vocabulary: {error}") from None
        numbers = found._tokenizer.get_vocab()
        if sorted(numbers.values()) != list(range(len(numbers))) or [numbers.get(word) for word in SPECIAL] != [*range(4)]:
            raise RunError(
                f"{path} is not a vocabulary: numbers must run from 0 without gaps, with {', '.join(SPECIAL)} first"
            )
        return found

    def __len__(self) -> int:
        return self._tokenizer.get_vocab_size()

    def encode(self, sentences: Sequence[str]) -> list[list[int]]:
        """Return the tokens of every sentence, without start and end."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(sentences))]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; special ones are left out."""
        return self._tokenizer.decode(list(tokens))

    @cached_property
    def pieces(self) -> list[str]:
        """The text of every token, as it is stored: a leading ▁ begins a word."""
        found = {number: piece for piece, number in self._tokenizer.get_vocab().items()}
        return [found[number] for number in range(len(self))]
