"""How good captions are: BLEU-1 to 4, CIDEr, ROUGE-L and METEOR against several references per image, all in percent.

The measures are those of the COCO server (`pycocoevalcap`, the extra `captioning`). METEOR and the Penn Treebank tokenizer
in front of all measures are Java programs. What cannot be computed is left out with the reason, and the result names the
tokenizer, because numbers from different tokenizers cannot be compared.
"""

import contextlib
import importlib.util
import io
import math
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bayesattn_recipes.captioning.vocabulary import tokenize

# in the order of the paper's table
MEASURES = ("BLEU-4", "BLEU-3", "BLEU-2", "BLEU-1", "CIDEr", "ROUGE-L", "METEOR")
NO_PACKAGE = "needs pycocoevalcap: pip install 'bayesattn-recipes[captioning]'"
NO_JAVA = "needs Java (a `java` command)"


@dataclass(frozen=True)
class Scores:
    """Measures of one set of captions.

    Attributes:
        values: Values by measure, in percent.
        skipped: Reasons, by measure, why it could not be computed.
        tokenizer: `PTB` (the COCO server's) or `plain` (`vocabulary.tokenize`).
    """

    values: dict[str, float]
    skipped: dict[str, str] = field(default_factory=dict)
    tokenizer: str = "plain"


def has_package() -> bool:
    """Whether `pycocoevalcap` is installed."""
    return importlib.util.find_spec("pycocoevalcap") is not None


def has_java() -> bool:
    """Whether there is a `java` command."""
    return shutil.which("java") is not None


def tools() -> str:
    """Return the tools that `score` uses here, because its results depend on them: `java`, `package` or `bleu`."""
    return "bleu" if not has_package() else "java" if has_java() else "package"


class CorpusBleu:
    """Corpus BLEU after the plain tokenizer, against references that are counted once: fast enough for use during training.

        BLEU = exp(min(0, 1 − r/c)) · (Π_n p_n)^(1/order)

    with p_n the share of n-grams that are found in a reference, each counted at most as often as it occurs there, c the
    words of all captions and r those of the references closest to them in length, the shorter of two (as on the COCO
    server).

    Args:
        references: At least one for each caption.
        order: Longest n-gram.
    """

    def __init__(self, references: Sequence[Sequence[str]], order: int = 4) -> None:
        self.order = order
        self.lengths, self.counts = [], []
        for found in references:
            texts = [tokenize(text) for text in found]
            self.lengths.append([len(words) for words in texts])
            most: Counter[tuple[str, ...]] = Counter()
            for words in texts:
                most |= _ngrams(words, order)
            self.counts.append(most)

    def __call__(self, captions: Sequence[str]) -> float:
        """Return BLEU of one caption for every entry of the references, in percent."""
        right, made = [0] * self.order, [0] * self.order
        said = wanted = 0
        for caption, lengths, most in zip(captions, self.lengths, self.counts, strict=True):
            words = tokenize(caption)
            said += len(words)
            wanted += min(lengths, key=lambda length: (abs(length - len(words)), length))
            for ngram, count in _ngrams(words, self.order).items():
                made[len(ngram) - 1] += count
                right[len(ngram) - 1] += min(count, most[ngram])
        if not all(right):
            return 0.0
        log_precision = sum(math.log(found / count) for found, count in zip(right, made)) / self.order
        return 100.0 * math.exp(min(0.0, 1.0 - wanted / said) + log_precision)


def _ngrams(words: Sequence[str], order: int) -> Counter[tuple[str, ...]]:
    """Count the n-grams of a text, of all lengths up to `order`."""
    return Counter(tuple(words[at : at + n]) for n in range(1, order + 1) for at in range(len(words) - n + 1))


def bleu(captions: Sequence[str], references: Sequence[Sequence[str]], order: int = 4) -> float:
    """Return corpus BLEU in percent after the plain tokenizer."""
    return CorpusBleu(references, order)(captions)


