"""Measure how spread out attention is: the training loop warns if attention collapses onto one key."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesattn.kl import in_backward

_local = threading.local()


@dataclass
class EntropyScope:
    """Sum of the normalized entropy of attention over examples, and their number; an example counts once per call.

    Example:
        >>> import bayesattn as ba
        >>> layer = ba.nn.MultiheadAttention(8, 2, config=ba.AttentionConfig("BAM-WC"), batch_first=True)
        >>> x = torch.randn(3, 5, 8)
        >>> with observe_entropy() as seen:
        ...     output, _ = layer(x, x, x)
        >>> seen.count, bool(0 < seen.total / seen.count <= 1)
        (3, True)
    """

    total: Tensor | float = 0.0
    count: int = 0


@contextmanager
def observe_entropy() -> Iterator[EntropyScope]:
    """Open a scope that measures how spread out the mean attention weights of each call in this thread are.

    The measure is the entropy of softmax(Φ) per row, divided by the logarithm of the row's number of allowed keys: 1 is
    uniform, 0 is one key. Rows with one key or none are left out. It takes a pass over the scores, so do not use it at every
    step.

    Example:
        >>> with observe_entropy() as seen:
        ...     note_entropy(torch.full((1, 1, 2, 4), 0.25), None)  # uniform over four keys
        >>> float(seen.total / seen.count)
        1.0
    """
    before, _local.scope = getattr(_local, "scope", None), EntropyScope()
    try:
        yield _local.scope
    finally:
        _local.scope = before


def is_observing_entropy() -> bool:
    """Return whether an open `observe_entropy()` scope needs the scores of a call.

    Example:
        >>> with observe_entropy():
        ...     is_observing_entropy()
        True
        >>> is_observing_entropy()
        False
    """
    return getattr(_local, "scope", None) is not None and not in_backward()


def note_entropy(weights: Tensor, mask: Tensor | None) -> None:
    """Add one call to the open `observe_entropy()` scope.

    Args:
        weights: Mean weights, `b h m n`.
        mask: True where a query may attend, broadcastable to the weights.

    Example:
        >>> with observe_entropy() as seen:
        ...     note_entropy(torch.tensor([[[[1.0, 0.0], [0.5, 0.5]]]]), None)  # one key, and uniform
        >>> float(seen.total), seen.count
        (0.5, 1)
    """
    weights = weights.detach()
    keys = weights.new_full((), weights.shape[-1]) if mask is None else mask.expand_as(weights).sum(dim=-1)
    note_row_entropy(torch.special.entr(weights).sum(dim=-1), keys.expand(weights.shape[:-1]))


def note_row_entropy(entropy: Tensor, keys: Tensor) -> None:
    """Add one call to the open `observe_entropy()` scope.

    Args:
        entropy: Entropy of the mean weights of each query, `b h m`.
        keys: Number of keys that each query may attend to, `b h m`.

    Example:
        >>> with observe_entropy() as seen:
        ...     note_row_entropy(torch.tensor([[[0.6931, 0.0]]]), torch.tensor([[[4, 1]]]))  # one key: left out
        >>> round(float(seen.total), 3), seen.count
        (0.5, 1)
    """
    scope: EntropyScope = _local.scope
    has_choice = keys > 1
    share = entropy / torch.log(keys.clamp(min=2).to(entropy.dtype))
    rows = has_choice.sum(dim=(1, 2)).clamp(min=1)
    scope.total = scope.total + ((share * has_choice).sum(dim=(1, 2)) / rows).sum()
    scope.count += entropy.shape[0]
