"""A task prepared for a model: its splits as token ids with labels, for every kind of task."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from bayesattn_recipes.language import data as text_data
from bayesattn_recipes.language import spans, squad
from bayesattn_recipes.language.data import Example
from bayesattn_recipes.language.features import Encoded, encode
from bayesattn_recipes.language.model import find_encoder, load_tokenizer
from bayesattn_recipes.language.squad import Question, Window
from bayesattn_recipes.language.tasks import Task, find_task


@dataclass(frozen=True)
class Split:
    """One tokenized split.

    Attributes:
        rows: Token ids and labels; one row per example, or per window of a question.
        labels: Class or score of every example; None if there is no right answer, and for questions.
        questions: Questions of a span task.
        windows: Windows of a span task, one per row.
        num_truncated: Examples that lost their end to the length limit (questions: 0, they get several windows).
    """

    rows: list[dict[str, Any]]
    labels: list[int | float] | None = None
    questions: list[Question] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    num_truncated: int = 0


@dataclass(frozen=True)
class Prepared:
    """A task, tokenized.

    Attributes:
        task: The task.
        encoder: Place of the encoder (`find_encoder`).
        tokenizer: Its tokenizer.
        splits: `train`, `validation` and `test`.
        sources: The same before tokenization, for shifts.
        class_names: One per class.
        note: How the splits were made if they are not the official ones.
        skipped: Rows of a broken file that were left out.
    """

    task: Task
    encoder: str
    tokenizer: PreTrainedTokenizerBase
    splits: dict[str, Split]
    sources: dict[str, Sequence[Any]]
    class_names: tuple[str, ...]
    note: str = ""
    skipped: int = 0

    @property
    def num_texts(self) -> int:
        """Texts per example: one, or two for pairs and questions."""
        return len(list(_texts(self.sources["test"][0])))


@lru_cache(maxsize=4)
def prepare(
    task_name: str, encoder: str, max_length: int, train_size: int | None, source: str, data: Path | None
) -> Prepared:
    """Read and tokenize a task; cached, because the runs of a table share it.

    Args:
        task_name: The task.
        encoder: Encoder whose tokenizer to use.
        max_length: Tokens per text or window.
        train_size: Largest number of training examples, chosen by the hash of their texts; None takes all.
        source: `files` or `datasets`.
        data: The data folder.
    """
    task = find_task(task_name)
    where = find_encoder(encoder, data)
    sources, class_names, note, skipped = _sources(task, source, data)
    if train_size is not None and train_size < len(sources["train"]):
        ranked = sorted(sources["train"], key=lambda entry: text_data.position("train\t" + "\t".join(_texts(entry))))
        sources["train"] = ranked[:train_size]
        note = f"{note}; " if note else ""
        note += f"{train_size:,} training examples"
    tokenizer = load_tokenizer(where, lambda: (text for entry in sources["train"] for text in _texts(entry)))
    splits = {name: make_split(task, tokenizer, entries, max_length) for name, entries in sources.items()}
    return Prepared(task, where, tokenizer, splits, sources, class_names, note, skipped)


def _sources(task: Task, source: str, data: Path | None) -> tuple[dict[str, Sequence[Any]], tuple[str, ...], str, int]:
    if task.kind == "spans":
        questions, note = squad.load(task, data, source)
        return dict(questions), tuple(spans.class_names(allows_none=allows_none(task))), note, 0
    read = text_data.load(task.name, data, source)
    return dict(read.splits), read.class_names, read.note, read.skipped


def make_split(task: Task, tokenizer: PreTrainedTokenizerBase, entries: Sequence[Any], max_length: int) -> Split:
    """Tokenize examples or questions."""
    if task.kind == "spans":
        windows = squad.windows(tokenizer, entries, max_length)
        return Split([window.row for window in windows], questions=list(entries), windows=windows)
    encoded: Encoded = encode(tokenizer, [entry.texts for entry in entries], max_length)
    if any(entry.label is None for entry in entries):
        return Split(encoded.rows, num_truncated=encoded.num_truncated)
    labels = [entry.label for entry in entries]
    rows = [{**row, "labels": label} for row, label in zip(encoded.rows, labels)]
    return Split(rows, labels, num_truncated=encoded.num_truncated)


def allows_none(task: Task) -> bool:
    """Whether "no answer" is an answer of this span task."""
    return task.name == "squad2"


def _texts(entry: Example | Question) -> Iterable[str]:
    return entry.texts if isinstance(entry, Example) else (entry.question, entry.context)
