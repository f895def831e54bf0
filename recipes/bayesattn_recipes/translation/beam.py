"""Beam search for all sentences of a batch at once; it knows nothing of the model but its next-token probabilities.

A hypothesis y of L tokens, its end token included, has the score

    ln p(y) / ((5 + L) / 6)^a                                                  (Wu et al., 2016; the paper: a = 1, beam 10)
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.utils._pytree import tree_map

from bayesattn_recipes.translation.vocabulary import END, PAD, START

# how many steps pass before the host asks the device which sentences are finished
CHECK_EVERY = 4
# finished sentences leave the batch when at most this share is left
LEAVE_BELOW = 0.75

# (last tokens, state) → (ln p of every next token, new state); the state is a tree of tensors, batch and hypotheses first
Next = Callable[[Int[Tensor, "b k"], Any], tuple[Float[Tensor, "b k v"], Any]]


class Hypotheses(NamedTuple):
    """The best translations of every sentence, best first.

    Attributes:
        tokens: End token last, then padding.
        scores: Length-normalised log-probabilities; −inf where fewer were found than asked for.
    """

    tokens: Int[Tensor, "b k t"]
    scores: Float[Tensor, "b k"]


def length_penalty(length: int, power: float) -> float:
    """Return ((5 + L) / 6)^a."""
    return ((5.0 + length) / 6.0) ** power


@torch.no_grad()
def beam_search(
    next_log_probs: Next,
    state: Any,
    *,
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
        state: Its state before the first step, with `beam` equal hypotheses of every sentence.
        batch: Sentences.
        beam: Hypotheses kept at every step.
        max_length: Tokens of the longest hypothesis, its end token included; the last may only be that.
        penalty: The power a; 0 compares plain log-probabilities.
        num_best: Hypotheses returned; the search ends when no living one can still be among them.
        device: Of the state.
        narrow: Returns the model for some sentences of the batch; where it is given, finished sentences leave the batch.
    """
    if beam < 1 or max_length < 1 or num_best < 1:
        raise ValueError(f"beam, max_length, num_best are {beam}, {max_length}, {num_best}; allowed: at least 1")
    if penalty < 0.0:
        raise ValueError(f"penalty is {penalty!r}; allowed: at least 0")
    tokens = torch.full((batch, beam, max_length), PAD, device=device)
    last = torch.full((batch, beam), START, device=device)
    # all hypotheses are the same at first: only one may be continued
    alive = torch.full((batch, beam), -math.inf, device=device)
    alive[:, 0] = 0.0
    done = Hypotheses(tokens[:, :1].expand(-1, num_best, -1), torch.full((batch, num_best), -math.inf, device=device))
    found, rows = Hypotheses(*(value.clone() for value in done)), torch.arange(batch, device=device)
    for step in range(max_length):
        log_probs, state = next_log_probs(last, state)
        ended = Hypotheses(tokens.clone(), (alive + log_probs[..., END]) / length_penalty(step + 1, penalty))
        ended.tokens[..., step] = END
        done = _best(done, ended, num_best)
        if step + 1 == max_length:
            break
        # the best of every hypothesis, then the best of those: the vocabulary is read once; the end token may be among them
        grown, words = log_probs.topk(min(beam + 1, log_probs.shape[-1]), dim=-1)
        total = (alive.unsqueeze(-1) + grown).masked_fill(words == END, -math.inf)
        alive, flat = total.flatten(1).topk(beam, dim=1)
        origin, last = flat // total.shape[-1], words.flatten(1).gather(1, flat)
        tokens = tokens.gather(1, origin.unsqueeze(-1).expand_as(tokens))
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


def _put(found: Hypotheses, rows: Int[Tensor, " rows"], done: Hypotheses) -> None:
    for whole, part in zip(found, done, strict=True):
        whole[rows] = part


def _best(first: Hypotheses, second: Hypotheses, count: int) -> Hypotheses:
    scores, chosen = torch.cat([first.scores, second.scores], dim=1).topk(count, dim=1)
    tokens = torch.cat([first.tokens, second.tokens], dim=1)
    return Hypotheses(tokens.gather(1, chosen.unsqueeze(-1).expand(-1, -1, tokens.shape[-1])), scores)


def _reorder(value: Shaped[Tensor, "b k *d"], origin: Int[Tensor, "b k"]) -> Shaped[Tensor, "b k *d"]:
    return value.gather(1, origin.view(*origin.shape, *[1] * (value.ndim - 2)).expand_as(value))


def _is_open(
    alive: Float[Tensor, "b k"], done: Float[Tensor, "b best"], max_length: int, penalty: float
) -> Bool[Tensor, " b"]:
    """Whether a living hypothesis can still enter its sentence's list: log-probabilities only fall, penalties only grow."""
    return alive[:, 0] / length_penalty(max_length, penalty) > done[:, -1]
