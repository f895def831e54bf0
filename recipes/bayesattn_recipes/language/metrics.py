"""GLUE's and SQuAD's own metrics, by their definitions; measures of uncertainty are in `bayesattn.metrics`.

Each takes predictions and labels and returns a float. Where a definition divides by zero (a model that predicts one class
only, or a constant score), the value is 0, as on GLUE's leaderboard.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def accuracy(predicted: Int[Tensor, " n"], labels: Int[Tensor, " n"]) -> float:
    """Share of right answers."""
    return float((predicted == labels).double().mean())


def f1(predicted: Int[Tensor, " n"], labels: Int[Tensor, " n"]) -> float:
    """F1 of class 1: 2 TP / (2 TP + FP + FN)."""
    both = int(((predicted == 1) & (labels == 1)).sum())
    either = int((predicted == 1).sum() + (labels == 1).sum())
    return 2.0 * both / either if either else 0.0


def matthews(predicted: Int[Tensor, " n"], labels: Int[Tensor, " n"]) -> float:
    """Matthews' correlation: the Pearson correlation of two binary variables."""
    return pearson((predicted == 1).double(), (labels == 1).double())


def pearson(predicted: Float[Tensor, " n"], labels: Float[Tensor, " n"]) -> float:
    """Pearson's correlation."""
    x, y = (values.double() - values.double().mean() for values in (predicted, labels))
    scale = float(x.norm() * y.norm())
    return float(x @ y) / scale if scale > 0.0 else 0.0


def spearman(predicted: Float[Tensor, " n"], labels: Float[Tensor, " n"]) -> float:
    """Spearman's correlation: Pearson's of the ranks, equal values sharing their mean rank."""
    return pearson(_ranks(predicted), _ranks(labels))


def _ranks(values: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    _, inverse, counts = torch.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum(dim=0).double()
    return (last - (counts.double() - 1.0) / 2.0)[inverse]


GLUE_METRICS: dict[str, Callable[[Tensor, Tensor], float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
}


def normalize_answer(text: str) -> str:
    """Return an answer as SQuAD compares it: lower case, no punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, golds: Sequence[str]) -> float:
    """1 if the answer equals one of the right ones after normalization, else 0; no right one: the answer has to be empty."""
    return float(any(normalize_answer(answer) == normalize_answer(gold) for gold in golds or ("",)))


def token_f1(answer: str, golds: Sequence[str]) -> float:
    """Best F1 between the words of the answer and those of a right one; with an empty side, 1 if both are empty, else 0."""
    return max(_overlap(normalize_answer(answer).split(), normalize_answer(gold).split()) for gold in golds or ("",))


def _overlap(answer: list[str], gold: list[str]) -> float:
    if not answer or not gold:
        return float(answer == gold)
    common = sum((Counter(answer) & Counter(gold)).values())
    return 2.0 * common / (len(answer) + len(gold))


def best_null_threshold(
    null_scores: Sequence[float], answered: Sequence[float], has_answer: Sequence[bool]
) -> tuple[float, float]:
    """Return the no-answer threshold with the highest mean score, and that score (SQuAD 2.0).

    A question is left unanswered if its null score is above the threshold. That scores 1 if there is no answer; answering
    scores `answered` if there is one, and 0 if there is none.

    Args:
        null_scores: Score of "no answer", per question.
        answered: Exact match or F1 of the answer a question would get.
        has_answer: Whether the question has an answer.
    """
    if not null_scores:
        raise ValueError("null_scores must hold at least one question, got none")
    # threshold −∞ leaves every question; raising it past a question answers that question
    score = best = float(sum(not known for known in has_answer))
    threshold = -float("inf")
    order = sorted(range(len(null_scores)), key=null_scores.__getitem__)
    for rank, index in enumerate(order):
        score += answered[index] if has_answer[index] else -1.0
        is_last_of_ties = rank + 1 == len(order) or null_scores[order[rank + 1]] > null_scores[index]
        if is_last_of_ties and score > best:
            best, threshold = score, null_scores[index]
    return threshold, best / len(null_scores)
