"""Beam search for all sentences of a batch at once; it needs only the model's next-token probabilities.

There are two kinds, which differ in how they treat a hypothesis y of L tokens that has ended.

- `beam_search` sets it aside, and the search ends when no living one can be better. Its score is
  ln p(y) / ((5 + L) / 6)^a                                                    (Wu et al., 2016; the paper: a = 1, beam 10)
- `steady_beam_search` keeps it in the beam, where it competes with the others by ln p(y); at the end all compete by
  ln p(y) / L^a. With one beam this is greedy search. All sentences take the same number of steps and the host never waits
  for the device.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.utils._pytree import tree_map

# steps between two checks of the device for finished sentences
CHECK_EVERY = 4
# finished sentences leave the batch when at most this share is unfinished
LEAVE_BELOW = 0.75

# (last tokens, state) → (ln p of every next token, new state); the state is a tree of tensors, batch and hypotheses first
Next = Callable[[Int[Tensor, "b k"], Any], tuple[Float[Tensor, "b k v"], Any]]


class Marks(NamedTuple):
    """Numbers of the special tokens: before the first word, after the last, and padding."""

    start: int
    end: int
    pad: int


class Hypotheses(NamedTuple):
    """The best sentences, best first.

    Attributes:
        tokens: End token last, then padding.
        scores: Length-normalized log-probabilities; −inf where fewer were found than requested.
    """

    tokens: Int[Tensor, "b k t"]
    scores: Float[Tensor, "b k"]


def check_sizes(beam: int, max_length: int) -> None:
    """Refuse a search without hypotheses or tokens."""
    if beam < 1 or max_length < 1:
        raise ValueError(f"beam and max_length must be integers of at least 1, got {beam} and {max_length}")


def length_penalty(length: int, power: float) -> float:
    """Return ((5 + L) / 6)^a."""
    return ((5.0 + length) / 6.0) ** power


@torch.no_grad()
def beam_search(
    next_log_probs: Next,
    state: Any,
    *,
    marks: Marks,
    batch: int,
    beam: int,
    max_length: int,
    penalty: float = 1.0,
    num_best: int = 1,
    device: torch.device | str = "cpu",
    narrow: Callable[[Int[Tensor, " rows"]], Next] | None = None,
) -> Hypotheses:
    """Return the best hypotheses found.

    Args:
        next_log_probs: The model.
        state: Its state before the first step, with `beam` equal hypotheses per sentence.
        marks: The special tokens.
        batch: Number of sentences.
        beam: Hypotheses kept at every step.
        max_length: Tokens of the longest hypothesis, including its end token; the last token may only be that.
        penalty: The power a; 0 compares plain log-probabilities.
        num_best: Hypotheses returned; the search ends when no living one can still be among them.
        device: Device of the state.
        narrow: Returns the model for some sentences of the batch; if given, finished sentences leave the batch.
    """
    if num_best < 1 or penalty < 0.0:
        raise ValueError(f"num_best must be at least 1 and penalty at least 0, got {num_best} and {penalty}")
    tokens, last, alive = _begin(marks, batch, beam, max_length, device)
    done = Hypotheses(tokens[:, :1].expand(-1, num_best, -1), torch.full((batch, num_best), -math.inf, device=device))
    found, rows = Hypotheses(*(value.clone() for value in done)), torch.arange(batch, device=device)
    for step in range(max_length):
        log_probs, state = next_log_probs(last, state)
        ended = Hypotheses(tokens.clone(), (alive + log_probs[..., marks.end]) / length_penalty(step + 1, penalty))
        ended.tokens[..., step] = marks.end
        done = _best(done, ended, num_best)
        if step + 1 == max_length:
            break
        # the best of every hypothesis, then the best of those: the vocabulary is read once; the end token may be among them
        grown, words = log_probs.topk(min(beam + 1, log_probs.shape[-1]), dim=-1)
        total = (alive.unsqueeze(-1) + grown).masked_fill(words == marks.end, -math.inf)
        alive, flat = total.flatten(1).topk(beam, dim=1)
        origin, last = flat // total.shape[-1], words.flatten(1).gather(1, flat)
        tokens = _reorder(tokens, origin)
        tokens[..., step] = last
        state = tree_map(lambda value, origin=origin: _reorder(value, origin), state)
        if (step + 1) % CHECK_EVERY == 0:
            is_open = _is_open(alive, done.scores, max_length, penalty)
            count = int(is_open.sum())
            if count == 0:
                break
            if narrow is not None and count <= LEAVE_BELOW * len(rows):
                _put(found, rows, done)
                left = is_open.nonzero().squeeze(1)
                rows, alive, last, tokens = rows[left], alive[left], last[left], tokens[left]
                done = Hypotheses(done.tokens[left], done.scores[left])
                state = tree_map(lambda value, left=left: value[left], state)
                next_log_probs = narrow(rows)
    _put(found, rows, done)
    return found


@torch.no_grad()
def steady_beam_search(
    next_log_probs: Next,
    state: Any,
    *,
    marks: Marks,
    batch: int,
    beam: int,
    max_length: int,
    penalty: float = 0.0,
    device: torch.device | str = "cpu",
) -> Hypotheses:
    """Return the best hypothesis of every sentence, and its ln p without a penalty; arguments as for `beam_search`.

    `max_length` counts words; a hypothesis that reaches it needs no end token.
    """
    tokens, last, scores = _begin(marks, batch, beam, max_length, device)
    has_ended = torch.zeros(batch, beam, dtype=torch.bool, device=device)
    lengths = torch.zeros(batch, beam, device=device)
    for step in range(max_length):
        log_probs, state = next_log_probs(last, state)
        num_words = log_probs.shape[-1]
        only_end = torch.full((num_words,), -math.inf, device=device)
        only_end[marks.end] = 0.0
        log_probs = torch.where(has_ended.unsqueeze(-1), only_end, log_probs)
        scores, chosen = (scores.unsqueeze(-1) + log_probs).flatten(1).topk(beam, dim=1)
        origin, last = chosen // num_words, chosen % num_words
        lengths = lengths.gather(1, origin) + (~has_ended.gather(1, origin)).float()
        has_ended = has_ended.gather(1, origin) | (last == marks.end)
        tokens = _reorder(tokens, origin)
        tokens[..., step] = last
        state = tree_map(lambda value, origin=origin: _reorder(value, origin), state)
    best = (scores / lengths**penalty).argmax(dim=1, keepdim=True)
    return Hypotheses(_reorder(tokens, best), scores.gather(1, best))


def _begin(
    marks: Marks, batch: int, beam: int, max_length: int, device: torch.device | str
) -> tuple[Int[Tensor, "b k t"], Int[Tensor, "b k"], Float[Tensor, "b k"]]:
    """Return empty hypotheses, their last tokens and scores."""
    check_sizes(beam, max_length)
    tokens = torch.full((batch, beam, max_length), marks.pad, device=device)
    last = torch.full((batch, beam), marks.start, device=device)
    # all hypotheses are the same at first: only one may be continued
    scores = torch.full((batch, beam), -math.inf, device=device)
    scores[:, 0] = 0.0
    return tokens, last, scores


def _put(found: Hypotheses, rows: Int[Tensor, " rows"], done: Hypotheses) -> None:
    for whole, part in zip(found, done, strict=True):
        whole[rows] = part


def _best(first: Hypotheses, second: Hypotheses, count: int) -> Hypotheses:
    scores, chosen = torch.cat([first.scores, second.scores], dim=1).topk(count, dim=1)
    return Hypotheses(_reorder(torch.cat([first.tokens, second.tokens], dim=1), chosen), scores)


def _reorder(value: Shaped[Tensor, "b k *d"], origin: Int[Tensor, "b j"]) -> Shaped[Tensor, "b j *d"]:
    return value.gather(1, origin.view(*origin.shape, *[1] * (value.ndim - 2)).expand(*origin.shape, *value.shape[2:]))


def _is_open(
    alive: Float[Tensor, "b k"], done: Float[Tensor, "b best"], max_length: int, penalty: float
) -> Bool[Tensor, " b"]:
    """Whether a living hypothesis can still enter its sentence's list: log-probabilities only fall, penalties only grow."""
    return alive[:, 0] / length_penalty(max_length, penalty) > done[:, -1]
