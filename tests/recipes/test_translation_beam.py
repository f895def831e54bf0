"""Beam search: exhaustive where it can be, the textbook's where it cannot, and the same for one sentence and many."""

import itertools
import math
from typing import NamedTuple

import pytest
import torch

from bayesattn_recipes.common.beam import beam_search, length_penalty
from bayesattn_recipes.translation.vocabulary import END, MARKS, PAD, START

VOCABULARY = 6  # the four special tokens and two words


class Chain(NamedTuple):
    """A toy model's state: the number of tokens so far and the last two of them."""

    seen: torch.Tensor


def toy_model(seed, batch):
    """Log-probabilities that depend on the sentence and on the last two tokens."""
    tables = torch.randn(batch, VOCABULARY, VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2.0
    tables[..., PAD] = -math.inf
    tables[..., START] = -math.inf
    tables = torch.log_softmax(tables, dim=-1)

    def next_log_probs(tokens, state):
        rows = torch.arange(batch)[:, None].expand_as(tokens)
        return tables[rows, state.seen, tokens], Chain(tokens)

    def log_prob(sentence, tokens):
        before, last, total = START, START, 0.0
        for token in tokens:
            total += float(tables[sentence, before, last, token])
            before, last = last, token
        return total

    return next_log_probs, log_prob


def search(model, batch, beam, max_length, penalty=1.0, num_best=1):
    state = Chain(torch.full((batch, beam), START))
    sizes = {"batch": batch, "beam": beam, "max_length": max_length, "num_best": num_best}
    return beam_search(model, state, marks=MARKS, penalty=penalty, **sizes)


def all_hypotheses(max_length):
    words = [token for token in range(VOCABULARY) if token not in (PAD, START, END)]
    for length in range(max_length):
        for tokens in itertools.product(words, repeat=length):
            yield (*tokens, END)


@pytest.mark.parametrize("penalty", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_wide_beam_finds_what_exhaustive_search_finds(seed, penalty):
    batch, max_length, beam = 3, 5, 81
    model, log_prob = toy_model(seed, batch)
    found = search(model, batch, beam, max_length, penalty, num_best=20)
    for sentence in range(batch):
        scored = {tokens: log_prob(sentence, tokens) for tokens in all_hypotheses(max_length)}
        scored = {tokens: value / length_penalty(len(tokens), penalty) for tokens, value in scored.items()}
        best = sorted(scored, key=lambda tokens: scored[tokens], reverse=True)[:20]
        ours = [tuple(t for t in tokens if t != PAD) for tokens in found.tokens[sentence].tolist()]
        # with two words at most 16 hypotheses live at once, so a beam of 81 never has to choose
        assert ours == best
        for place in range(20):
            # float32 sums of five logarithms
            assert float(found.scores[sentence, place]) == pytest.approx(scored[best[place]], abs=1e-5)


def plain_beam_search(log_prob, sentence, beam, max_length, penalty):
    """The textbook, one hypothesis at a time; log-probabilities from scratch."""
    alive, done = [((), 0.0)], []
    for step in range(max_length):
        grown = []
        for tokens, _ in alive:
            ended = (*tokens, END)
            done.append((log_prob(sentence, ended) / length_penalty(len(ended), penalty), ended))
            if step + 1 < max_length:
                words = (token for token in range(VOCABULARY) if token not in (PAD, START, END))
                grown += [((*tokens, word), log_prob(sentence, (*tokens, word))) for word in words]
        alive = sorted(grown, key=lambda item: -item[1])[:beam]
    return sorted(done, reverse=True)[:beam]


@pytest.mark.parametrize("beam", [1, 2, 5])
@pytest.mark.parametrize("seed", [11, 12, 13])
def test_narrow_beam_is_the_textbook_search(seed, beam):
    batch, max_length = 4, 9
    model, log_prob = toy_model(seed, batch)
    found = search(model, batch, beam, max_length, num_best=beam)
    for sentence in range(batch):
        expected = plain_beam_search(log_prob, sentence, beam, max_length, 1.0)
        for place, (score, tokens) in enumerate(expected):
            assert [t for t in found.tokens[sentence, place].tolist() if t != PAD] == list(tokens)
            assert float(found.scores[sentence, place]) == pytest.approx(score, abs=1e-5)


def test_finished_sentences_leave_the_batch_and_the_others_do_not_notice():
    batch, beam, max_length = 7, 4, 40
    whole, _ = toy_model(5, batch)
    sizes = []

    def narrow(rows):
        sizes.append(len(rows))

        def next_log_probs(tokens, state):
            # the same tables, asked for some of the sentences
            all_tokens, all_seen = (torch.full((batch, beam), START).index_copy(0, rows, x) for x in (tokens, state.seen))
            log_probs, _ = whole(all_tokens, Chain(all_seen))
            return log_probs[rows], Chain(tokens)

        return next_log_probs

    state = Chain(torch.full((batch, beam), START))
    options = {"marks": MARKS, "batch": batch, "beam": beam, "max_length": max_length, "num_best": 3}
    expected, found = beam_search(whole, state, **options), beam_search(whole, state, narrow=narrow, **options)
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.scores, expected.scores)
    assert sizes == sorted(sizes, reverse=True)
    assert 0 < sizes[-1] < batch


def test_every_hypothesis_ends_within_the_limit():
    model, _ = toy_model(3, 2)
    found = search(model, 2, 3, 2, num_best=3)
    for tokens in found.tokens.flatten(0, 1).tolist():
        assert END in tokens


def test_search_stops_when_nothing_can_improve():
    calls = []
    table = torch.full((VOCABULARY,), -20.0)
    table[END] = -0.001

    def certain_to_end(tokens, state):
        calls.append(1)
        return table.expand(*tokens.shape, VOCABULARY).clone(), state

    search(certain_to_end, 2, 2, 1000)
    assert len(calls) <= 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam": 0, "max_length": 5}, "beam and max_length must be integers of at least 1, got 0 and 5"),
        ({"beam": 2, "max_length": 0}, "beam and max_length must be integers of at least 1, got 2 and 0"),
        (
            {"beam": 2, "max_length": 5, "penalty": -1.0},
            "num_best must be at least 1 and penalty at least 0, got 1 and -1.0",
        ),
    ],
)
def test_bad_values_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        search(toy_model(0, 1)[0], 1, **options)
