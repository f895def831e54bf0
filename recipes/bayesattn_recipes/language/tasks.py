"""The tasks: their files, their labels, their metrics, and what the paper reports.

A task is classification (one class per text or pair), regression (STS-B's score) or spans (SQuAD: where the answer is).
"""

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["classification", "regression", "spans"]


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        name: As in configs and tables.
        kind: Kind of prediction.
        folder: Its folder in GLUE's distribution, or SQuAD's version.
        texts: Columns of the one or two texts.
        label: Column of the label.
        labels: The labels as written in the files, class by class; empty if they are numbers or positions.
        class_names: Words for the classes.
        metrics: Names from `metrics.py`; the first is the one of the paper's table.
        paper: The paper's values of the first metric in percent, soft and BAM-WC, for ALBERT-base; None if it has none.
    """

    name: str
    kind: Kind
    folder: str
    texts: tuple[str, ...]
    label: str = "label"
    labels: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ("accuracy",)
    paper: tuple[float, float] | None = None


_ENTAILMENT: dict[str, Any] = {"labels": ("entailment", "not_entailment"), "class_names": ("entailment", "not entailment")}
_BINARY = ("0", "1")

TASKS = {
    task.name: task
    for task in (
        Task(
            "cola", "classification", "CoLA", ("sentence",), labels=_BINARY, class_names=("unacceptable", "acceptable"),
            metrics=("matthews", "accuracy"), paper=(54.5, 55.8),
        ),
        Task(
            "mrpc", "classification", "MRPC", ("#1 String", "#2 String"), "Quality", _BINARY, ("different", "paraphrase"),
            metrics=("accuracy", "f1"), paper=(86.5, 88.5),
        ),
        Task("rte", "classification", "RTE", ("sentence1", "sentence2"), **_ENTAILMENT, paper=(75.8, 76.2)),
        Task(
            "stsb", "regression", "STS-B", ("sentence1", "sentence2"), "score", class_names=("score",),
            metrics=("pearson", "spearman"), paper=(90.3, 91.1),
        ),
        Task(
            "sst2", "classification", "SST-2", ("sentence",), labels=_BINARY, class_names=("negative", "positive"),
            paper=(92.4, 92.7),
        ),
        Task("qnli", "classification", "QNLI", ("question", "sentence"), **_ENTAILMENT, paper=(90.9, 91.5)),
        Task(
            "qqp", "classification", "QQP", ("question1", "question2"), "is_duplicate", _BINARY, ("different", "duplicate"),
            metrics=("accuracy", "f1"), paper=(90.8, 90.7),
        ),
        Task(
            "mnli", "classification", "MNLI", ("sentence1", "sentence2"), "gold_label",
            ("entailment", "neutral", "contradiction"), ("entailment", "neutral", "contradiction"), paper=(85.1, 85.6),
        ),
        Task(
            "wnli", "classification", "WNLI", ("sentence1", "sentence2"), labels=_BINARY,
            class_names=("not entailment", "entailment"),
        ),
        Task("squad1", "spans", "1.1", ("question", "context"), metrics=("exact_match", "f1"), paper=(80.86, 81.40)),
        Task("squad2", "spans", "2.0", ("question", "context"), metrics=("exact_match", "f1"), paper=(78.80, 78.97)),
        # the user's own texts: columns and classes come from the file (`data.load_own`)
        Task("own", "classification", "", ()),
    )
}  # fmt: skip

# SQuAD's second number, F1, in the paper's table
PAPER_F1 = {"squad1": (88.70, 88.82), "squad2": (82.07, 82.23)}


def find_task(name: str) -> Task:
    """Return a task by its name."""
    if name not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {name!r}")
    return TASKS[name]
