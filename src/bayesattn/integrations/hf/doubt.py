"""Doubt of a text classifier, text by text: the answer, how far to trust it, and the words the doubt comes from."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bayesattn.doubt import Uncertainty, uncertainty
from bayesattn.doubt.texts import check_texts, token_limit

Pair = tuple[str, str]


@dataclass(frozen=True)
class TextDoubt:
    """One text, a classifier's answer and its doubt.

    Attributes:
        text: As given; for a pair, both texts, one after the other.
        label: Name of the most probable class.
        probability: Probability of that class, by the model as it is.
        margin: Difference of the two largest logits.
        std: Its standard deviation under attention noise.
        t: margin / std; a small t is doubtful, an infinite one is that of an answer that no attention score moves.
        pieces: The text as words and the characters between them, each with its share of the variance.
        special: Share of the tokens that are not text ([CLS], [SEP]).
        by_head: Share by attention module and head.
        is_cut: Whether the text is longer than tokenizer and model allow, so that the end was not read.
    """

    text: str
    label: str
    probability: float
    margin: float
    std: float
    t: float
    pieces: list[tuple[str, float]]
    special: float
    by_head: dict[str, list[float]]
    is_cut: bool = False

    @property
    def words(self) -> list[tuple[str, float]]:
        """The words with their shares, largest first."""
        return sorted(((piece, share) for piece, share in self.pieces if share > 0.0), key=lambda item: -item[1])


def doubt_texts(
    model: nn.Module, tokenizer: Any, texts: Sequence[str | Pair], *, batch_size: int = 16
) -> Iterator[TextDoubt]:
    """Yield the doubt of every text, in their order; what is longer than tokenizer and model allow is cut off.

    Args:
        model: A transformers sequence classifier, plain or Bayesian; left unchanged.
        tokenizer: Its fast tokenizer, which maps tokens to positions in the text.
        texts: Texts, or pairs of texts.
        batch_size: Texts per pass.

    Raises:
        ValueError: `texts` is a string, there is no text, one is empty, or the tokenizer is a slow one.
    """
    check_texts("texts", texts)
    if not texts:
        raise ValueError("texts must hold at least one text, got none")
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError("the tokenizer must be a fast one: slow ones do not return the position of a token in the text")
    for number, text in enumerate(texts, start=1):
        if not any(part.strip() for part in ([text] if isinstance(text, str) else text)):
            raise ValueError(f"text {number} is empty")
    device = next(model.parameters()).device
    limit = token_limit(model, tokenizer)
    for start in range(0, len(texts), batch_size):
        part = texts[start : start + batch_size]
        first = [text if isinstance(text, str) else text[0] for text in part]
        second = None if isinstance(part[0], str) else [text[1] for text in part]
        whole = tokenizer(first, second, verbose=False)["input_ids"]
        encoded = tokenizer(first, second, padding=True, truncation=True, max_length=limit, return_tensors="pt")
        result = uncertainty(model, {name: value.to(device) for name, value in encoded.items()})
        for row, text in enumerate(part):
            parts, is_cut = (text,) if isinstance(text, str) else text, len(whole[row]) > limit
            yield _describe(result, row, parts, encoded.encodings[row], model, is_cut)


def _describe(result: Uncertainty, row: int, parts: tuple[str, ...], encoding: Any, model: Any, is_cut: bool) -> TextDoubt:
    assert result.probabilities is not None
    assert result.label is not None
    variance = float(result.std[row]) ** 2
    label = int(result.label[row])
    tokens = result.by_token
    shares = torch.zeros(len(encoding.ids)) if tokens is None else _share(tokens[row], variance)
    pieces: list[tuple[str, float]] = []
    for number, text in enumerate(parts):
        pieces += [("\n", 0.0)] if number else []
        pieces += _pieces(text, encoding, number, shares)
    return TextDoubt(
        text="\n".join(parts),
        label=str(getattr(model.config, "id2label", {}).get(label, label)),
        probability=float(result.probabilities[row, label]),
        margin=float(result.margin[row]),
        std=float(result.std[row]),
        t=float(result.t[row]),
        pieces=pieces,
        special=0.0 if tokens is None or not variance else max(0.0, 1.0 - sum(share for _, share in pieces)),
        by_head={name: _share(heads[row], variance).tolist() for name, heads in result.by_head.items()},
        is_cut=is_cut,
    )


def _share(part: Tensor, variance: float) -> Tensor:
    return part.detach().double().cpu() / (variance or 1.0)


def _pieces(text: str, encoding: Any, number: int, shares: Tensor) -> list[tuple[str, float]]:
    """Cut a text at its word boundaries; a word's share is the sum over its tokens."""
    words: dict[int, tuple[int, int, float]] = {}
    for position, (sequence, word) in enumerate(zip(encoding.sequence_ids, encoding.word_ids, strict=True)):
        if sequence == number and word is not None:
            start, end = encoding.offsets[position]
            first, _, before = words.get(word, (start, end, 0.0))
            words[word] = (first, end, before + float(shares[position]))
    pieces, at = [], 0
    for start, end, share in words.values():
        pieces += [(text[at:start], 0.0)] if at < start else []
        pieces.append((text[start:end], share))
        at = end
    return pieces + ([(text[at:], 0.0)] if at < len(text) else [])