def score(captions: Sequence[str], references: Sequence[Sequence[str]], *, use_java: bool | None = None) -> Scores:
    """Return every measure that can be computed here.

    Args:
        captions: One per image.
        references: At least one for each of them.
        use_java: False leaves out what needs Java and uses the plain tokenizer; None uses Java if it is installed.
    """
    if not captions or len(captions) != len(references):
        raise ValueError(
            "captions and references must have the same number of entries, at least 1, "
            f"got {len(captions)} and {len(references)}"
        )
    empty = [index for index, found in enumerate(references) if not any(map(tokenize, found))]
    if empty:
        raise ValueError(f"entry {empty[0]} must have at least one reference with a word, got none")
    java = has_java() if use_java is None else use_java
    if java and not has_java():
        raise ValueError(f"use_java is True, but this {NO_JAVA}")
    if not has_package():
        values = {f"BLEU-{order}": bleu(captions, references, order) for order in (4, 3, 2, 1)}
        return Scores(values, {name: NO_PACKAGE for name in MEASURES if name not in values})
    hypotheses, targets = _treebank(captions, references) if java else _plain(captions, references)
    values = _python_measures(hypotheses, targets)
    if not java:
        return Scores(values, {"METEOR": NO_JAVA})
    values["METEOR"] = 100.0 * _with_java("METEOR", lambda: _meteor(hypotheses, targets))
    return Scores(values, tokenizer="PTB")


def image_cider(captions: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
    """Return the CIDEr of every caption, from 0 to 10, after the plain tokenizer; all references set how rare a word is."""
    if not has_package():
        raise ValueError(f"CIDEr {NO_PACKAGE}")
    from pycocoevalcap.cider.cider import Cider

    given, right = _as_dicts(*_plain(captions, references))
    return Cider().compute_score(right, given)[1].tolist()


def _plain(captions: Sequence[str], references: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """Return everything as words with one space between them."""
    return [" ".join(tokenize(text)) for text in captions], [[" ".join(tokenize(t)) for t in found] for found in references]


def _treebank(captions: Sequence[str], references: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """Return everything after the COCO server's tokenizer, in one call of Java."""
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    # the caption and its references go together; an empty line would be lost, a full stop is dropped again
    lines = {
        index: [{"caption": text.strip() or "."} for text in (caption, *found)]
        for index, (caption, found) in enumerate(zip(captions, references))
    }
    tokenized = _with_java("the PTB tokenizer", lambda: _quietly(lambda: PTBTokenizer().tokenize(lines)))
    if [len(found) for found in tokenized.values()] != [len(found) for found in lines.values()]:
        raise OSError("the PTB tokenizer returned a different number of lines than it was given")
    return [tokenized[index][0] for index in lines], [tokenized[index][1:] for index in lines]


def _python_measures(captions: list[str], references: list[list[str]]) -> dict[str, float]:
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.rouge.rouge import Rouge

    given, right = _as_dicts(captions, references)
    orders, _ = _quietly(lambda: Bleu(4).compute_score(right, given, verbose=0))
    values = {f"BLEU-{order}": float(orders[order - 1]) for order in (4, 3, 2, 1)}
    values["CIDEr"] = float(Cider().compute_score(right, given)[0])
    values["ROUGE-L"] = float(Rouge().compute_score(right, given)[0])
    return {name: 100.0 * value for name, value in values.items()}


def _meteor(captions: list[str], references: list[list[str]]) -> float:
    from pycocoevalcap.meteor.meteor import Meteor

    given, right = _as_dicts(captions, references)
    scorer = Meteor()
    try:
        return float(scorer.compute_score(right, given)[0])
    finally:
        # the scorer closes only its standard input
        for stream in filter(None, (scorer.meteor_p.stdout, scorer.meteor_p.stderr)):
            stream.close()


def _as_dicts(captions: list[str], references: list[list[str]]) -> tuple[dict[int, list[str]], dict[int, list[str]]]:
    return {index: [text] for index, text in enumerate(captions)}, dict(enumerate(references))


def _with_java(what: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (OSError, ValueError) as error:
        raise OSError(f"{what} failed to run in Java: {error}") from error


def _quietly(call: Callable[[], Any]) -> Any:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return call()
