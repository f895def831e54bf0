"""SQuAD 1.1 and 2.0: read the JSON, and cut long paragraphs into windows."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bayesattn_recipes.common.sources import SOURCES
from bayesattn_recipes.language.data import hub_dataset, position
from bayesattn_recipes.language.files import find_text, require_folder
from bayesattn_recipes.language.tasks import Task

STRIDE = 128
# tokens of the paragraph that a window has to have room for
MIN_ROOM = 8
# if the dev file is the only file: its articles in the test split, and those of the rest in validation
TEST_ARTICLES = {"1.1": 10, "2.0": 7}
VALIDATION_ARTICLES = {"1.1": 5, "2.0": 4}
# share of the articles of a training file
VALIDATION_SHARE = 0.05
HUB_NAMES = {"1.1": "rajpurkar/squad", "2.0": "rajpurkar/squad_v2"}


@dataclass(frozen=True)
class Question:
    """One question about a paragraph.

    Attributes:
        id: SQuAD's.
        question: Its text.
        context: The paragraph.
        answers: The right answers (text, first character); none if the paragraph has none.
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


def load(task: Task, data: Path | None, source: str = "files") -> tuple[dict[str, list[Question]], str]:
    """Return the splits of SQuAD and a note on how they were made.

    With `train-v….json`, test is the dev file and validation every twentieth article of the training file, else
    the articles of the dev file are divided, in the order of the hashes of their titles.

    Args:
        task: `squad1` or `squad2`.
        data: Folder of the files.
        source: `files`, or `datasets` for the hub's copy through the package of that name.
    """
    if source == "datasets":
        found = hub_dataset(HUB_NAMES[task.folder])
        return from_rows(found["train"], found["validation"]), ""
    folder = require_folder(data, "squad")
    version = task.folder
    train, dev = (
        find_text(folder, [f"{base}{part}-v{version}{rest}.json" for base in ("", "squad/") for rest in ("", ".rebuilt")])
        for part in ("train", "dev")
    )
    if dev is None:
        raise ValueError(
            f"dev-v{version}.json was not found in data {str(data)!r}. Give a folder with SQuAD's files, plain or as .xz, "
            f"or with a folder squad of them. {SOURCES['squad']}"
        )
    questions = parse(*dev)
    if train is not None:
        return _hold_out(parse(*train), questions), ""
    titles = sorted({question.title for question in questions}, key=position)
    num_test, num_validation = TEST_ARTICLES[version], VALIDATION_ARTICLES[version]
    parts = {"test": titles[:num_test], "validation": titles[num_test : num_test + num_validation]}
    parts["train"] = titles[num_test + num_validation :]
    splits = {name: [q for q in questions if q.title in parts[name]] for name in ("train", "validation", "test")}
    note = f"the {len(titles)} articles of the dev file, split {len(parts['train'])}/{num_validation}/{num_test}"
    return _checked(splits), note


def from_rows(train: Iterable[Mapping[str, Any]], test: Iterable[Mapping[str, Any]]) -> dict[str, list[Question]]:
    """Make the splits from rows in the hub's layout: `id`, `title`, `context`, `question`, and `answers` as two lists.

    Args:
        train: Training rows; validation is held out of them, by article.
        test: Test rows.
    """

    def convert(rows: Iterable[Mapping[str, Any]], where: str) -> list[Question]:
        questions = []
        for number, row in enumerate(rows):
            try:
                places = zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True)
                answers = [{"text": text, "answer_start": start} for text, start in places]
                entry = {"id": row["id"], "question": row["question"], "answers": answers}
                questions.append(_question(entry, row["context"], row["title"], where))
            except (KeyError, TypeError, AttributeError) as error:
                reason = f"{type(error).__name__}: {error}"
                raise ValueError(f"{where}, row {number} is not in the hub's layout of SQuAD: {reason}") from None
        return questions

    return _hold_out(convert(train, "train"), convert(test, "test"))


def _hold_out(train: list[Question], test: list[Question]) -> dict[str, list[Question]]:
    rest: list[Question] = []
    validation: list[Question] = []
    for question in train:
        (validation if position(question.title) < VALIDATION_SHARE else rest).append(question)
    return _checked({"train": rest, "validation": validation, "test": test})


def _checked(splits: dict[str, list[Question]]) -> dict[str, list[Question]]:
    empty = [name for name, questions in splits.items() if not questions]
    if empty:
        raise ValueError(f"the articles leave the splits {empty} empty. Give files with more articles")
    return splits


def parse(text: str, where: str) -> list[Question]:
    """Read SQuAD's JSON, checking the position of every answer."""
    try:
        articles = json.loads(text)["data"]
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}, line {error.lineno}: not JSON ({error.msg})") from None
    except (KeyError, TypeError):
        raise ValueError(f"{where} has no 'data', so it is not in SQuAD's JSON layout") from None
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply, so it is not in SQuAD's JSON layout") from None
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
        raise ValueError(f"{where}, question {question.id!r}: question and context must not be empty")
    for text, start in answers:
        if context[start : start + len(text)] != text:
            raise ValueError(f"{where}, question {question.id!r}: the answer {text!r} is not at character {start}")
    return question


@dataclass(frozen=True)
class Window:
    """A question followed by a piece of its paragraph, tokenized.

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

    The labels of a window are the first and last token of the first right answer, or token 0 (CLS) twice if the
    window does not hold it. The cutting is done here: tokenizers that truncate before they overflow lose the end of a text.
    """
    cut = []
    for owner, question in enumerate(questions):
        encoded = tokenizer(question.question, question.context, return_offsets_mapping=True, verbose=False)
        parts = encoded.sequence_ids()
        if 1 not in parts:
            raise ValueError(f"question {question.id!r} must have a paragraph with at least one token")
        first, last = parts.index(1), len(parts) - parts[::-1].index(1)
        room = max_length - first - (len(parts) - last)
        if room < MIN_ROOM:
            raise ValueError(
                f"question {question.id!r} must leave at least {MIN_ROOM} of {max_length} tokens for its text, got {room}"
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
    return _token_span(*question.answers[0], offsets) or (0, 0)


def right_spans(question: Question, window: Window) -> list[tuple[int, int]]:
    """Return the first and last tokens of the right answers that a window holds, each span once."""
    found = (_token_span(text, first, window.offsets) for text, first in question.answers)
    return list(dict.fromkeys(span for span in found if span is not None))


def _token_span(text: str, first: int, offsets: list[tuple[int, int] | None]) -> tuple[int, int] | None:
    last = first + len(text)
    inside = [i for i, span in enumerate(offsets) if span is not None and span[0] < last and span[1] > first]
    if not inside:
        return None
    begins, ends = offsets[inside[0]], offsets[inside[-1]]
    assert begins is not None
    assert ends is not None
    # a part of the answer does not count
    return (inside[0], inside[-1]) if begins[0] <= first and ends[1] >= last else None
