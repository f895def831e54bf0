"""SQuAD 1.1 and 2.0: read the JSON, cut long paragraphs into windows, and turn token scores into answers.

The scores of a model define a distribution over the answers of a question: over all spans (i, j) of at most
`MAX_ANSWER_TOKENS` tokens in any window of its paragraph,

    p(i, j) ∝ exp(start_i + end_j),      and for "no answer"  p(∅) ∝ exp(min over windows of start_CLS + end_CLS)

so answers have probabilities, and everything that measures classifiers applies: the classes of a question are its
`NUM_CANDIDATES` most probable answers, "no answer" (2.0 only) and "another answer", which gets the rest.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bayesattn.recipes.language import metrics
from bayesattn.recipes.language.data import position
from bayesattn.recipes.language.files import find_text, require_folder
from bayesattn.recipes.language.tasks import Task

MAX_ANSWER_TOKENS = 30
NUM_CANDIDATES = 5
STRIDE = 128
# tokens of the paragraph that a window has to have room for
MIN_ROOM = 8
# articles of the dev file that make the test split where it is the only file, and of those left that make validation
TEST_ARTICLES = {"1.1": 10, "2.0": 7}
VALIDATION_ARTICLES = {"1.1": 5, "2.0": 4}


@dataclass(frozen=True)
class Question:
    """One question about a paragraph.

    Attributes:
        id: SQuAD's.
        question: Its text.
        context: The paragraph.
        answers: The right answers (text, first character); none where the paragraph does not say.
        title: The article.
    """

    id: str
    question: str
    context: str
    answers: tuple[tuple[str, int], ...]
    title: str

    @property
    def golds(self) -> list[str]:
        """Texts of the right answers."""
        return [text for text, _ in self.answers]


def load(task: Task, data: Path | None) -> tuple[dict[str, list[Question]], str]:
    """Return the splits of SQuAD and a note on how they came about.

    With `train-v….json` at hand, test is the dev file and validation every twentieth article of the training file, else
    the articles of the dev file are divided, in the order of the hashes of their titles.
    """
    folder = require_folder(data)
    version = task.folder
    train, dev = (
        find_text(folder, [f"{base}{part}-v{version}{rest}.json" for base in ("", "squad/") for rest in ("", ".rebuilt")])
        for part in ("train", "dev")
    )
    if dev is None:
        raise ValueError(
            f"data is {str(data)!r}, where dev-v{version}.json was not found; allowed: a folder with SQuAD's files, plain "
            "or as .xz, or with a folder squad of them"
        )
    questions = parse(*dev)
    if train is not None:
        rest, validation = [], []
        for question in parse(*train):
            (validation if position(question.title) < 0.05 else rest).append(question)
        return _checked({"train": rest, "validation": validation, "test": questions}), ""
    titles = sorted({question.title for question in questions}, key=position)
    num_test, num_validation = TEST_ARTICLES[version], VALIDATION_ARTICLES[version]
    parts = {"test": titles[:num_test], "validation": titles[num_test : num_test + num_validation]}
    parts["train"] = titles[num_test + num_validation :]
    splits = {name: [q for q in questions if q.title in parts[name]] for name in ("train", "validation", "test")}
    note = f"the {len(titles)} articles of the dev file, split {len(parts['train'])}/{num_validation}/{num_test}"
    return _checked(splits), note


def _checked(splits: dict[str, list[Question]]) -> dict[str, list[Question]]:
    empty = [name for name, questions in splits.items() if not questions]
    if empty:
        raise ValueError(f"the articles leave the splits {empty} empty; allowed: files with more articles")
    return splits


def parse(text: str, where: str) -> list[Question]:
    """Read SQuAD's JSON, checking that every answer stands where it says."""
    try:
        articles = json.loads(text)["data"]
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}, line {error.lineno}: not JSON ({error.msg})") from None
    except (KeyError, TypeError):
        raise ValueError(f"{where} has no 'data'; allowed: SQuAD's JSON layout") from None
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply; allowed: SQuAD's JSON layout") from None
    questions = []
    try:
        for article in articles:
            for paragraph in article["paragraphs"]:
                for entry in paragraph["qas"]:
                    questions.append(_question(entry, paragraph["context"], article.get("title", ""), where))
    except (KeyError, TypeError, AttributeError) as error:
        last = f" after question {questions[-1].id!r}" if questions else ""
        raise ValueError(f"{where} is not in SQuAD's layout{last}: {type(error).__name__}: {error}") from None
    return questions


def _question(entry: dict[str, Any], context: str, title: str, where: str) -> Question:
    try:
        answers = () if entry.get("is_impossible") else tuple((a["text"], int(a["answer_start"])) for a in entry["answers"])
        question = Question(str(entry["id"]), entry["question"], context, answers, title)
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"{where}, question {entry.get('id')!r}: {error} is missing or of a wrong kind") from None
    if not question.question.strip() or not context.strip():
        raise ValueError(f"{where}, question {question.id!r}: question or context is empty; allowed: texts")
    for text, start in answers:
        if context[start : start + len(text)] != text:
            raise ValueError(f"{where}, question {question.id!r}: the answer {text!r} does not stand at character {start}")
    return question


