"""Training steps whose forward and backward pass are recorded as CUDA graphs, one for every shape of batch.

A step of a small model is a thousand kernels that each take less time than their launch; a replay launches them at once.
The likelihood, the KL, the loss and the gradients are recorded. Clipping, the check for finite numbers and the optimizer are
not, because they depend on values.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bayesattn_recipes.baselines import RivalAttention

Outputs = tuple[Tensor, ...]
# forward and backward pass of a batch; the factors of its loss are tensors, since they change from step to step
Run = Callable[[dict[str, Any], Tensor], Outputs]


def is_recordable(model: nn.Module) -> bool:
    """Whether attention keeps nothing but tensors: a rival may store its choices for the loss."""
    return not any(isinstance(module, RivalAttention) for module in model.modules())


class Recording(NamedTuple):
    """One shape's graph, with the tensors it reads and writes."""

    replay: Callable[[], None]
    batch: dict[str, Any]
    factors: Tensor
    outputs: Outputs
    gradients: list[Tensor | None]


class RecordedSteps:
    """Runs training steps: the first of each shape is eager and loads its kernels, the second is recorded and replayed.

    All steps run on a separate stream, even those that are not recorded: autograd accumulates a gradient on the stream that
    used it first, and a recording cannot wait for the default one. The recordings share a memory pool and one set
    of gradients, so outputs have to be read, and gradients used, before the next step.

    Args:
        run: Forward and backward pass; returns tensors without a graph.
        parameters: Parameters whose gradients the step computes.
    """

    def __init__(self, run: Run, parameters: Sequence[nn.Parameter]) -> None:
        self.run, self.parameters = run, list(parameters)
        self._recordings: dict[tuple, Recording | None] = {}
        # by the parameter's position; each recording would otherwise keep its own, as large as the model
        self._gradients: dict[int, Tensor] = {}
        self._stream, self._pool = self._open()

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Run a whole step, its optimizer included, on the separate stream, in order with the work before and after it."""
        before = torch.cuda.current_stream()
        self._stream.wait_stream(before)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            before.wait_stream(self._stream)

    def __call__(self, batch: dict[str, Any], factors: Tensor) -> Outputs:
        """Run a step on a batch; the gradients are new, nothing is added to older ones."""
        key = tuple((name, x.shape, x.dtype) if isinstance(x, Tensor) else (name, x) for name, x in batch.items())
        for parameter in self.parameters:
            parameter.grad = None
        if key not in self._recordings:
            self._recordings[key] = None
            return self.run(batch, factors)
        recording = self._recordings[key]
        if recording is None:
            self._recordings[key] = recording = self._record(batch, factors)
        for name, value in batch.items():
            if isinstance(value, Tensor):
                recording.batch[name].copy_(value)
        recording.factors.copy_(factors)
        recording.replay()
        for parameter, gradient in zip(self.parameters, recording.gradients, strict=True):
            parameter.grad = gradient
        return recording.outputs

    def close(self) -> None:
        """Free the recordings, whose memory cannot be used otherwise."""
        self._recordings.clear()
        self._gradients.clear()
        torch.cuda.empty_cache()

    def _record(self, batch: dict[str, Any], factors: Tensor) -> Recording:
        held = {name: value.clone() if isinstance(value, Tensor) else value for name, value in batch.items()}
        held_factors = factors.clone()
        if not self._gradients:
            self._gradients = {i: torch.empty_like(p) for i, p in enumerate(self.parameters) if p.requires_grad}
        given: list[int] = []

        def call() -> Outputs:
            outputs = self.run(held, held_factors)
            found = {i: p.grad for i, p in enumerate(self.parameters) if p.grad is not None}
            torch._foreach_copy_([self._gradients[i] for i in found], list(found.values()))
            for i in found:
                self.parameters[i].grad = None
            given[:] = found
            return outputs

        replay, outputs = self._capture(call)
        gradients = [self._gradients[i] if i in given else None for i in range(len(self.parameters))]
        return Recording(replay, held, held_factors, outputs, gradients)

    def _open(self) -> tuple[Any, Any]:
        return torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    def _capture(self, call: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            outputs = call()
        return graph.replay, outputs
