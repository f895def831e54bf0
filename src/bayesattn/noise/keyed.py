"""Noise keyed by example: inside `keyed_noise(seeds)` the draws of an example depend on its seed, not on its batch.

    with keyed_noise(example_seeds(run_seed, step, indices)):
        loss = model(batch)
        loss.backward()

Outside, attention modules draw from torch's generator, and an example's noise depends on its position in the batch and on
the process that computes it. Inside, the seed of a draw is a function of (seed of the example, number of the call, entry).
An example then gets the same noise in any order of the batch and with any number of processes.

All seeds come from the generator of `specification.py`, where the last word of the counter is 2^32 − 1 or 2^32 − 2: no batch
has that many entries. `streams.py` derives the seeds of its rows with the same function.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Int
from torch import Tensor

from bayesattn.noise import specification

_LOW_32 = 0xFFFFFFFF
_FROM_CALL = _LOW_32
_FROM_EXAMPLE = _LOW_32 - 1
# calls whose seeds are computed together, which takes no longer than for one
_CHUNK = 16

_local = threading.local()
# open scopes of all threads: on a GPU, a backward pass recomputes checkpointed calls in an autograd thread
_open: list["_Scope"] = []


def derive_seeds(
    seeds: Int[Tensor, "*#shape"], depth: Int[Tensor, "*#shape"], position: Int[Tensor, "*#shape"]
) -> Int[Tensor, "*shape"]:
    """Return a 63-bit seed for each (seed, depth, position), all broadcast together.

    Example:
        >>> seeds, calls = torch.tensor([7, 8]), torch.tensor([[0], [1], [2]])
        >>> derived = derive_seeds(seeds, calls, torch.zeros_like(calls))
        >>> derived.shape, len(derived.unique())
        (torch.Size([3, 2]), 6)
    """
    return _words(seeds, position, depth, torch.zeros_like(depth), _FROM_CALL)


def example_seeds(seed: int, step: int, examples: Int[Tensor, " b"]) -> Int[Tensor, " b"]:
    """Return a seed for each example of an optimizer step.

    Args:
        seed: Seed of the run.
        step: The optimizer step, below 2^32.
        examples: Indices of the examples in the training set.

    Example:
        >>> seeds = example_seeds(0, step=5, examples=torch.tensor([3, 9]))
        >>> torch.equal(seeds.flip(0), example_seeds(0, step=5, examples=torch.tensor([9, 3])))
        True
    """
    return _words(torch.full_like(examples, seed), examples & _LOW_32, examples >> 32, examples * 0 + step, _FROM_EXAMPLE)


def _words(seeds: Tensor, first: Tensor, second: Tensor, third: Tensor, tag: int) -> Tensor:
    key = seeds & _LOW_32, (seeds >> 32) & _LOW_32
    words = specification.philox((first, second, third, torch.full_like(third, tag)), key)
    return (words[0] << 31) ^ words[1]


@contextmanager
def keyed_noise(seeds: Int[Tensor, " b"]) -> Iterator[None]:
    """Draw the noise of this thread's attention calls per example; keep the scope open during `backward()`.

    A call's batch may be a multiple of the examples (windows of an image, two images per question): consecutive entries then
    belong to one example, each with its own noise. Any other batch size is an error. Activation checkpointing recomputes a
    call with the same noise.

    Args:
        seeds: One per example, in the order of the batch, on any device.

    Example:
        >>> import bayesattn as ba
        >>> layer = ba.nn.MultiheadAttention(8, 2, config=ba.AttentionConfig("BAM-NOKL"), batch_first=True)
        >>> x, seeds = torch.randn(3, 5, 8), example_seeds(0, 0, torch.arange(3))
        >>> with keyed_noise(seeds):
        ...     together, _ = layer(x, x, x)
        >>> with keyed_noise(seeds[1:2]):
        ...     alone, _ = layer(x[1:2], x[1:2], x[1:2])
        >>> torch.allclose(together[1:2], alone, atol=1e-5)
        True
    """
    if getattr(_local, "scope", None) is not None:
        raise RuntimeError("keyed_noise() cannot be nested. Use one scope per batch")
    _local.scope = scope = _Scope(seeds)
    _open.append(scope)
    try:
        yield
    finally:
        _local.scope = None
        _open.remove(scope)


def is_keyed() -> bool:
    """Return whether this thread is inside `keyed_noise`, whose noise a CUDA graph recorded there would repeat.

    Example:
        >>> with keyed_noise(torch.tensor([7])):
        ...     is_keyed()
        True
        >>> is_keyed()
        False
    """
    return getattr(_local, "scope", None) is not None


def is_open() -> bool:
    """Return whether any thread is inside `keyed_noise`.

    Example:
        >>> is_open()
        False
    """
    return bool(_open)


def next_seeds(batch: int, device: torch.device) -> Int[Tensor, " b"] | None:
    """Return the seeds of the next call's batch entries, or None outside `keyed_noise`, where torch's generator draws.

    A call is identified by a number drawn from torch's generator when it begins. Checkpointing restores the generator before
    it recomputes a call, so both runs draw the same number and get the same seeds.

    Example:
        >>> next_seeds(2, torch.device("cpu")) is None
        True
        >>> with keyed_noise(torch.tensor([7, 8])):
        ...     next_seeds(2, torch.device("cpu")).shape
        torch.Size([2])
    """
    if not _open:
        return None
    scope = getattr(_local, "scope", None)
    if scope is not None:
        return scope.seeds_of(int(specification.draw_seed()), batch, device)
    if torch._C._current_graph_task_id() == -1:
        return None
    before = torch.get_rng_state()
    mark = int(specification.draw_seed())
    for scope in _open:
        if mark in scope.numbers:
            return scope.seeds_of(mark, batch, device)
    torch.set_rng_state(before)
    return None


class _Scope:
    """Numbers the calls of a forward pass and derives their seeds."""

    def __init__(self, seeds: Int[Tensor, " b"]) -> None:
        # on the host, where the seeds of many calls are derived at once
        self.seeds = seeds.cpu()
        self.numbers: dict[int, int] = {}
        self._tables: list[Int[Tensor, "calls b"]] = []

    def seeds_of(self, mark: int, batch: int, device: torch.device) -> Int[Tensor, " b"]:
        number = self.numbers.setdefault(mark, len(self.numbers))
        examples = self.seeds.shape[0]
        if examples == 0 or batch % examples:
            raise ValueError(
                f"keyed_noise() with {examples} seeds needs attention calls whose batch is a multiple of {examples}, got a "
                f"batch of {batch}. Train a model of another shape with `noise: generator`, and predict without batch_dims"
            )
        if batch == examples:
            chunk, row = divmod(number, _CHUNK)
            while len(self._tables) <= chunk:
                calls = torch.arange(_CHUNK)[:, None] + _CHUNK * len(self._tables)
                table = derive_seeds(self.seeds[None, :], calls, torch.zeros_like(calls))
                self._tables.append(table.to(device, non_blocking=True))
            return self._tables[chunk][row].to(device)
        entries = torch.arange(batch // examples)[None, :]
        derived = derive_seeds(self.seeds[:, None], torch.full_like(entries, number), entries)
        return derived.flatten().to(device, non_blocking=True)
