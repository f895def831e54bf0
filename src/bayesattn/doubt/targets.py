"""From a model's outputs to the one number per example whose variance is computed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bayesattn.metrics.significance import top_two_classes
from bayesattn.precision import upcast
from bayesattn.prediction import find_logits

Target = Literal["margin", "value", "span"] | int | Tensor | Callable[[Any], Tensor]
Output = Callable[[Any], Tensor] | None


@dataclass(frozen=True)
class Number:
    """The number whose variance is computed, for one batch.

    Attributes:
        of: Computes it from the model's outputs, with a graph.
        is_margin: Whether 0 means "undecided".
        probabilities: Class probabilities, where there are classes.
        label: The most probable class or span.
        classes: The most probable classes, in order, where the number is the margin of the first two.
        find: Extracts the logits from the model's outputs.
        logits: What must be finite, where the number is computed from logits.
    """

    of: Callable[[Any], Float[Tensor, " b"]]
    is_margin: bool = False
    probabilities: Float[Tensor, "b k"] | None = None
    label: Int[Tensor, "b *two"] | None = None
    classes: Int[Tensor, "b top"] | None = None
    find: Callable[[Any], Tensor] = find_logits
    logits: Tensor | None = None

    def difference(self, first: int, second: int) -> Callable[[Any], Float[Tensor, " b"]]:
        """Return the function of outputs that gives the logit of one of the `classes` minus that of another."""
        assert self.classes is not None
        pair = self.classes[:, [first, second]]
        return lambda outputs: _difference(self.find(outputs), pair)


def require_exclusive_classes(model: nn.Module) -> None:
    """Raise if the config of a transformers model says that an example may have several labels, so there is no margin."""
    if getattr(getattr(model, "config", None), "problem_type", None) == "multi_label_classification":
        raise ValueError(
            "the model's problem_type is 'multi_label_classification', so its labels have no margin between them. Give "
            "target= a class, whose logit is then measured"
        )


def settle(target: Target, output: Output, outputs: Any, num_classes: int = 2, valid: Tensor | None = None) -> Number:
    """Decide from the outputs of the model as it is which classes or spans the number is about.

    Args:
        target: As for `uncertainty`, like `output` and `num_classes`.
        output: As there.
        outputs: The outputs.
        num_classes: As there.
        valid: The batch's attention mask, 0 at padding, where a span must not lie.

    Raises:
        ValueError: The target does not fit the outputs; the message says what was found.
    """
    if callable(target):
        return Number(target)
    if isinstance(target, str) and target == "span":
        return _span(outputs, valid)
    find = output or find_logits
    logits = _checked(find(outputs))
    if isinstance(target, str) and target == "value":
        if logits.numel() != logits.shape[0]:
            raise ValueError(f"target='value' needs one output per example, got outputs of shape {tuple(logits.shape)}")
        return Number(lambda result: find(result).flatten(), logits=logits.detach())
    if logits.ndim != 2:
        raise ValueError(
            f"the logits have shape {tuple(logits.shape)} and target={_shown(target)} needs (batch, classes); for tokens, "
            "nodes or pixels give target= a function from the model's outputs to one number per example"
        )
    wide = upcast(logits.detach())
    probabilities, label = torch.softmax(wide, dim=-1), wide.argmax(dim=-1)
    if isinstance(target, str):
        if target != "margin":
            raise ValueError(
                f"target must be 'margin', 'value', 'span', a class, or a function of the outputs, got {target!r}"
            )
        if logits.shape[1] < 2:
            raise ValueError("the logits have one class, so there is no margin. Use target='value' for a regression")
        if num_classes > logits.shape[1]:
            raise ValueError(f"num_classes must be at most {logits.shape[1]}, the classes of the model, got {num_classes}")
        pair = top_two_classes(wide)
        # of equal logits the first class; the rest in any order
        classes = pair
        if num_classes > 2:
            classes = torch.cat([pair, wide.scatter(1, pair, -torch.inf).topk(num_classes - 2).indices], dim=1)
        return Number(
            lambda result: _difference(find(result), pair), True, probabilities, label, classes, find, logits.detach()
        )
    classes = _classes(target, logits)
    return Number(
        lambda result: upcast(find(result)).gather(1, classes[:, None]).squeeze(1),
        False,
        probabilities,
        label,
        logits=logits.detach(),
    )


def _difference(logits: Float[Tensor, "b c"], pair: Int[Tensor, "b 2"]) -> Float[Tensor, " b"]:
    first, second = upcast(logits).gather(1, pair).unbind(dim=1)
    return first - second


def _classes(target: int | Tensor, logits: Float[Tensor, "b c"]) -> Int[Tensor, " b"]:
    b, c = logits.shape
    classes = torch.as_tensor(target, device=logits.device)
    if classes.is_floating_point() or classes.dtype == torch.bool or classes.shape not in ((), (b,)):
        raise ValueError(
            f"target must be a class as an integer, or a tensor of {b} integers for this batch, got {_shown(target)}"
        )
    if bool(((classes < 0) | (classes >= c)).any()):
        raise ValueError(f"target must be a class from 0 to {c - 1}, got {_shown(target)}")
    return classes.long().expand(b)


def _span(outputs: Any, valid: Tensor | None) -> Number:
    """Return the margin between the best span and the next best, with a span's score the sum of its two logits."""
    if not all(isinstance(getattr(outputs, name, None), Tensor) for name in ("start_logits", "end_logits")):
        raise ValueError(
            f"target is 'span', but the model returned {type(outputs).__name__}, which has no start_logits and end_logits"
        )
    if not isinstance(valid, Tensor) or valid.shape != outputs.start_logits.shape:
        # a mask of another kind (packed sequences, entries of single queries) does not say where padding is
        valid = None
    scores = _span_scores(outputs, valid)
    n = outputs.start_logits.shape[1]
    if n < 2:
        raise ValueError("target is 'span', but the sequences have one token; a margin needs two spans")
    _checked(outputs.start_logits)
    pair = top_two_classes(scores)
    label = torch.stack([pair[:, 0] // n, pair[:, 0] % n], dim=-1)
    both = torch.stack([outputs.start_logits, outputs.end_logits]).detach()
    return Number(lambda result: _difference(_span_scores(result, valid), pair), True, None, label, logits=both)


def _span_scores(outputs: Any, valid: Tensor | None) -> Float[Tensor, "b spans"]:
    start, end = upcast(outputs.start_logits), upcast(outputs.end_logits)
    scores = start.unsqueeze(2) + end.unsqueeze(1)
    backwards = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).tril(-1)
    absent = backwards if valid is None else backwards | (valid == 0).unsqueeze(1) | (valid == 0).unsqueeze(2)
    return scores.masked_fill(absent, torch.finfo(scores.dtype).min).flatten(1)


def _checked(logits: Tensor) -> Tensor:
    if logits.ndim == 0 or logits.shape[0] == 0:
        raise ValueError(f"the outputs have shape {tuple(logits.shape)}; the batch needs at least one example")
    return logits


def _shown(target: Any) -> str:
    return f"a tensor of shape {tuple(target.shape)}" if isinstance(target, Tensor) else repr(target)
