"""GLUE tasks and texts of your own as examples: read, checked row by row, and split into train, validation and test.

Test is what GLUE calls dev, because its test labels are withheld. Validation is held out of the training file, for choices
(noise, thresholds, temperature, epochs); no choice uses test. Where only part of a task is available, it is split by a
hash of what must not be on both sides (`SPLITTING`), so that the split depends neither on the order of rows nor on a seed.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bayesattn_recipes.common.sources import SOURCES
from bayesattn_recipes.language.files import OWN_LAYOUT, find_text, parse_rows, require_folder
from bayesattn_recipes.language.tasks import Task, find_task

# largest share and size of validation, from the training file
VALIDATION_SHARE = 0.1
VALIDATION_SIZE = 500
# shares of a task with only one available file
PARTS = {"train": 0.8, "validation": 0.1, "test": 0.1}

SUBSETS = {
    "mnli": "glue_subsets/mnli_subset_from_natural_instructions.tsv",
    "qqp": "glue_subsets/qqp_subset_from_natural_instructions.tsv",
}
_SUBSET_COLUMNS = {"mnli": (("premise", "hypothesis"), "label"), "qqp": (("question1", "question2"), "is_duplicate")}

SPLITTING = {
    "mnli": "27,292 pairs of MNLI, split 80/10/10 by premise",
    "qqp": "6,493 pairs of QQP, split 80/10/10 by unordered pair",
    "qnli": "QNLI's dev file, split 80/10/10 by question",
}


@dataclass(frozen=True)
class Example:
    """One text or pair of texts.

    Attributes:
        texts: One or two.
        label: Class, or score of a regression; None if there is no right answer.
    """

    texts: tuple[str, ...]
    label: int | float | None


@dataclass(frozen=True)
class TextData:
    """The splits of a task.

    Attributes:
        splits: `train`, `validation` and `test`.
        class_names: One per class; one word for a regression.
        note: How the splits were made if they are not GLUE's own; empty otherwise.
        skipped: Rows left out because their file is known to hold broken ones (QQP).
    """

    splits: dict[str, list[Example]]
    class_names: tuple[str, ...]
    note: str = ""
    skipped: int = 0


def load(name: str, data: Path | None, source: str = "files") -> TextData:
    """Read a task.

    Args:
        name: One of `TASKS` that is not SQuAD.
        data: Folder of the files.
        source: `files`, or `datasets` for the hub's copy of GLUE through the package of that name.
    """
    task = find_task(name)
    if source == "datasets":
        return load_hub(task)
    folder = require_folder(data, "own" if name == "own" else "glue")
    return load_own(folder) if name == "own" else load_glue(task, folder)


def load_glue(task: Task, data: Path) -> TextData:
    """Read a GLUE task: the official files if they are there, else the available part."""
    dev_name = "dev_matched.tsv" if task.name == "mnli" else "dev.tsv"
    train = find_text(data, [f"{task.folder}/train.tsv", f"{task.folder}/msr_paraphrase_train.txt"])
    dev = find_text(data, [f"{task.folder}/{dev_name}"])
    if train is not None and dev is not None:
        train_rows, skipped = read_examples(task, *train)
        test_rows, more = read_examples(task, *dev)
        kept, validation = hold_out(train_rows, VALIDATION_SHARE, VALIDATION_SIZE)
        return TextData(_named(kept, validation, test_rows), task.class_names, skipped=skipped + more)
    if task.name in SUBSETS and (subset := find_text(data, [SUBSETS[task.name]])) is not None:
        texts, label = _SUBSET_COLUMNS[task.name]
        rows, _ = read_examples(replace(task, texts=texts, label=label), *subset, quoted=task.name == "qqp")
        return TextData(split_by(rows, _split_key(task.name)), task.class_names, SPLITTING[task.name])
    if task.name in SPLITTING and dev is not None:
        rows, _ = read_examples(task, *dev)
        return TextData(split_by(rows, _split_key(task.name)), task.class_names, SPLITTING[task.name])
    missing = [name for name, found in (("train.tsv", train), (dev_name, dev)) if found is None]
    raise ValueError(
        f"{task.folder}/{' and '.join(missing)} of task {task.name!r} was not found in data {str(data)!r}. Give a folder "
        f"with GLUE's files as distributed, unpacked or in glue.tar.xz, or with glue_subsets. {SOURCES['glue']}"
    )


def load_own(data: Path) -> TextData:
    """Read a user's classification task: `train.tsv` and, if it is there, `dev.tsv`, with a header.

    Columns are `label` and one or two others, the texts, in the file's order. The classes are the labels of `train.tsv`,
    sorted. Without `dev.tsv` the rows are split 80/10/10 by their texts.
    """
    train = find_text(data, ["train.tsv"])
    if train is None:
        raise ValueError(f"data {str(data)!r} has no train.tsv. Task 'own' needs {OWN_LAYOUT}")
    task = _own_task(*train)
    rows, _ = read_examples(task, *train)
    dev = find_text(data, ["dev.tsv"])
    if dev is None:
        return TextData(split_by(rows, _texts_key), task.class_names, "split 80/10/10 by text")
    kept, validation = hold_out(rows, VALIDATION_SHARE, VALIDATION_SIZE)
    return TextData(_named(kept, validation, read_examples(task, *dev)[0]), task.class_names)


def _own_task(text: str, where: str) -> Task:
    rows = parse_rows(text, where)
    header = next(rows, (1, []))[1]
    texts = tuple(column for column in header if column != "label")
    if "label" not in header or not 1 <= len(texts) <= 2:
        raise ValueError(f"{where}, line 1: columns must be 'label' and one or two columns of text, got {header}")
    place = header.index("label")
    # an empty label is a gap in the file, not a class; `read_examples` names its line
    labels = tuple(sorted({row[place] for _, row in rows if len(row) == len(header) and row[place].strip()}))
    if len(labels) < 2:
        # a malformed row may be the only one of its class: it is named first
        read_examples(replace(find_task("own"), texts=texts, labels=labels, class_names=labels), text, where)
        raise ValueError(f"{where} must have at least two different labels, got {list(labels)}")
    return replace(find_task("own"), texts=texts, labels=labels, class_names=labels)


def read_examples(task: Task, text: str, where: str, *, quoted: bool = False) -> tuple[list[Example], int]:
    """Parse one labeled file of a task; return its examples and how many rows were skipped.

    Raises:
        ValueError: A row has the wrong number of fields, an unknown label or an empty text; the message has its line. Only
            in QQP's official files, some rows of which are cut in the middle, such rows are skipped and counted.
    """
    rows = parse_rows(text, where, quoted=quoted)
    header = _header(task, rows, where)
    columns = [_column(header, name, where) for name in (*task.texts, task.label)]
    examples, skipped = [], 0
    for line, fields in rows:
        try:
            # the header of MNLI's dev files has more columns than its training file; both name them all
            if len(fields) != len(header):
                raise ValueError(f"the row must have {len(header)} fields ({', '.join(header)}), got {len(fields)}")
            *texts, label = (fields[column] for column in columns)
            examples.append(make_example(task, texts, label))
        except ValueError as error:
            if task.name != "qqp" or quoted:
                raise ValueError(f"{where}, line {line}: {error}") from None
            skipped += 1
    if not examples:
        raise ValueError(f"{where} must have at least one row below the header, got none")
    return examples, skipped


def _header(task: Task, rows: Iterable[tuple[int, list[str]]], where: str) -> list[str]:
    if task.name == "cola":
        # the only labeled file without a header: source, label, the authors' own mark, sentence
        return ["source", "label", "mark", "sentence"]
    header = next(iter(rows), None)
    if header is None:
        raise ValueError(f"{where} is empty. It must have a header and rows")
    return header[1]


def _column(header: list[str], name: str, where: str) -> int:
    if name not in header:
        raise ValueError(f"{where}, line 1 has no column {name!r}, only {', '.join(header)}")
    return header.index(name)


def make_example(task: Task, texts: Sequence[str], label: str) -> Example:
    """Check one row: no text is empty, the label is one of the task's."""
    for name, value in zip(task.texts, texts):
        if not value.strip():
            raise ValueError(f"{name} is empty. Every text must have a character")
    if task.kind == "regression":
        return Example(tuple(texts), _score(task, label))
    if label not in task.labels:
        raise ValueError(f"{task.label} must be one of {', '.join(map(repr, task.labels))}, got {label!r}")
    return Example(tuple(texts), task.labels.index(label))


