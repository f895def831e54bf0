"""Translations of a trained model and of draws from it: beam search, greedy translations of draws, token distributions.

A draw is a model: with attention noise, with dropout masks if the model has no such noise, or with both.
"""

import difflib
import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bayesattn.metrics.disagreement import entropy
from bayesattn.prediction import sampling
from bayesattn_recipes.common.beam import beam_search
from bayesattn_recipes.common.prediction import drawing_methods, usual_method
from bayesattn_recipes.translation.batches import Corpus, make_batch, token_batches
from bayesattn_recipes.translation.decoder import Memory
from bayesattn_recipes.translation.model import Translator, evaluation_tokens
from bayesattn_recipes.translation.vocabulary import END, MARKS, PAD


def available_methods(model: Translator) -> list[str]:
    """Return what can be drawn from a model: `mean`, then the usual way."""
    return drawing_methods(is_stochastic=model.decoder.config.is_stochastic, drops=model.dropout.p > 0.0)


def drawing(model: Translator, method: str) -> AbstractContextManager[object]:
    """Return the context in which calls of the model draw: nothing, attention noise, dropout masks, or both."""
    method = usual_method(available_methods(model), method)
    return nullcontext() if method == "mean" else sampling(model, dropout=method.endswith("dropout"))


@torch.no_grad()
def decode(
    model: Translator,
    sources: Sequence[list[int]],
    *,
    beam: int = 10,
) -> list[list[int]]:
    """Return the best translation of every source, without its end token.

    Args:
        model: In eval mode, or inside `sampling`.
        sources: Tokens, end token last.
        beam: Hypotheses kept.
    """
    found: list[list[int]] = [[] for _ in sources]
    # ten times the tokens if only one hypothesis per sentence is kept
    for indices, memory in _encoded(model, sources, evaluation_tokens(model) * 10 // min(beam, 10)):
        longest = max(len(sources[index]) for index in indices)
        best = beam_search(
            functools.partial(model.next_log_probs, memory=memory),
            model.decoder.start(memory, beam),
            marks=MARKS,
            batch=len(indices),
            beam=beam,
            # English is rarely more than 50 % longer than its German
            max_length=longest + longest // 2 + 10,
            device=memory.values.device,
            narrow=lambda rows, memory=memory: functools.partial(model.next_log_probs, memory=memory.take(rows)),
        )
        for index, tokens in zip(indices, best.tokens[:, 0].tolist(), strict=True):
            found[index] = tokens[: tokens.index(END)]
    return found


def decode_draws(model: Translator, sources: Sequence[list[int]], method: str, num_samples: int) -> list[list[list[int]]]:
    """Return, for every source, the greedy translations of M draws, all decoded side by side; none for `mean`."""
    if method == "mean":
        return [[] for _ in sources]
    repeated = [tokens for tokens in sources for _ in range(num_samples)]
    with drawing(model, method):
        found = decode(model, repeated, beam=1)
    return [found[start : start + num_samples] for start in range(0, len(found), num_samples)]


def _encoded(model: Translator, sources: Sequence[list[int]], batch_tokens: int) -> Iterator[tuple[list[int], Memory]]:
    device = next(model.parameters()).device
    for indices in token_batches(Corpus(list(sources), list(sources)), batch_tokens):
        chosen = indices.tolist()
        batch = make_batch([sources[i] for i in chosen], [sources[i] for i in chosen])
        yield chosen, model.encode(batch["source"].to(device), batch["source_lengths"])


@dataclass(frozen=True)
class Judged:
    """Statistics of M draws along given targets, step by step; padded steps are 0.

    Attributes:
        probability: Probability of the target tokens, under the mean distribution.
        entropy: Entropy of the mean distribution.
        mutual_information: Entropy of the mean minus mean entropy.
        disagreement: Share of draws whose most probable token is not the target.
        confidence: Probability of the mean distribution's most probable token.
        is_right: Whether that token is the target.
        steps: True where there is a target.
    """

    probability: Float[Tensor, "b t"]
    entropy: Float[Tensor, "b t"]
    mutual_information: Float[Tensor, "b t"]
    disagreement: Float[Tensor, "b t"]
    confidence: Float[Tensor, "b t"]
    is_right: Bool[Tensor, "b t"]
    steps: Bool[Tensor, "b t"]


@torch.no_grad()
def judge(
    model: Translator, sources: Sequence[list[int]], targets: Sequence[list[int]], method: str, num_samples: int
) -> Judged:
    """Return statistics of M draws' token distributions along given targets (end token last); one batch.

    Args:
        model: In eval mode.
        sources: Tokens of the sentences.
        targets: Tokens whose probabilities are computed.
        method: What is drawn; `mean` draws nothing and needs one pass.
        num_samples: M.
    """
    device = next(model.parameters()).device
    batch = make_batch(sources, targets)
    source, target_in, target = (batch[name].to(device) for name in ("source", "target_in", "target_out"))
    count = 1 if method == "mean" else num_samples
    mean, spread, votes = (torch.zeros((), device=device) for _ in range(3))
    # run draws side by side in one batch: the decoder's steps wait for each other, its rows do not
    at_once = max(1, 10 * evaluation_tokens(model) // max(source.numel(), target.numel()))
    with drawing(model, method):
        for start in range(0, count, at_once):
            size = min(at_once, count - start)
            memory = model.encode(source.repeat(size, 1), batch["source_lengths"] * size)
            for log_probs in model.log_probs(memory, target_in.repeat(size, 1), num_parts=size):
                p = torch.exp(log_probs)
                mean = mean + p / count
                spread = spread + torch.special.entr(p).sum(dim=-1) / count
                votes = votes + (p.argmax(dim=-1) != target)
    steps = target != PAD
    confidence, favorite = mean.max(dim=-1)
    overall = entropy(mean)
    rows = {
        "probability": mean.gather(-1, target.unsqueeze(-1)).squeeze(-1),
        "entropy": overall,
        "mutual_information": (overall - spread).clamp(min=0.0),
        "disagreement": votes / count,
        "confidence": confidence,
    }
    return Judged(**{name: row * steps for name, row in rows.items()}, is_right=(favorite == target) & steps, steps=steps)


def disagreement(best: Sequence[int], own: Sequence[Sequence[int]]) -> float:
    """Return 1 − mean similarity of sampled translations to the best one; 0 without samples."""
    if not own:
        return 0.0
    # many draws are equal
    times = Counter(map(tuple, own))
    ratios = (difflib.SequenceMatcher(None, best, tokens, autojunk=False).ratio() * n for tokens, n in times.items())
    return 1.0 - sum(ratios) / len(own)
