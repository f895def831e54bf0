"""Noise keyed by example: inside `keyed_noise(seeds)` the draws of an example depend on its seed and on nothing around it.

    with keyed_noise(example_seeds(run_seed, step, indices)):
        loss = model(batch)
        loss.backward()

Without it a call of an attention module draws from torch's generator, and what an example gets depends on where it stands
in the batch and on the process that computes it. With it, the seed of a draw is a function of (seed of the example, number
of the call, entry): one process, four processes and any order of a batch give every example the same noise.

Everything derives from the generator of `specification.py`, with the last word of its counter all ones, or one less: no
batch of attention calls has so many entries. Generation (`streams.py`) derives the seeds of its rows by the same function.
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
# calls whose seeds are computed together; a call alone would cost as much
_CHUNK = 16

_local = threading.local()
# scopes of all threads: on a GPU, a backward pass recomputes checkpointed calls in a thread of autograd's
_open: list["_Scope"] = []


def derive_seeds(
    seeds: Int[Tensor, "*#shape"], depth: Int[Tensor, "*#shape"], position: Int[Tensor, "*#shape"]
) -> Int[Tensor, "*shape"]:
    """Return a 63-bit seed for each (seed, depth, position), all broadcast together."""
    return _words(seeds, position, depth, torch.zeros_like(depth), _FROM_CALL)


def example_seeds(seed: int, step: int, examples: Int[Tensor, " b"]) -> Int[Tensor, " b"]:
    """Return a seed for each example of an optimiser step.

    Args:
        seed: Of the run.
        step: Below 2^32.
        examples: Indices of the examples in the training set.
    """
    return _words(torch.full_like(examples, seed), examples & _LOW_32, examples >> 32, examples * 0 + step, _FROM_EXAMPLE)


def _words(seeds: Tensor, first: Tensor, second: Tensor, third: Tensor, tag: int) -> Tensor:
    key = seeds & _LOW_32, (seeds >> 32) & _LOW_32
    words = specification.philox((first, second, third, torch.full_like(third, tag)), key)
    return (words[0] << 31) ^ words[1]


@contextmanager
def keyed_noise(seeds: Int[Tensor, " b"]) -> Iterator[None]:
    """Give every attention call of this thread noise that belongs to the examples; keep it open during `backward()`.

    A call whose batch is a multiple of the examples (windows of an image, two images of a question) counts the consecutive
    entries of an example; one whose batch is anything else raises. Activation checkpointing gets the same noise again.

    Args:
        seeds: One per example of the batch, in its order, on any device.
    """
    if getattr(_local, "scope", None) is not None:
        raise RuntimeError("keyed_noise() inside keyed_noise(): allowed is one scope for a batch")
    _local.scope = scope = _Scope(seeds)
    _open.append(scope)
    try:
        yield
    finally:
        _local.scope = None
        _open.remove(scope)


def is_keyed() -> bool:
    """Return whether the draws of this thread belong to examples: what is recorded now would repeat theirs."""
    return getattr(_local, "scope", None) is not None


def next_seeds(batch: int, device: torch.device) -> Int[Tensor, " b"] | None:
    """Return the seeds of the next call's batch entries, or None where no scope is open: then torch's generator draws.

    A call is known by what torch's generator draws at its beginning. Checkpointing puts the generator back before it runs
    a call again, so the second run finds the number that the first one was given.
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
    """Counts the calls of a forward pass and hands out their seeds."""

    def __init__(self, seeds: Int[Tensor, " b"]) -> None:
        # the seeds of the calls are derived on the host, many at once
        self.seeds = seeds.cpu()
        self.numbers: dict[int, int] = {}
        self._tables: list[Int[Tensor, "calls b"]] = []

    def seeds_of(self, mark: int, batch: int, device: torch.device) -> Int[Tensor, " b"]:
        number = self.numbers.setdefault(mark, len(self.numbers))
        examples = self.seeds.shape[0]
        if examples == 0 or batch % examples:
            raise ValueError(
                f"an attention call has a batch of {batch}; allowed inside keyed_noise() with {examples} seeds: a multiple "
                "of that (train a model of another shape with `noise: generator`, predict without batch_dims)"
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
