"""How the decoder's loop runs: as it is, compiled, or recorded as a CUDA graph for every shape of batch.

The loop is about forty small kernels per step; on a GPU their launches cost more than their work. All modes compute the same
(`tests/recipes/test_translation_decoder.py`) and differ only in speed:

    decoder_mode: eager        anywhere, no preparation
    decoder_mode: compile      torch.compile of the step, one compilation for all lengths; fuses the elementwise kernels
    decoder_mode: cuda-graph   records forward and backward of the whole loop once for every (batch, target, source) shape
                               and replays them: no launch costs. Set `pad_to: 8` with it, so that there are few shapes;
                               needs an attention whose randomness is drawn beforehand (all but three), or by
                               torch's generator alone, which advances at every replay (hard-gumbel, mc-dropout)
    decoder_mode: auto         cuda-graph if device and attention allow it, else eager: one setting for all variants
"""

import functools
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from bayesattn.entropy import is_observing_entropy
from bayesattn.noise.keyed import is_keyed
from bayesattn_recipes.translation.decoder import Decoder, Unrolled

# these draw inside the loop and keep nothing but weights; Gaussian weights record a KL at every step
DRAWS_ALONE = ("hard-gumbel", "mc-dropout")


def is_recordable(decoder: Decoder) -> bool:
    """Whether a step of the decoder reads and writes only tensors, so that it can be replayed."""
    return decoder.attention.draws_ahead or decoder.config.variant in DRAWS_ALONE


def unroller(decoder: Decoder, mode: str) -> Callable[..., Unrolled]:
    """Return the function that runs `decoder.unroll` in training, in a mode of the config."""
    if mode == "eager" or (mode == "auto" and not is_recordable(decoder)):
        return decoder.unroll
    if not (is_recordable(decoder) if mode != "compile" else decoder.attention.draws_ahead):
        variant = decoder.config.variant
        raise ValueError(f"decoder_mode must be 'eager' with {variant} attention, which draws inside the loop, got {mode!r}")
    if mode == "compile":
        return functools.partial(decoder.unroll, step=torch.compile(decoder.step))
    graphed = GraphedUnroll(decoder)
    if mode == "cuda-graph":
        return graphed
    return lambda gates, *rest: (graphed if gates.is_cuda else decoder.unroll)(gates, *rest)


class Recordings:
    """A module's calls, recorded on the first one with given shapes and replayed on every later one.

    The recordings share the memory of the largest one, so the backward pass of a call has to come before the next call, as
    it does in training. At the first call, no earlier result of the same parameters that was computed without a recording
    may still need its backward pass: CUDA refuses to record across streams.

    Args:
        build: Returns the module for inputs of these names, in this order: positional tensors in, a tuple of tensors out.
            Its parameters may change between calls, but not their addresses.
    """

    def __init__(self, build: Callable[[tuple[str, ...]], nn.Module]) -> None:
        self.build = build
        self._recorded: dict[tuple, Callable[..., tuple[Tensor, ...]]] = {}
        self._pool: tuple[int, int] | None = None

    def __call__(self, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the module's output for these inputs, which are on a GPU."""
        facts = ((name, tuple(x.shape), x.dtype, x.requires_grad) for name, x in inputs.items())
        key = (torch.is_grad_enabled(), *facts)
        if key not in self._recorded:
            self._recorded[key] = self._record(inputs)
        return self._recorded[key](*inputs.values())

    def _record(self, inputs: dict[str, Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        samples = tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in inputs.values())
        module, dtype = self.build(tuple(inputs)), torch.get_autocast_dtype("cuda")
        # a low-precision copy of a weight from outside would be baked into the recording; the module makes its own
        with (
            torch.autocast("cuda", dtype, enabled=torch.is_autocast_enabled("cuda"), cache_enabled=False),
            warnings.catch_warnings(),
        ):
            # the warm-up before a recording runs on its own stream
            warnings.filterwarnings("ignore", "The AccumulateGrad node's stream does not match")
            # a module may hold unused parameters; one warm-up loads every kernel
            options = {"num_warmup_iters": 1, "allow_unused_input": True, "pool": self._pool}
            return torch.cuda.make_graphed_callables(module, samples, **options)  # type: ignore[return-value]  (what went in, graphed)


class _Loop(nn.Module):
    """The loop as a module, as CUDA graphs need it: positional tensors in, a tuple of tensors out."""

    def __init__(self, decoder: Decoder, names: tuple[str, ...]) -> None:
        super().__init__()
        self.decoder, self.names = decoder, names

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        # a low-precision copy of a weight serves all steps; it is part of the recording, so every replay makes it again
        dtype, low = torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda")
        torch.clear_autocast_cache()
        with torch.autocast("cuda", dtype, enabled=low, cache_enabled=True):
            given = dict(zip(self.names, inputs, strict=True))
            found = self.decoder.unroll(**{"bias": None, "noise": None, "drop": None, **given})
        torch.clear_autocast_cache()
        return tuple(value for value in found if value is not None)


class GraphedUnroll:
    """`decoder.unroll`, recorded on the first call with a shape and replayed on every later one.

    Args:
        decoder: Its parameters may change between calls, but not their addresses.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.recordings = Recordings(lambda names: _Loop(decoder, names).train(decoder.training))

    def __call__(
        self,
        gates: Tensor,
        values: Tensor,
        keys: Tensor,
        mask: Tensor,
        bias: Tensor | None,
        noise: Tensor | None,
        drop: Tensor | None,
        steps: Tensor | None = None,
    ) -> Unrolled:
        """Run all steps, and the KL after them; arguments as for `Decoder.unroll`."""
        attention = self.decoder.attention
        if not attention.draws_ahead and (is_keyed() or is_observing_entropy()):
            # at every replay, noise inside the loop would be that of the recorded examples, and observations would be added
            # to memory that is free by then
            return self.decoder.unroll(gates, values, keys, mask, bias, noise, drop, steps)
        if gates.device.type != "cuda":
            raise ValueError(f"decoder_mode must be 'eager' or 'compile' on {gates.device.type}, got 'cuda-graph'")
        named = {"input_gates": gates, "values": values, "keys": keys, "mask": mask, "bias": bias, "noise": noise}
        # recordings with and without the KL differ
        named |= {"drop": drop, "steps": steps if attention.needs_kl else None}
        inputs = {name: value for name, value in named.items() if value is not None}
        unrolled = Unrolled(*self.recordings(inputs))
        if attention.draws_ahead:
            return unrolled
        # a replay runs no module: tell an open scope that there was one, without a KL
        return unrolled._replace(states=attention.weights.record(unrolled.states, None))