@dataclass(frozen=True)
class Window:
    """A piece of a paragraph behind its question, as the model reads it.

    Attributes:
        row: Token ids and types, and while training `start_positions` and `end_positions`.
        owner: Index of the question.
        offsets: First and last character of every token that belongs to the paragraph, None elsewhere.
    """

    row: dict[str, Any]
    owner: int
    offsets: list[tuple[int, int] | None]


def windows(tokenizer: Any, questions: Sequence[Question], max_length: int) -> list[Window]:
    """Cut every paragraph into windows of `max_length` tokens that overlap by `STRIDE`.

    The labels of a window are the first and last token of the first right answer, or token 0 (CLS) twice where the
    window does not hold it. The cutting is done here: tokenizers that truncate before they overflow lose the end of a text.
    """
    cut = []
    for owner, question in enumerate(questions):
        encoded = tokenizer(question.question, question.context, return_offsets_mapping=True, verbose=False)
        parts = encoded.sequence_ids()
        if 1 not in parts:
            raise ValueError(f"question {question.id!r} has a paragraph without a single token; allowed: a text")
        first, last = parts.index(1), len(parts) - parts[::-1].index(1)
        room = max_length - first - (len(parts) - last)
        if room < MIN_ROOM:
            raise ValueError(
                f"question {question.id!r} leaves {room} of {max_length} tokens to its text; allowed: at least {MIN_ROOM}"
            )
        # starts of the windows, up to the first that reaches the end
        starts = range(first, max(last - room, first + 1), room - min(STRIDE, room // 2))
        for begin in [*starts, *([] if starts[-1] + room >= last else [starts[-1] + starts.step])]:
            kept = [*range(first), *range(begin, min(begin + room, last)), *range(last, len(parts))]
            row = {name: [encoded[name][i] for i in kept] for name in ("input_ids", "token_type_ids") if name in encoded}
            offsets = [tuple(encoded["offset_mapping"][i]) if parts[i] == 1 else None for i in kept]
            start, end = _positions(question, offsets)
            cut.append(Window({**row, "start_positions": start, "end_positions": end}, owner, offsets))
    return cut


def _positions(question: Question, offsets: list[tuple[int, int] | None]) -> tuple[int, int]:
    if not question.answers:
        return 0, 0
    text, first = question.answers[0]
    last = first + len(text)
    inside = [i for i, span in enumerate(offsets) if span is not None and span[0] < last and span[1] > first]
    if not inside:
        return 0, 0
    begins, ends = offsets[inside[0]], offsets[inside[-1]]
    assert begins is not None
    assert ends is not None
    # a piece of the answer is not the answer
    return (inside[0], inside[-1]) if begins[0] <= first and ends[1] >= last else (0, 0)


@dataclass(frozen=True)
class WindowScores:
    """What a window says in every draw.

    Attributes:
        log_total: ln Σ exp(start + end) over its spans.
        null: start_CLS + end_CLS.
        spans: Its best spans by the mean score, first and last token.
        scores: Their scores, −inf where a window has fewer spans.
    """

    log_total: Float[Tensor, " s"]
    null: Float[Tensor, " s"]
    spans: Int[Tensor, "k 2"]
    scores: Float[Tensor, "s k"]


def score_windows(
    start: Float[Tensor, "s b l"], end: Float[Tensor, "s b l"], allowed: Bool[Tensor, "b l"]
) -> list[WindowScores]:
    """Reduce token scores to what `answer` needs; all spans of all windows at once.

    Args:
        start: Scores of first tokens, draws first.
        end: Scores of last tokens.
        allowed: Tokens of the paragraph.
    """
    longest = MAX_ANSWER_TOKENS
    null = (start[:, :, 0] + end[:, :, 0]).float()
    firsts = start.float().masked_fill(~allowed, -torch.inf)
    lasts = torch.nn.functional.pad(end.float().masked_fill(~allowed, -torch.inf), (0, longest - 1), value=-torch.inf)
    # [s, b, first token, length − 1 of the answer]
    scores = (firsts.unsqueeze(3) + lasts.unfold(2, longest, 1)).flatten(2)
    # a mean over −inf stays −inf: forbidden spans never win
    mean, best = scores.mean(dim=0).topk(min(NUM_CANDIDATES, scores.shape[2]), dim=1)
    first = best // longest
    spans = torch.stack([first, first + best % longest], dim=2)
    # no paragraph begins at token 0: a window with fewer spans than candidates says so by it
    spans = spans.masked_fill(mean.isneginf().unsqueeze(2), 0).cpu()
    chosen = scores.gather(2, best.expand(len(scores), -1, -1)).cpu()
    log_total, null = scores.logsumexp(dim=2).cpu(), null.cpu()
    return [WindowScores(log_total[:, i], null[:, i], spans[i], chosen[:, i]) for i in range(len(spans))]


@dataclass(frozen=True)
class Answer:
    """The distribution over the answers of one question.

    Attributes:
        texts: The candidates, the most probable first; "" stands for "no answer" and is there in 2.0 only.
        probabilities: By draw, of every candidate, and last of "another answer".
        null_score: Mean over draws of ln p(∅) − ln p(best span).
    """

    texts: list[str]
    probabilities: Float[Tensor, "s c"]
    null_score: float


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
    return Answer(texts, (probabilities / probabilities.sum(dim=1, keepdim=True)).float(), null_score)


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
