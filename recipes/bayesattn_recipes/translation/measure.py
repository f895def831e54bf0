"""Measures of a finished run: quality, calibration, and the usefulness of its uncertainty; cost: `bench/translation.py`."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from scipy import stats
from torch import Tensor

from bayesattn.metrics.calibration import expected_calibration_error
from bayesattn_recipes.translation import bleu
from bayesattn_recipes.translation.batches import Corpus, encode_pairs, token_batches
from bayesattn_recipes.translation.draws import available_methods, decode, decode_draws, disagreement, judge
from bayesattn_recipes.translation.model import Translator, evaluation_tokens
from bayesattn_recipes.translation.text import Pairs
from bayesattn_recipes.translation.vocabulary import END, Vocabulary

# shares of the sentences that are withheld, the least certain first
REJECTED = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
SIGNALS = ("nll", "entropy", "mutual_information", "disagreement")


@contextmanager
def tf32_products() -> Iterator[None]:
    """Let a GPU multiply float32 matrices with TF32 inputs: otherwise scoring every key by itself takes longest."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@torch.no_grad()
def measure_quality(model: Translator, vocabulary: Vocabulary, pairs: Pairs, *, kind: bleu.Kind = "cased") -> dict[str, Any]:
    """Return BLEU, chrF, perplexity and token calibration of the mean model, and its translations.

    Args:
        model: In eval mode.
        vocabulary: Vocabulary of the run.
        pairs: A test set.
        kind: Kind of BLEU, see `bleu.corpus_bleu`.
    """
    corpus = encode_pairs(pairs, vocabulary)
    outputs = [vocabulary.decode(tokens) for tokens in decode(model, corpus.sources)]
    score = bleu.corpus_bleu(outputs, pairs.targets, kind)
    chrf = bleu.corpus_chrf(outputs, pairs.targets)
    return {
        "bleu": score.score,
        "bleu_signature": score.signature,
        "chrf": chrf.score,
        "chrf_signature": chrf.signature,
        **measure_tokens(model, corpus, "mean", 1),
        "outputs": outputs,
    }


def measure_calibration(
    model: Translator, vocabulary: Vocabulary, pairs: Pairs, *, num_samples: int = 20
) -> dict[str, dict[str, float]]:
    """Return `measure_tokens` of the mean model, and of the mean of M draws by every method the model has."""
    corpus = encode_pairs(pairs, vocabulary)
    found = {}
    for method in available_methods(model):
        torch.manual_seed(0)
        found[method] = measure_tokens(model, corpus, method, num_samples)
    return found


def measure_tokens(model: Translator, corpus: Corpus, method: str, num_samples: int) -> dict[str, float]:
    """Return perplexity, accuracy and expected calibration error of next-token predictions along the references."""
    columns: dict[str, list[Tensor]] = {"probability": [], "confidence": [], "is_right": []}
    for indices in token_batches(corpus, evaluation_tokens(model)):
        chosen = indices.tolist()
        judged = judge(model, [corpus.sources[i] for i in chosen], [corpus.targets[i] for i in chosen], method, num_samples)
        for name, values in columns.items():
            values.append(getattr(judged, name)[judged.steps].cpu())
    probability, confidence, is_right = (torch.cat(values) for values in columns.values())
    nll = -probability.clamp(min=torch.finfo(torch.float32).tiny).double().log().mean()
    # a float32 sum of probabilities may exceed 1 by its rounding
    ece = expected_calibration_error(confidence.clamp(max=1.0), is_right)
    return {
        "perplexity": math.exp(float(nll)),
        "token_accuracy": float(is_right.double().mean()),
        "token_ece": float(ece),
    }


@torch.no_grad()
def sentence_uncertainty(
    model: Translator, sources: Sequence[list[int]], outputs: Sequence[list[int]], method: str, num_samples: int
) -> dict[str, list[float]]:
    """Return the uncertainty of every translation by each signal; larger is less certain.

    Args:
        model: In eval mode.
        sources: Tokens, end token last.
        outputs: Translations, without end token.
        method: What is drawn; with `mean` the disagreements are left out.
        num_samples: M.
    """
    found: dict[str, list[float]] = {name: [0.0] * len(sources) for name in SIGNALS}
    targets = [[*tokens, END] for tokens in outputs]
    for indices in token_batches(Corpus(list(sources), targets), evaluation_tokens(model)):
        chosen = indices.tolist()
        judged = judge(model, [sources[i] for i in chosen], [targets[i] for i in chosen], method, num_samples)
        lengths = judged.steps.sum(dim=1)
        logs = -judged.probability.clamp(min=torch.finfo(torch.float32).tiny).log() * judged.steps
        sums = {"nll": logs, "entropy": judged.entropy, "mutual_information": judged.mutual_information}
        for name, values in sums.items():
            for i, value in zip(chosen, (values.sum(dim=1) / lengths).tolist(), strict=True):
                found[name][i] = value
    if method == "mean":
        return {name: found[name] for name in ("nll", "entropy")}
    draws = decode_draws(model, sources, method, num_samples)
    found["disagreement"] = [disagreement(best, own) for best, own in zip(outputs, draws, strict=True)]
    return found


def measure_uncertainty(
    model: Translator,
    vocabulary: Vocabulary,
    pairs: Pairs,
    outputs: Sequence[str],
    *,
    num_samples: int = 20,
) -> dict[str, dict[str, Any]]:
    """Return, for every method and signal, how well it tells good translations from bad ones.

    `spearman_chrf` and `spearman_bleu` are rank correlations of minus the uncertainty with sentence scores; `rejection` is
    corpus BLEU of what is left when the least certain `REJECTED` shares are withheld.
    """
    quality, counts = bleu.sentence_scores(outputs, pairs.targets), bleu.sentence_counts(outputs, pairs.targets)
    sources = [[*tokens, END] for tokens in vocabulary.encode(pairs.sources)]
    encoded = vocabulary.encode(outputs)
    results: dict[str, dict[str, Any]] = {}
    for method in available_methods(model):
        torch.manual_seed(0)
        for signal, values in sentence_uncertainty(model, sources, encoded, method, num_samples).items():
            results[f"{method} {signal}"] = {
                "spearman_chrf": rank_correlation(values, quality["chrf"]),
                "spearman_bleu": rank_correlation(values, quality["bleu"]),
                "rejection": rejection_curve(values, counts),
            }
    return results


def rank_correlation(uncertainty: Sequence[float], quality: Sequence[float]) -> float:
    """Return Spearman's correlation of certainty with quality; 0 if one of them does not vary."""
    if len(set(uncertainty)) < 2 or len(set(quality)) < 2:
        return 0.0
    return -float(stats.spearmanr(uncertainty, quality)[0])  # type: ignore[arg-type]


def rejection_curve(uncertainty: Sequence[float], counts: Sequence[bleu.Counts]) -> list[float]:
    """Return corpus BLEU of the most certain sentences, for every share withheld; ties keep the order of the file.

    Args:
        uncertainty: Uncertainty of every sentence.
        counts: Counts of the same sentences, from `bleu.sentence_counts`.
    """
    order = sorted(range(len(counts)), key=lambda i: uncertainty[i])
    kept = [order[: max(1, round((1.0 - share) * len(order)))] for share in REJECTED]
    return [bleu.bleu_of_counts([counts[i] for i in chosen]) for chosen in kept]
