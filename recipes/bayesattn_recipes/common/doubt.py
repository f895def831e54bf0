"""Doubt in closed form for models of the recipes: noise for soft attention, and the most doubtful predictions."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from jaxtyping import Int
from torch import Tensor, nn

from bayesattn.config import AttentionConfig
from bayesattn.doubt import Uncertainty
from bayesattn.nn import BayesianModule

# a report shows the first of them
MOST_DOUBTFUL = 6

Model = TypeVar("Model", bound=nn.Module)


@contextmanager
def with_noise(model: Model) -> Iterator[Model]:
    """Add noise to a model's soft attention while the scope is open; attention with noise of its own keeps it."""
    parts = [part for part in model.modules() if isinstance(part, BayesianModule) and not part.config.is_stochastic]
    before = [part.config for part in parts]
    try:
        for part in parts:
            part.config = AttentionConfig("BAM-NOKL")
        yield model
    finally:
        for part, config in zip(parts, before, strict=True):
            part.config = config


def most_doubtful(
    ask: Callable[[Sequence[int]], Uncertainty], batches: Iterable[Sequence[int]]
) -> tuple[Int[Tensor, " k"], Uncertainty]:
    """Return the places of the most doubtful examples and their doubt, the most doubtful first.

    Args:
        ask: Measures the doubt of some examples, given their places.
        batches: Places of all examples, batch by batch.
    """
    places, scores = [], []
    for batch in batches:
        places.append(torch.as_tensor(batch))
        scores.append(ask(batch).score.cpu())
    chosen = torch.cat(places)[torch.cat(scores).argsort(descending=True, stable=True)[:MOST_DOUBTFUL]]
    return chosen, ask(chosen.tolist())
