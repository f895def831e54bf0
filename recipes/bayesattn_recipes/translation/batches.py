"""Batches of similar lengths, filled with tokens up to a limit, and their padded tensors."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from bayesattn_recipes.translation.text import Pairs
from bayesattn_recipes.translation.vocabulary import END, PAD, START, Vocabulary


class Corpus(NamedTuple):
    """Token numbers of sentence pairs; both sides end with the end token, the target's start token is not stored."""

    sources: list[list[int]]
    targets: list[list[int]]


def encode_pairs(pairs: Pairs, vocabulary: Vocabulary, max_tokens: int | None = None) -> Corpus:
    """Return the tokens of all pairs.

    Args:
        pairs: Sentences and translations.
        vocabulary: Vocabulary of both sides.
        max_tokens: Pairs with a longer side are left out (training); None keeps all.
    """
    encoded = zip(vocabulary.encode(pairs.sources), vocabulary.encode(pairs.targets), strict=True)
    kept = [(s, t) for s, t in encoded if max_tokens is None or max(len(s), len(t)) <= max_tokens]
    return Corpus([[*s, END] for s, _ in kept], [[*t, END] for _, t in kept])


def token_batches(
    corpus: Corpus, batch_tokens: int, generator: torch.Generator | None = None, *, pad_to: int = 1
) -> list[Int[Tensor, " b"]]:
    """Return indices of batches with at most `batch_tokens` target (and source) tokens, padding included.

    Pairs are sorted by length, so a batch holds similar ones; with a generator, equal lengths and the order of the
    batches are random. With `pad_to` above 1 a batch holds pairs whose longer side rounds up to the same number, and both
    sides are padded to it: a few shapes in all, the same in every epoch, as recorded graphs need.

    Args:
        corpus: The pairs.
        batch_tokens: Largest sentences × longest side; a longer pair is a batch of its own.
        generator: Shuffles the batches; None keeps the order of lengths, for evaluation.
        pad_to: Widths are multiples of this.
    """
    shape = torch.tensor([[len(t), len(s)] for s, t in zip(*corpus, strict=True)])
    if pad_to > 1:
        shape = (-(-shape.amax(dim=1, keepdim=True) // pad_to) * pad_to).expand(-1, 2)
    tie = torch.rand(len(shape), generator=generator) if generator is not None else torch.zeros(len(shape))
    # by target, then source; lengths are integers, so a number below 1 only breaks ties
    key = shape[:, 0].double() * 1e6 + shape[:, 1] + tie.double()
    order = torch.argsort(key, stable=True)
    longest = shape[order].amax(dim=1).tolist()
    batches, start, width = [], 0, 0
    for position, length in enumerate(longest):
        grows = pad_to > 1 and length > width
        width = max(width, length)
        if position > start and (grows or (position - start + 1) * width > batch_tokens):
            batches.append(order[start:position])
            start, width = position, length
    batches.append(order[start:])
    if generator is None:
        return batches
    return [batches[index] for index in torch.randperm(len(batches), generator=generator)]


def make_batch(sources: Sequence[list[int]], targets: Sequence[list[int]], *, pad_to: int = 1) -> dict[str, Any]:
    """Return padded tensors, and the lengths as Python numbers: the host needs them without waiting for the device.

    Keys: `source`, `source_lengths`, `target_in` (start token first), `target_out` (end token last), `target_lengths`.
    """
    longest = [max(map(len, rows)) for rows in (sources, targets)]
    if pad_to > 1:
        longest = [-(-max(longest) // pad_to) * pad_to] * 2
    return {
        "source": _pad(sources, longest[0]),
        "source_lengths": [len(tokens) for tokens in sources],
        "target_in": _pad([[START, *tokens[:-1]] for tokens in targets], longest[1]),
        "target_out": _pad(targets, longest[1]),
        "target_lengths": [len(tokens) for tokens in targets],
    }


def _pad(rows: Sequence[list[int]], width: int) -> Int[Tensor, "b n"]:
    # with numpy, which reads nested lists several times faster
    return torch.from_numpy(np.array([row + [PAD] * (width - len(row)) for row in rows], dtype=np.int64))
