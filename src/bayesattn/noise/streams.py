"""Noise of a growing sequence: the draw of a row depends only on (seed of the sequence, layer, position).

A sequence thus keeps its noise while tokens are appended to it, whether the past is cached or recomputed, and whichever
beams and other sequences share its batch.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from bayesattn.noise.keyed import derive_seeds


class NoiseStream:
    """Derives one seed per query row.

    Args:
        seeds: One seed per sequence.
        layers: The attention modules that use the stream, in the model's order.
    """

    def __init__(self, seeds: Int[Tensor, " s"], layers: Sequence[object]) -> None:
        self.seeds = seeds
        self.offset = 0
        self._index = {id(layer): i for i, layer in enumerate(layers)}
        self._calls: dict[int, int] = {}

    def start_forward(self, offset: int) -> None:
        """Begin a forward pass whose first query is at position `offset` of its sequence."""
        self.offset = offset
        self._calls.clear()

    def dropped_keys(self, num_queries: int, num_keys: int) -> int:
        """Return how many past keys of self-attention a sliding window has dropped."""
        return max(self.offset + num_queries - num_keys, 0)

    def row_seeds(self, layer: object, batch: int, num_queries: int) -> Int[Tensor, " rows"]:
        """Return the seeds of the `batch` × `num_queries` rows of the next call of `layer`.

        If the batch has several entries per sequence (beams), these are consecutive and share their seed.
        """
        if batch % self.seeds.shape[0]:
            raise ValueError(f"the batch must be a multiple of the {self.seeds.shape[0]} noise seeds, got {batch} entries")
        # a module that is called several times in one forward pass (ALBERT) counts as several layers
        call = self._calls.get(id(layer), 0)
        self._calls[id(layer)] = call + 1
        depth = self._index[id(layer)] + call * len(self._index)
        seeds = self.seeds.repeat_interleave(batch // self.seeds.shape[0])[:, None]
        position = torch.arange(self.offset, self.offset + num_queries, device=seeds.device)[None, :]
        return derive_seeds(seeds, torch.full_like(position, depth), position).flatten()
