"""Translate sentences, with the uncertainty of every token and of the whole sentence.

The translation is the best hypothesis of the mean model. Then M models are drawn (attention noise, or dropout masks of a
model without any), and each is used twice (`draws.py`): for the probabilities of the translation's tokens, and for a
translation of its own.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bayesattn.prediction import seeded
from bayesattn_recipes.common.prediction import usual_method
from bayesattn_recipes.translation.batches import Corpus, token_batches
from bayesattn_recipes.translation.draws import (
    Judged,
    available_methods,
    decode,
    decode_draws,
    disagreement,
    judge,
)
from bayesattn_recipes.translation.model import Translator, evaluation_tokens
from bayesattn_recipes.translation.vocabulary import END, Vocabulary


@dataclass(frozen=True)
class Token:
    """One token of a translation.

    Attributes:
        piece: Its text; a leading ▁ begins a word.
        probability: Mean over the draws.
        entropy: Entropy of the mean distribution over the vocabulary, in nats: total uncertainty.
        mutual_information: The part of the entropy that comes from disagreement between the draws.
        disagreement: Share of the draws that would have chosen another token here.
    """

    piece: str
    probability: float
    entropy: float
    mutual_information: float
    disagreement: float


@dataclass(frozen=True)
class Translation:
    """A translated sentence.

    Attributes:
        source: The sentence.
        text: Its translation.
        tokens: The translation's tokens; the end token, shown as </s>, is the last.
        score: Mean ln p per token under the draws' mean distribution; 0 is certainty.
        entropy: Mean over the tokens.
        mutual_information: Mean over the tokens.
        disagreement: 1 − mean similarity of the draws' own translations to this one (share of common tokens, in order).
        samples: The draws' own translations.
    """

    source: str
    text: str
    tokens: tuple[Token, ...]
    score: float
    entropy: float
    mutual_information: float
    disagreement: float
    samples: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return dataclasses.asdict(self)


def check_lengths(sources: Sequence[Sequence[int]], max_tokens: int, name: str) -> None:
    """Refuse sentences with more tokens than the model was built for; each is one line of `name`."""
    for number, tokens in enumerate(sources, start=1):
        if len(tokens) > max_tokens:
            raise ValueError(f"{name}, line {number} must have at most {max_tokens} tokens, got {len(tokens)}")


def translate(
    model: Translator,
    vocabulary: Vocabulary,
    sentences: Sequence[str],
    *,
    max_tokens: int,
    method: str | None = None,
    num_samples: int = 20,
    beam: int = 10,
    seed: int = 0,
) -> list[Translation]:
    """Translate sentences with their uncertainty.

    Args:
        model: In eval mode.
        vocabulary: Vocabulary of the run.
        sentences: The sentences.
        max_tokens: Length of the longest source; a longer one is an error that names its line.
        method: What is drawn; None takes the usual way of the model. `mean` gives probabilities without draws.
        num_samples: M.
        beam: Hypotheses kept for the translation; the draws' own translations are greedy.
        seed: Seed of the draws; torch's generators are left as they were.
    """
    method = usual_method(available_methods(model), method)
    encoded = vocabulary.encode(sentences)
    check_lengths(encoded, max_tokens, "input")
    sources = [[*tokens, END] for tokens in encoded]
    if not sources:
        return []
    with seeded(seed, [next(model.parameters()).device]):
        best = decode(model, sources, beam=beam)
        sampled = decode_draws(model, sources, method, num_samples)
        found: list[Translation | None] = [None] * len(sources)
        targets = [[*tokens, END] for tokens in best]
        for indices in token_batches(Corpus(sources, targets), evaluation_tokens(model)):
            chosen = indices.tolist()
            judged = judge(model, [sources[i] for i in chosen], [targets[i] for i in chosen], method, num_samples)
            for row, i in enumerate(chosen):
                found[i] = _assemble(str(sentences[i]), best[i], judged, row, sampled[i], vocabulary)
    return [translation for translation in found if translation is not None]


def _assemble(
    source: str, best: list[int], judged: Judged, row: int, own: list[list[int]], vocabulary: Vocabulary
) -> Translation:
    length = len(best) + 1
    columns = ("probability", "entropy", "mutual_information", "disagreement")
    values = {name: getattr(judged, name)[row, :length].double().cpu() for name in columns}
    pieces = [vocabulary.pieces[token] for token in (*best, END)]
    tokens = [Token(piece, *numbers) for piece, *numbers in zip(pieces, *(values[c].tolist() for c in columns), strict=True)]
    return Translation(
        source=source,
        text=vocabulary.decode(best),
        tokens=tuple(tokens),
        # a probability may underflow to 0; its logarithm is then that of the smallest float32
        score=float(values["probability"].clamp(min=torch.finfo(torch.float32).tiny).log().mean()),
        entropy=float(values["entropy"].mean()),
        mutual_information=float(values["mutual_information"].mean()),
        disagreement=disagreement(best, own),
        samples=tuple(vocabulary.decode(tokens) for tokens in own),
    )
