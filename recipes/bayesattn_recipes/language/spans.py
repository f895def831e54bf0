"""Token scores of a question's windows as a distribution over its answers.

The scores of a model define a distribution over the answers of a question: over all spans (i, j) of at most
`MAX_ANSWER_TOKENS` tokens in any window of its paragraph,

    p(i, j) ∝ exp(start_i + end_j),      and for "no answer"  p(∅) ∝ exp(min over windows of start_CLS + end_CLS)

so answers have probabilities, and every measure of classifiers applies: the classes of a question are its
`NUM_CANDIDATES` most probable answers, "no answer" (2.0 only) and "another answer", which gets the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bayesattn_recipes.language import metrics
from bayesattn_recipes.language.squad import Question, Window

MAX_ANSWER_TOKENS = 30
NUM_CANDIDATES = 5


@dataclass(frozen=True)
class WindowScores:
    """The scores of a window in every draw.

    Attributes:
        log_total: ln Σ exp(start + end) over its spans.
        null: start_CLS + end_CLS.
        spans: Its best spans by the mean score, first and last token.
        scores: Their scores, −inf if a window has fewer spans.
        log_right: ln Σ exp(start + end) over the spans of right answers, −inf if it holds none.
    """

    log_total: Float[Tensor, " s"]
    null: Float[Tensor, " s"]
    spans: Int[Tensor, "k 2"]
    scores: Float[Tensor, "s k"]
    log_right: Float[Tensor, " s"]


def score_windows(
    start: Float[Tensor, "s b l"],
    end: Float[Tensor, "s b l"],
    allowed: Bool[Tensor, "b l"],
    right: Sequence[Sequence[tuple[int, int]]] | None = None,
) -> list[WindowScores]:
    """Reduce token scores to what `answer` needs; all spans of all windows at once.

    Args:
        start: Scores of first tokens, draws first.
        end: Scores of last tokens.
        allowed: Tokens of the paragraph.
        right: Spans of the right answers, by window; None if they are not known.
    """
    longest = MAX_ANSWER_TOKENS
    null = (start[:, :, 0] + end[:, :, 0]).float()
    firsts = start.float().masked_fill(~allowed, -torch.inf)
    lasts = torch.nn.functional.pad(end.float().masked_fill(~allowed, -torch.inf), (0, longest - 1), value=-torch.inf)
    # [s, b, first token, length − 1 of the answer]
    scores = (firsts.unsqueeze(3) + lasts.unfold(2, longest, 1)).flatten(2)
    # a mean over −inf stays −inf: invalid spans are never the best
    mean, best = scores.mean(dim=0).topk(min(NUM_CANDIDATES, scores.shape[2]), dim=1)
    first = best // longest
    spans = torch.stack([first, first + best % longest], dim=2)
    # no paragraph begins at token 0, which marks missing spans in a window with fewer spans than candidates
    spans = spans.masked_fill(mean.isneginf().unsqueeze(2), 0).cpu()
    chosen = scores.gather(2, best.expand(len(scores), -1, -1)).cpu()
    log_total, null = scores.logsumexp(dim=2).cpu(), null.cpu()
    log_right = _log_right(start.float().cpu(), end.float().cpu(), right or [[]] * len(spans))
    return [WindowScores(log_total[:, i], null[:, i], spans[i], chosen[:, i], log_right[:, i]) for i in range(len(spans))]


def _log_right(start: Tensor, end: Tensor, right: Sequence[Sequence[tuple[int, int]]]) -> Float[Tensor, "s b"]:
    found = torch.full(start.shape[:2], -torch.inf)
    for i, places in enumerate(right):
        if places:
            first, last = torch.tensor(places).unbind(dim=1)
            found[:, i] = (start[:, i, first] + end[:, i, last]).logsumexp(dim=1)
    return found


@dataclass(frozen=True)
class Answer:
    """The distribution over the answers of one question.

    Attributes:
        texts: The candidates, the most probable first; "" stands for "no answer" and occurs in 2.0 only.
        probabilities: Probability of every candidate and, last, of "another answer", by draw.
        null_score: Mean over draws of ln p(∅) − ln p(best span).
        right: Probability of the right answers by draw: of their spans, or of "no answer" if that is right.
    """

    texts: list[str]
    probabilities: Float[Tensor, "s c"]
    null_score: float
    right: Float[Tensor, " s"]


def answer(question: Question, pieces: Sequence[tuple[Window, WindowScores]], *, allows_none: bool) -> Answer:
    """Join the windows of a question.

    Args:
        question: The question.
        pieces: Its windows and their scores.
        allows_none: Whether "no answer" is an answer (2.0).
    """
    null = torch.stack([scores.null for _, scores in pieces]).amin(dim=0)
    totals = [scores.log_total for _, scores in pieces] + ([null] if allows_none else [])
    log_total = torch.stack(totals).logsumexp(dim=0)
    groups: dict[str, int] = {}
    found: list[tuple[int, str, Tensor]] = []
    for window, scores in pieces:
        for (first, last), score in zip(scores.spans.tolist(), scores.scores.unbind(dim=1)):
            begins, ends = window.offsets[first], window.offsets[last]
            if begins is None or ends is None:
                continue
            text = question.context[begins[0] : ends[1]]
            # the same words found twice, in two windows or two places, are one answer
            group = groups.setdefault(metrics.normalize_answer(text) or text, len(groups))
            found.append((group, text, score))
    known = torch.zeros(len(null), max(len(groups), NUM_CANDIDATES), dtype=torch.float64)
    if found:
        mass = (torch.stack([score for _, _, score in found], dim=1).double() - log_total.double().unsqueeze(1)).exp()
        known.index_add_(1, torch.tensor([group for group, _, _ in found]), mass)
    order = known.mean(dim=0).sort(descending=True, stable=True).indices[:NUM_CANDIDATES]
    names = {group: text for group, text, _ in found}
    texts = [names.get(group, "") for group in order.tolist()]
    known = known[:, order]
    null_score = float((null - log_total - known[:, 0].log()).mean()) if found else float((null - log_total).mean())
    if allows_none:
        texts, known = [*texts, ""], torch.cat([known, (null - log_total).exp().double().unsqueeze(1)], dim=1)
    rest = (1.0 - known.sum(dim=1, keepdim=True)).clamp(min=1e-9)
    probabilities = torch.cat([known, rest], dim=1)
    is_none = allows_none and not question.answers
    log_right = null if is_none else torch.stack([scores.log_right for _, scores in pieces]).logsumexp(dim=0)
    right = (log_right - log_total).exp().clamp(max=1.0)
    return Answer(texts, (probabilities / probabilities.sum(dim=1, keepdim=True)).float(), null_score, right)


def exchange(samples: Float[Tensor, "s n c"], own: Int[Tensor, " n"], common: Int[Tensor, " n"]) -> Float[Tensor, "s n c"]:
    """Swap two classes of every question so that the right one is `common` instead of `own`.

    Two ways to predict rank the answers of a question differently, so the right one has a different class in each; but
    their predictions share one list of labels.
    """
    places = torch.arange(samples.shape[2]).repeat(len(own), 1)
    rows = torch.arange(len(own))
    places[rows, own], places[rows, common] = common, own
    return samples.gather(2, places.expand(len(samples), -1, -1))


def class_names(*, allows_none: bool) -> list[str]:
    """Return the names of the classes of a question."""
    names = [f"candidate {rank + 1}" for rank in range(NUM_CANDIDATES)]
    return [*names, *(["no answer"] if allows_none else []), "another answer"]


def right_class(question: Question, found: Answer, *, allows_none: bool) -> int:
    """Return the class of the right answer: the first candidate that equals one, "no answer", or "another answer"."""
    if not question.answers and allows_none:
        return NUM_CANDIDATES
    for rank, text in enumerate(found.texts[:NUM_CANDIDATES]):
        if text and metrics.exact_match(text, question.golds):
            return rank
    return len(found.texts)
