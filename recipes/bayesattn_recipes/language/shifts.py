"""Test sets that differ from the training data: noisy characters, noisy words, a related task, foreign text.

Strength 1 changes one in ten characters, or one in five words. Each text has its own generator, seeded by the text: the same
text is always changed the same way, wherever it occurs.
"""

import random
import string
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bayesattn_recipes.language import data as text_data
from bayesattn_recipes.language import squad
from bayesattn_recipes.language.data import Example, position
from bayesattn_recipes.language.files import find_text
from bayesattn_recipes.language.squad import Question
from bayesattn_recipes.language.tasks import TASKS, Task

CHARACTER_RATE = 0.1
WORD_RATE = 0.2

# task: a related one, whose labels mean the same
RELATED = {"mrpc": "qqp", "qqp": "mrpc", "rte": "mnli", "qnli": "rte"}
# labels of the related task that have a counterpart, by class: RTE and QNLI only distinguish entailment
_CLASSES = {("rte", "mnli"): {0: 0, 1: 1, 2: 1}}
# task: one with foreign sentences, for which there is no right answer
FOREIGN = {"sst2": "cola", "cola": "sst2"}
# reviews labeled by sentiment, like SST-2's sentences
REVIEWS_FILE = "reviews.tsv"


def character_noise(text: str, strength: float) -> str:
    """Drop, double, replace or swap characters, each with probability `strength` · `CHARACTER_RATE`."""
    return _changed(
        text, list(text), "", min(strength * CHARACTER_RATE, 1.0), lambda draw: draw.choice(string.ascii_lowercase)
    )


def word_noise(text: str, strength: float, words: Sequence[str]) -> str:
    """Drop, double, replace (by one of `words`) or swap words, each with probability `strength` · `WORD_RATE`."""
    return _changed(text, text.split(), " ", min(strength * WORD_RATE, 1.0), lambda draw: draw.choice(words))


def _changed(text: str, parts: list[str], glue: str, rate: float, replacement: Callable[[random.Random], str]) -> str:
    draw = random.Random(int(position(text) * 2**56))
    changed: list[str] = []
    index = 0
    while index < len(parts):
        part = parts[index]
        kind = draw.choice(("drop", "double", "replace", "swap")) if draw.random() < rate else "keep"
        if kind == "swap" and index + 1 < len(parts):
            changed += [parts[index + 1], part]
            index += 1
        elif kind == "double":
            changed += [part, part]
        elif kind == "replace":
            changed.append(replacement(draw))
        elif kind != "drop":
            changed.append(part)
        index += 1
    # a short text may lose everything; a model needs something to read
    return glue.join(changed) if glue.join(changed).strip() else text


def noisy(entries: Sequence[Any], kind: str, strength: float) -> list[Any]:
    """Change every text of a split; for a question only its own text, because the answer's position must not change.

    Args:
        entries: Examples or questions.
        kind: `characters` or `words`.
        strength: See the top of this file.
    """
    words = sorted({word for entry in entries for text in _changeable(entry) for word in text.split()})

    def change(text: str) -> str:
        return character_noise(text, strength) if kind == "characters" else word_noise(text, strength, words)

    return [
        replace(entry, question=change(entry.question))
        if isinstance(entry, Question)
        else Example(tuple(map(change, entry.texts)), entry.label)
        for entry in entries
    ]


def shifted_splits(task: Task, test: Sequence[Any], noise: Sequence[float], data: Path | None) -> dict[str, list[Any]]:
    """Return the shifted test sets of a task; those without a right answer have labels of None.

    Args:
        task: The task the model was trained for.
        test: Its test split.
        noise: Strengths; 0 is left out, and without any other there is no shifted set at all.
        data: The data folder; related tasks that are not in it are left out.
    """
    strengths = [strength for strength in noise if strength != 0.0]
    for strength in noise:
        if not 0.0 <= strength <= 5.0:
            raise ValueError(f"noise must be from 0 to 5, got {strength!r}")
    if not strengths:
        return {}
    splits = {
        f"{kind}-{strength:g}": noisy(test, kind, strength) for kind in ("characters", "words") for strength in strengths
    }
    return splits | _other_texts(task, test, data)


def _other_texts(task: Task, test: Sequence[Any], data: Path | None) -> dict[str, list[Any]]:
    if data is None:
        return {}
    found: dict[str, list[Any]] = {}
    if task.name in RELATED and (other := _test_of(RELATED[task.name], data)) is not None:
        classes = _CLASSES.get((task.name, RELATED[task.name]))
        found[RELATED[task.name]] = [e if classes is None else replace(e, label=classes[int(e.label or 0)]) for e in other]
    if task.name in FOREIGN and (other := _test_of(FOREIGN[task.name], data)) is not None:
        found[f"foreign-{FOREIGN[task.name]}"] = [replace(example, label=None) for example in other]
    if task.name == "sst2" and (reviews := find_text(data, [REVIEWS_FILE])) is not None:
        found["reviews"] = text_data.read_examples(task, *reviews)[0]
    if task.name == "squad1" and (unanswerable := _unanswerable(data, {question.title for question in test})):
        found["unanswerable"] = unanswerable
    return found


def _test_of(name: str, data: Path) -> list[Example] | None:
    try:
        return text_data.load(name, data).splits["test"]
    except ValueError as error:
        if "was not found" in str(error):
            return None
        raise


def _unanswerable(data: Path, titles: set[str]) -> list[Question]:
    """Return SQuAD 2.0's questions without an answer, of articles that are in the test splits of both versions.

    The versions share articles, so one in 2.0's test split alone may have been trained on.
    """
    try:
        splits, _ = squad.load(TASKS["squad2"], data)
    except ValueError as error:
        if "was not found" in str(error):
            return []
        raise
    return [question for question in splits["test"] if not question.answers and question.title in titles]


def _changeable(entry: Any) -> tuple[str, ...]:
    return (entry.question,) if isinstance(entry, Question) else entry.texts
