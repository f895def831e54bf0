"""The predictions for every split, as one safetensors file with JSON metadata, checked when it is read."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from bayesattn.doubt import Uncertainty
from bayesattn.files import RunError, read_tensors, write_tensors

PREDICTIONS_SCHEMA = "bayesattn.predictions/1"
PREDICTIONS_FILE = "predictions.safetensors"


@dataclass(frozen=True)
class EdgeWeights:
    """Sampled attention on the edges into the nodes of a split, for runs on graphs.

    Attributes:
        nodes: Node number in the graph of every example, `n`.
        index: Source and target of every edge, `2 e`.
        weights: Sampled weights, `s e`.
        source_labels: Class of every source, `e`; −1 where it is unknown.
    """

    nodes: Tensor
    index: Tensor
    weights: Tensor
    source_labels: Tensor


@dataclass(frozen=True)
class DoubtfulExamples:
    """The predictions of a split with the smallest margin / std (`ba.uncertainty`), the most doubtful first.

    Attributes:
        examples: Their places in the split, `k`.
        margin: Difference of the two largest logits, `k`.
        std: Its standard deviation under attention noise, `k`.
        by_token: Variance by key, `k keys`.
        by_head: Variance by layer and head, `k layers heads`; 0 where a layer has fewer heads than another.
        words: The words at the keys of each, where they are texts; keys beyond its words are padding.
    """

    examples: Tensor
    margin: Tensor
    std: Tensor
    by_token: Tensor
    by_head: Tensor
    words: list[list[str]] | None = None

    @classmethod
    def from_uncertainty(
        cls, examples: Int[Tensor, " k"], found: Uncertainty, words: Sequence[Sequence[str]] | None = None
    ) -> "DoubtfulExamples":
        """Keep what a report shows of these examples; `found` covers only them, in their order."""
        if found.by_token is None or not found.by_head:
            raise ValueError("the doubt must have parts by token and head, got none. Use method='closed-form' on an encoder")
        heads = list(found.by_head.values())
        most = max(part.shape[1] for part in heads)
        by_head = torch.stack([torch.nn.functional.pad(part, (0, most - part.shape[1])) for part in heads], dim=1)
        return cls(
            *(part.detach().cpu() for part in (examples, found.margin, found.std, found.by_token)),
            by_head=by_head.detach().cpu(),
            words=None if words is None else [list(row) for row in words],
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def problem(self, num_examples: int) -> str | None:
        """Return why these cannot belong to a split of `num_examples`; None where nothing is wrong."""
        count = len(self.examples) if self.examples.ndim == 1 else 0
        keys, layers_heads = self.by_token.shape[-1:], self.by_head.shape[1:]
        expected = {"examples": (count,), "margin": (count,), "std": (count,), "by_token": (count, *keys)}
        expected["by_head"] = (count, *layers_heads)
        shapes = {name: tuple(value.shape) for name, value in self.tensors().items()}
        if not count or shapes != expected or len(layers_heads) != 2:
            return f"shapes {shapes}"
        if self.examples.is_floating_point() or not 0 <= int(self.examples.min()) <= int(self.examples.max()) < num_examples:
            return f"examples {self.examples.tolist()} of {num_examples}"
        if not all(bool(torch.isfinite(value).all()) for value in self.tensors().values()):
            return "numbers that are not finite"
        words = self.words
        if words is not None and not (len(words) == count and all(0 < len(row) <= keys[0] for row in words)):
            return "another number of words than keys"
        return None


@dataclass(frozen=True)
class SplitPredictions:
    """The predictions for one data split.

    Attributes:
        samples: By method, class probabilities, draws first: `s n c`, with s = 1 where nothing is drawn.
        labels: Right classes `n`, or targets `n c` from 0 to 1 for a multilabel task; None where there is no right answer
            (out-of-distribution data).
        inputs: Images `n height width`, or `n height width 3` in RGB (uint8), to show in the report; optional.
        attention: Named attention maps over the keys, `n heads keys` each: `mean`, `std`, `prior`; optional.
        texts: One text per example to show beside it, such as a question; optional.
        edges: Attention on edges, where the examples are nodes of a graph; optional.
        doubtful: The predictions with the most doubt in closed form; optional.
    """

    samples: dict[str, Tensor]
    labels: Tensor | None = None
    inputs: Tensor | None = None
    attention: dict[str, Tensor] = field(default_factory=dict)
    texts: list[str] | None = None
    edges: EdgeWeights | None = None
    doubtful: DoubtfulExamples | None = None


@dataclass(frozen=True)
class Predictions:
    """The predictions of one run on all its splits.

    Attributes:
        splits: By name, in the order of reports. `validation` is for choosing thresholds and temperatures only.
        class_names: One per class.
        methods: What was drawn: `mean` (nothing), `attention`, `dropout` or `attention+dropout`.
        seed: Seed of the draws.
        key_grid: Rows and columns that the last keys form over an image; None where keys have no such place.
        task: Whether the classes exclude each other (`multiclass`) or each has its own probability (`multilabel`).
        test: Test behind the p-values; see `metrics.top_two_p_value`.
    """

    splits: dict[str, SplitPredictions]
    class_names: list[str]
    methods: list[str]
    seed: int
    key_grid: tuple[int, int] | None = None
    task: Literal["multiclass", "multilabel"] = "multiclass"
    test: Literal["paired", "welch", "pooled", "wilcoxon"] = "paired"


def write_predictions(folder: Path, predictions: Predictions) -> None:
    """Write `predictions.safetensors`: tensors named `split number/part`, everything else in the metadata."""
    tensors: dict[str, Tensor] = {}
    for index, split in enumerate(predictions.splits.values()):
        parts = {"labels": split.labels, "inputs": split.inputs}
        parts |= {f"samples/{method}": value for method, value in split.samples.items()}
        parts |= {f"attention/{name}": value for name, value in split.attention.items()}
        parts |= {f"edges/{name}": value for name, value in vars(split.edges).items()} if split.edges else {}
        parts |= {f"doubtful/{name}": value for name, value in split.doubtful.tensors().items()} if split.doubtful else {}
        tensors |= {f"{index}/{name}": value for name, value in parts.items() if value is not None}
    meta = {
        "schema": PREDICTIONS_SCHEMA,
        "splits": list(predictions.splits),
        "class_names": predictions.class_names,
        "methods": predictions.methods,
        "seed": predictions.seed,
        "key_grid": predictions.key_grid,
        "task": predictions.task,
        "test": predictions.test,
        "texts": {name: split.texts for name, split in predictions.splits.items() if split.texts is not None},
        "words": {name: split.doubtful.words for name, split in predictions.splits.items() if split.doubtful is not None},
    }
    write_tensors(folder / PREDICTIONS_FILE, tensors, {"bayesattn": json.dumps(meta)})


def read_predictions(folder: Path) -> Predictions:
    """Read `predictions.safetensors` and check that names and shapes match."""
    path = folder / PREDICTIONS_FILE
    if not path.exists():
        raise RunError(f"{folder} holds no {PREDICTIONS_FILE}. Run `bayesattn evaluate {folder}` first")
    tensors, header = read_tensors(path)
    try:
        meta = json.loads(header.get("bayesattn", "{}"))
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} has metadata that is not JSON: {error}") from None
    if not isinstance(meta, dict) or meta.get("schema") != PREDICTIONS_SCHEMA:
        raise RunError(f"{path} was not written by bayesattn: its metadata has no schema {PREDICTIONS_SCHEMA!r}")
    missing = sorted({"splits", "class_names", "methods", "seed"} - meta.keys())
    if missing or not meta["splits"] or not meta["methods"]:
        raise RunError(f"{path} lacks {missing or 'splits or methods'} in its metadata")
    for name in ("splits", "class_names", "methods"):
        if not isinstance(meta[name], list) or not all(isinstance(entry, str) for entry in meta[name]):
            raise RunError(f"{path}: {name} must be a list of names")
    key_grid = meta.get("key_grid")
    if key_grid is not None and not (
        isinstance(key_grid, list) and len(key_grid) == 2 and all(type(entry) is int and entry > 0 for entry in key_grid)
    ):
        raise RunError(f"{path}: key_grid must be null or two positive integers")
    # optional in the file
    task, test, texts = meta.get("task", "multiclass"), meta.get("test", "paired"), meta.get("texts", {})
    if task not in ("multiclass", "multilabel") or test not in ("paired", "welch", "pooled", "wilcoxon"):
        raise RunError(f"{path} has task {task!r} and test {test!r}, at least one of which is unknown")
    if not isinstance(texts, dict) or not all(
        isinstance(lines, list) and all(isinstance(line, str) for line in lines) for lines in texts.values()
    ):
        raise RunError(f"{path}: texts must be one list of words per split")
    words = meta.get("words", {})
    if not isinstance(words, dict) or not all(rows is None or _are_words(rows) for rows in words.values()):
        raise RunError(f"{path}: words must be one list of words per split and example")
    splits = {}
    for index, name in enumerate(meta["splits"]):
        parts = {key.removeprefix(f"{index}/"): value for key, value in tensors.items() if key.startswith(f"{index}/")}
        doubtful = {key: parts.pop(key) for key in list(parts) if key.startswith("doubtful/")}
        split = _checked_split(path, name, parts, meta["methods"], len(meta["class_names"]), texts.get(name))
        splits[name] = replace(split, doubtful=_checked_doubtful(path, name, doubtful, words.get(name), split))
    return Predictions(
        splits,
        meta["class_names"],
        meta["methods"],
        meta["seed"],
        None if key_grid is None else tuple(key_grid),
        task,
        test,
    )


def _checked_split(
    path: Path, name: str, parts: dict[str, Tensor], methods: list[str], num_classes: int, texts: list[str] | None
) -> SplitPredictions:
    samples = {method: parts.get(f"samples/{method}") for method in methods}
    num_examples = next((value.shape[1] for value in samples.values() if value is not None and value.ndim == 3), None)
    for method, value in samples.items():
        if value is None or value.ndim != 3 or len(value) < 1 or value.shape[1:] != (num_examples, num_classes):
            shape = None if value is None else tuple(value.shape)
            raise RunError(
                f"{path}: samples of method {method!r}, split {name!r} must have shape (draws, {num_examples}, "
                f"{num_classes}), got {shape}"
            )
    for part, value in parts.items():
        if not part.startswith(("samples/", "edges/")) and value.shape[:1] != (num_examples,):
            entries = value.shape[0] if value.ndim else "no"
            raise RunError(f"{path}: {part} of split {name!r} must have {num_examples} entries, got {entries}")
    if texts is not None and len(texts) != num_examples:
        raise RunError(f"{path}: texts of split {name!r} must have {num_examples} entries, got {len(texts)}")
    attention = {key.removeprefix("attention/"): value for key, value in parts.items() if key.startswith("attention/")}
    kept = {method: value for method, value in samples.items() if value is not None}
    edges = {key.removeprefix("edges/"): value for key, value in parts.items() if key.startswith("edges/")}
    shown = _checked_edges(path, name, edges, num_examples)
    return SplitPredictions(kept, parts.get("labels"), parts.get("inputs"), attention, texts, shown)


def _checked_edges(path: Path, name: str, parts: dict[str, Tensor], num_examples: int | None) -> EdgeWeights | None:
    if not parts:
        return None
    shapes = {key: tuple(value.shape) for key, value in parts.items()}
    count = shapes.get("index", (0, 0))[-1]
    draws = shapes.get("weights", (0, 0))[0]
    expected = {"nodes": (num_examples,), "index": (2, count), "weights": (draws, count), "source_labels": (count,)}
    if shapes != expected or draws < 2:
        raise RunError(f"{path}: edges of split {name!r} must have shapes {expected} with at least two draws, got {shapes}")
    return EdgeWeights(**parts)


def _are_words(rows: Any) -> bool:
    return isinstance(rows, list) and all(
        isinstance(row, list) and all(isinstance(word, str) for word in row) for row in rows
    )


def _checked_doubtful(
    path: Path, name: str, parts: dict[str, Tensor], words: list[list[str]] | None, split: SplitPredictions
) -> DoubtfulExamples | None:
    if not parts:
        return None
    given = {key.removeprefix("doubtful/"): value for key, value in parts.items()}
    expected = {entry.name for entry in fields(DoubtfulExamples)} - {"words"}
    if given.keys() != expected:
        raise RunError(f"{path}: doubtful examples of split {name!r} have {sorted(given)} instead of {sorted(expected)}")
    found = DoubtfulExamples(**given, words=words)
    problem = found.problem(next(iter(split.samples.values())).shape[1])
    if problem is not None:
        raise RunError(f"{path}: doubtful examples of split {name!r} do not fit together: {problem}")
    return found