def _score(task: Task, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value <= 5.0:
        raise ValueError(f"{task.label} must be a number from 0 to 5, got {text!r}")
    return value


def load_hub(task: Task) -> TextData:
    """Read GLUE from the Hugging Face hub (or its local cache) through the package `datasets`."""
    found = hub_dataset("nyu-mll/glue", task.name)
    test = found["validation_matched" if task.name == "mnli" else "validation"]
    return from_rows(task, found["train"], test)


def hub_dataset(*names: str) -> Mapping[str, Iterable[Mapping[str, Any]]]:
    """Return a data set of the hub, rows by split; the names are those that `datasets.load_dataset` takes."""
    try:
        from datasets import load_dataset  # type: ignore[import-not-found]
    except ModuleNotFoundError:
        raise ValueError("source 'datasets' needs the package datasets. Install it with: pip install datasets") from None
    return load_dataset(*names)


def from_rows(task: Task, train: Iterable[Mapping[str, Any]], test: Iterable[Mapping[str, Any]]) -> TextData:
    """Make a task from rows with named fields, such as a `datasets.Dataset` or a list of dictionaries.

    Args:
        task: Task of the rows: texts under the names of the hub's GLUE, `label` a class number or a score.
        train: Training rows; validation is held out of them.
        test: Test rows.
    """
    names = HUB_COLUMNS.get(task.name, task.texts)

    def convert(rows: Iterable[Mapping[str, Any]], where: str) -> list[Example]:
        examples = []
        for number, row in enumerate(rows):
            missing = [name for name in (*names, "label") if name not in row]
            if missing:
                raise ValueError(f"{where}, row {number} lacks {missing}. It has {sorted(row)}")
            label = row["label"]
            if task.kind == "classification":
                if not isinstance(label, int) or not 0 <= label < len(task.labels):
                    raise ValueError(f"{where}, row {number}: label must be from 0 to {len(task.labels) - 1}, got {label!r}")
                label = task.labels[label]
            try:
                examples.append(make_example(task, [row[name] for name in names], str(label)))
            except ValueError as error:
                raise ValueError(f"{where}, row {number}: {error}") from None
        return examples

    kept, validation = hold_out(convert(train, "train"), VALIDATION_SHARE, VALIDATION_SIZE)
    return TextData(_named(kept, validation, convert(test, "test")), task.class_names)


# names of the texts that differ between the hub's copy and the files
HUB_COLUMNS = {"mrpc": ("sentence1", "sentence2"), "mnli": ("premise", "hypothesis")}


def position(key: str) -> float:
    """Return a number in [0, 1) that depends on `key` alone: which side of a split it belongs to."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big") / 2**56


def split_by(examples: list[Example], key: Callable[[Example], str]) -> dict[str, list[Example]]:
    """Split by the hash of `key`, in the shares of `PARTS`: equal keys are on the same side."""
    splits: dict[str, list[Example]] = {name: [] for name in PARTS}
    for example in examples:
        place, end = position(key(example)), 0.0
        for name, share in PARTS.items():
            end += share
            # the shares may add up to slightly less than 1
            if place < end or name == "test":
                splits[name].append(example)
                break
    empty = [name for name, rows in splits.items() if not rows]
    if empty:
        raise ValueError(f"{len(examples)} examples leave the splits {empty} empty. Give more examples, or a dev.tsv")
    return splits


def hold_out(examples: list[Example], share: float, size: int) -> tuple[list[Example], list[Example]]:
    """Remove the examples with the smallest hashes of their texts; return those left and those removed."""
    count = max(1, min(int(share * len(examples)), size))
    if len(examples) <= count:
        raise ValueError(f"at least two training examples are needed besides validation, got {len(examples)}")
    places = [position(_texts_key(example)) for example in examples]
    limit = sorted(places)[count - 1]
    left = [example for example, place in zip(examples, places) if place > limit]
    return left, [example for example, place in zip(examples, places) if place <= limit]


def _texts_key(example: Example) -> str:
    return "\t".join(example.texts)


def _split_key(name: str) -> Callable[[Example], str]:
    if name == "qqp":
        return lambda example: "\t".join(sorted(example.texts))
    return lambda example: example.texts[0]


def _named(train: list[Example], validation: list[Example], test: list[Example]) -> dict[str, list[Example]]:
    return {"train": train, "validation": validation, "test": test}
