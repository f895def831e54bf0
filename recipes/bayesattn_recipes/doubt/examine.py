"""Everything the study asks of one fine-tuned model: its answers, its doubt in closed form, its draws, and the controls.

The result is a flat dictionary of tensors, one row per text, kept as one safetensors file. Rankings and tables are made
from it afterwards (`rankings.py`, `table.py`) without a model.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

import bayesattn as ba
from bayesattn.metrics import mutual_information, top_two_classes
from bayesattn_recipes.doubt import laplace
from bayesattn_recipes.doubt.gradients import squared_gradients
from bayesattn_recipes.language.features import Collator, bucketed
from bayesattn_recipes.language.prepare import Split

BATCH_SIZE = 64
# draws share a forward pass of at most this many tokens
TOKENS_PER_PASS = 2**15
ATTENTION_DRAWS = (20, 100)
DROPOUT_DRAWS = 20

Found = dict[str, Tensor]
Row = dict[str, Any]


def examine(model: nn.Module, splits: dict[str, Split], collator: Collator, *, seed: int, optional: Sequence[str]) -> Found:
    """Ask a model about its validation and test texts, and about texts of another kind.

    Args:
        model: A plain classifier of Hugging Face in eval mode.
        splits: `train`, `validation`, `test`, and `outside`, whose labels mean nothing to this model.
        collator: Makes batches.
        seed: Seed of the draws.
        optional: Which measurements of `rankings.OPTIONAL` to make.
    """
    found: Found = {}
    for name in ("validation", "test", "outside"):
        rows = splits[name].rows
        parts = [_plain(model, rows, collator), _closed_form(model, rows, collator)]
        if name != "outside":
            more = {"draws": _attention_draws, "dropout": _dropout_draws, "controls": _controls}
            parts += [measured(model, rows, collator, seed) for name, measured in more.items() if name in optional]
            found[f"{name}.labels"] = torch.tensor(splits[name].labels)
        found |= {f"{name}.{key}": value for part in parts for key, value in part.items()}
    return found | (_laplace(model, splits, collator, found["validation.labels"]) if "laplace" in optional else {})


def _batches(model: nn.Module, rows: Sequence[Row], collator: Collator) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
    device = next(model.parameters()).device
    for indices in bucketed(rows, BATCH_SIZE):
        batch = collator([rows[i] for i in indices])
        batch.pop("labels", None)
        yield indices, {name: value.to(device) for name, value in batch.items()}


def _in_order(parts: list[tuple[list[int], Found]]) -> Found:
    """Put the rows of all batches back into the order of the texts."""
    order = torch.tensor([i for indices, _ in parts for i in indices]).argsort()
    return {name: torch.cat([found[name].cpu() for _, found in parts])[order] for name in parts[0][1]}


@torch.no_grad()
def _plain(model: nn.Module, rows: Sequence[Row], collator: Collator) -> Found:
    return _in_order([(i, {"logits": model(**batch).logits.float()}) for i, batch in _batches(model, rows, collator)])


def _closed_form(model: nn.Module, rows: Sequence[Row], collator: Collator) -> Found:
    """Return the results of `ba.uncertainty`, for log-noise of its default variance."""
    classes = min(model.config.num_labels, 3)  # type: ignore[union-attr]
    parts = []
    for indices, batch in _batches(model, rows, collator):
        result = ba.uncertainty(model, batch, num_classes=classes)
        assert result.classes is not None
        assert result.differences is not None
        assert result.covariance is not None
        assert result.by_token is not None
        shares = result.by_token / result.std.square().clamp(min=1e-30).unsqueeze(1)
        found = {
            "classes": result.classes,
            "differences": result.differences,
            "covariance": result.covariance,
            "layers": torch.stack(list(result.by_layer.values()), dim=1),
            # only for pictures
            "heads": torch.stack(list(result.by_head.values()), dim=1).half(),
            "tokens": torch.nn.functional.pad(shares, (0, collator.max_length - shares.shape[1])).half(),
        }
        parts.append((indices, found))
    return _in_order(parts)


def _attention_draws(model: nn.Module, rows: Sequence[Row], collator: Collator, seed: int) -> Found:
    ba.bayesianize(model, ba.AttentionConfig("BAM-NOKL"))
    try:
        return _drawn(model, rows, collator, seed, "attention", ATTENTION_DRAWS)
    finally:
        ba.restore(model)


def _dropout_draws(model: nn.Module, rows: Sequence[Row], collator: Collator, seed: int) -> Found:
    # a model with soft attention also drops attention weights, as it did in training
    ba.bayesianize(model, ba.AttentionConfig("soft"))
    try:
        return _drawn(model, rows, collator, seed, "dropout", (DROPOUT_DRAWS,))
    finally:
        ba.restore(model)


def _drawn(model: nn.Module, rows: Sequence[Row], collator: Collator, seed: int, kind: str, counts: Sequence[int]) -> Found:
    parts = []
    for number, (indices, batch) in enumerate(_batches(model, rows, collator)):
        with torch.no_grad():
            pair = top_two_classes(torch.softmax(model(**batch).logits.float(), dim=-1))
        chunk = max(1, TOKENS_PER_PASS // batch["input_ids"].numel())
        drawn = ba.predict(
            model, batch, max(counts), seed + number, chunk, batch_dims=0, task="regression", dropout=kind == "dropout"
        ).logits.float()
        found: Found = {}
        for count in counts:
            found |= {f"{kind}{count}.{key}": value for key, value in _summary(drawn[:count], pair).items()}
        parts.append((indices, found))
    return _in_order(parts)


def _summary(drawn: Float[Tensor, "s b c"], pair: Tensor) -> Found:
    """Return mean probabilities, mutual information, and the paired t statistic / √M of logits and of probabilities."""
    probabilities = torch.softmax(drawn.double(), dim=-1)
    return {
        "mean": probabilities.mean(dim=0),
        "mi": mutual_information(probabilities),
        "t": _paired_t(drawn.double(), pair),
        "t of probabilities": _paired_t(probabilities, pair),
    }


def _paired_t(values: Float[Tensor, "s b c"], pair: Tensor) -> Float[Tensor, " b"]:
    first, second = values.gather(2, pair.expand(len(values), -1, -1)).unbind(dim=2)
    difference = first - second
    return difference.mean(dim=0) / difference.std(dim=0).clamp(min=1e-30)


def _controls(model: nn.Module, rows: Sequence[Row], collator: Collator, _seed: int) -> Found:
    learned = [p for p in model.parameters() if p.requires_grad]
    try:
        for parameter in learned:
            parameter.requires_grad_(False)
        return _in_order([(i, squared_gradients(model, batch)) for i, batch in _batches(model, rows, collator)])
    finally:
        for parameter in learned:
            parameter.requires_grad_(True)


@torch.no_grad()
def _features(model: nn.Module, rows: Sequence[Row], collator: Collator) -> laplace.Features:
    """Return the inputs of the classifier's last linear map, and its logits."""
    seen: list[Tensor] = []
    head: Any = model.classifier
    hook = head.register_forward_hook(lambda module, given, output: seen.append(given[0]))
    try:
        logits = [model(**batch).logits.float() for _, batch in _batches(model, rows, collator)]
    finally:
        hook.remove()
    return laplace.Features(torch.cat(seen).float(), torch.cat(logits))


def _laplace(model: nn.Module, splits: dict[str, Split], collator: Collator, labels: Tensor) -> Found:
    """Return the last layer's Laplace approximation of validation and test texts."""
    order = {name: list(_order(splits[name].rows)) for name in ("validation", "test")}
    features = {name: _features(model, splits[name].rows, collator) for name in ("train", "validation", "test")}
    device = features["train"].logits.device
    head = laplace.fit(features["train"], features["validation"], labels[order["validation"]].to(device))
    found: Found = {}
    for name in ("validation", "test"):
        mean, t = laplace.predict(head, features[name])
        back = torch.tensor(order[name]).argsort()
        found |= {f"{name}.laplace.mean": mean.cpu()[back], f"{name}.laplace.t": t.cpu()[back]}
    return found


def _order(rows: Sequence[Row]) -> Iterator[int]:
    return (i for indices in bucketed(rows, BATCH_SIZE) for i in indices)
