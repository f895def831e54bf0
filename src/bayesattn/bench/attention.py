"""Attention operators: the fused kernels against torch's on the same tensors. `eager.py` has what they replace."""

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bayesattn.bench.harness import HOST_CALLS_A_TURN, HOST_ROUNDS, Row, Suite, recorded
from bayesattn.config import AttentionConfig
from bayesattn.functional import attention

GPU_SHAPES = [(16, 12, 512, 64), (8, 16, 2048, 64), (4, 16, 4096, 64), (4, 16, 4096, 128), (1, 16, 16384, 64)]
CPU_SHAPES = [(8, 8, 256, 32), (2, 4, 1024, 64)]
CONFIG = AttentionConfig("BAM-WC", weibull_k=10.0, gamma_beta=1e-2)
LOGNORMAL = AttentionConfig("BAM-LC")
# At short lengths the host sets the pace. They are timed as a stack, too: autograd wakes its thread once for a model, not
# once for a layer.
SHORT, LAYERS = 512, 12


def check(shape: tuple[int, int, int, int], device: str, dtype: torch.dtype) -> None:
    """Refuse to time anything wrong: fused output, KL and gradients against the reference with the same seed."""
    _, h, n, d = shape
    prior = torch.randn(1, h, 1, min(n, 512), device=device).log_softmax(-1)
    inputs = [torch.randn(1, h, min(n, 512), d, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
    results = []
    for backend in ("auto", "reference"):
        output, kl = attention(*inputs, config=CONFIG, log_prior=prior, seed=7, backend=backend)
        assert kl is not None
        gradients = torch.autograd.grad((output.float() ** 2).sum() + kl.sum(), inputs)
        results.append([x.detach().double() for x in (output, kl, *gradients)])
    for fused, plain in zip(*results, strict=True):
        error = float((fused - plain).norm() / plain.norm())
        if not error < (2e-2 if dtype != torch.float32 else 1e-4):
            raise RuntimeError(f"{shape}: fused and reference differ by {error:.2e}; nothing was timed")


class Calls:
    """One set of tensors, and what can be timed on it.

    With several layers, the output of one is the query of the next; keys, values and priors are each layer's own.
    """

    def __init__(self, shape: tuple[int, int, int, int], device: str, dtype: torch.dtype, layers: int = 1) -> None:
        b, h, n, _ = shape

        def draw() -> Tensor:
            return torch.randn(shape, device=device, dtype=dtype, requires_grad=True)

        self.query, self.pairs = draw(), [(draw(), draw()) for _ in range(layers)]
        self.upstream = torch.randn(shape, device=device, dtype=dtype)
        self.priors = [torch.randn(b, h, 1, n, device=device).log_softmax(-1).requires_grad_() for _ in range(layers)]
        self.weight = torch.full((b,), 1e-3, device=device)

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of the first layer."""
        return self.query, *self.pairs[0]

    def soft(self, backend: SDPBackend | None, dropout: float = 0.0) -> Callable[[], None]:
        """Return forward and backward of torch's attention, by one backend or by its own choice."""

        def call() -> None:
            output = self.query
            for pair in self.pairs:
                output = self._sdpa(output, *pair, backend, dropout)
            self._backward([output], [self.upstream])

        return call

    def bayesian(self, backend: str, function: Callable = attention, config: AttentionConfig = CONFIG) -> Callable[[], None]:
        """Return forward and backward of Bayesian attention with its KL."""

        def call() -> None:
            output, divergences = self.query, []
            for pair, prior in zip(self.pairs, self.priors, strict=True):
                output, kl = function(output, *pair, config=config, log_prior=prior, backend=backend)
                divergences.append(kl)
            total = kl if len(divergences) == 1 else torch.stack(divergences).sum(0)
            self._backward([output, total], [self.upstream, self.weight])

        return call

    def soft_forward(self, backend: SDPBackend | None) -> Callable[[], object]:
        """Return the forward pass of torch's attention alone."""
        return torch.no_grad()(lambda: self._sdpa(*self.inputs, backend, 0.0))

    def bayesian_forward(self, config: AttentionConfig = CONFIG) -> Callable[[], object]:
        """Return one draw of a Monte Carlo prediction: no KL, no gradients."""
        return torch.no_grad()(lambda: attention(*self.inputs, config=config, need_kl=False))

    def _sdpa(self, query: Tensor, key: Tensor, value: Tensor, backend: SDPBackend | None, dropout: float) -> Tensor:
        with nullcontext() if backend is None else sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout)

    def _backward(self, outputs: list[Tensor], gradients: list[Tensor]) -> None:
        torch.autograd.backward(outputs, gradients)
        for tensor in (self.query, *itertools.chain(*self.pairs), *self.priors):
            tensor.grad = None


def run(device: str, shapes: list[tuple[int, int, int, int]] | None = None) -> list[Row]:
    """Time forward + backward with KL, and the forward of Monte Carlo prediction, for every shape and provider."""
    suite = Suite("attention", device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for shape in shapes or (GPU_SHAPES if device == "cuda" else CPU_SHAPES):
        check(shape, device, dtype)
        case, calls = "x".join(map(str, shape)), Calls(shape, device, dtype)
        if device == "cuda":
            is_short = shape[2] <= SHORT
            _run_on_gpu(suite, case, calls, is_short)
            if is_short:
                stack = _trained(Calls(shape, device, dtype, LAYERS))
                turn = HOST_CALLS_A_TURN // LAYERS
                suite.compare(case, f"fwd+bwd, {LAYERS} layers", stack, rounds=HOST_ROUNDS, calls_a_turn=turn)
        else:
            suite.run(case, "sdpa", "fwd+bwd", calls.soft(None))
            suite.run(case, "BAM-WC", "fwd+bwd", calls.bayesian("auto"))
            suite.run(case, "BAM-WC eager", "fwd+bwd", calls.bayesian("reference"))
            suite.run(case, "sdpa", "forward", calls.soft_forward(None))
            suite.run(case, "BAM-WC", "forward", calls.bayesian_forward())
    return suite.rows


def _trained(calls: Calls) -> dict[str, Callable[[], None]]:
    flash = SDPBackend.FLASH_ATTENTION
    return {
        "sdpa flash": calls.soft(flash),
        "sdpa flash dropout": calls.soft(flash, 0.1),
        "BAM-WC": calls.bayesian("auto"),
        "BAM-LC": calls.bayesian("auto", config=LOGNORMAL),
    }


def _run_on_gpu(suite: Suite, case: str, calls: Calls, is_short: bool) -> None:
    measure = partial(suite.run_all, case, in_turns=is_short)
    flash = SDPBackend.FLASH_ATTENTION
    trained = _trained(calls)
    measure("fwd+bwd", {**trained, "sdpa cudnn": calls.soft(SDPBackend.CUDNN_ATTENTION)})
    measure("fwd+bwd, CUDA graph", {provider: recorded(call) for provider, call in trained.items()})
    predicted = {
        "sdpa flash": calls.soft_forward(flash),
        "BAM-WC": calls.bayesian_forward(),
        "BAM-LC": calls.bayesian_forward(LOGNORMAL),
    }
    measure("forward", predicted)
    measure("forward, CUDA graph", {provider: recorded(call) for provider, call in predicted.items()})
