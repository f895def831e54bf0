"""Attention operators without a mask: the fused kernels against torch's on the same tensors, and what they replace."""

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bayesattn.config import AttentionConfig
from bayesattn.functional import attention
from bayesattn.functional.parts import Allowed, row_statistics
from bayesattn_recipes.bench.harness import HOST_CALLS_A_TURN, HOST_ROUNDS, Row, Suite, recorded

Shape = tuple[int, int, int, int]
GPU_SHAPES = [(16, 12, 512, 64), (8, 16, 2048, 64), (4, 16, 4096, 64), (4, 16, 4096, 128), (1, 16, 16384, 64)]
CPU_SHAPES = [(8, 8, 256, 32), (2, 4, 1024, 64)]
CONFIG = AttentionConfig("BAM-WC", weibull_k=10.0, gamma_beta=1e-2)
LOGNORMAL = AttentionConfig("BAM-LC")
# At short lengths the host is the bottleneck. They are also timed as a stack: autograd starts its thread once per model, not
# once per layer.
SHORT, LAYERS = 512, 12
# lengths at which plain torch, which writes about eight arrays of n × n numbers, is timed as well
REPLACED = (8, 16, 2048, 64)


@dataclass(frozen=True)
class Layout:
    """Which entries exist, and how many heads the keys have.

    Attributes:
        key_heads: Heads of keys and values; None means the number of query heads.
        is_causal: Whether query i attends to keys up to i only.
        window: Keys per query, ending with the query's own; None means all.
        padding: Keys missing at the end of every second example.
    """

    key_heads: int | None = None
    is_causal: bool = False
    window: int | None = None
    padding: int = 0

    def mask(self, b: int, n: int, device: str) -> Tensor | None:
        """Return the part of the mask beyond `is_causal` and `window`: padding; True where a query may attend."""
        if not self.padding:
            return None
        exists = torch.ones(b, 1, 1, n, dtype=torch.bool, device=device)
        exists[::2, ..., n - self.padding :] = False
        return exists


def check(
    shape: Shape, device: str, dtype: torch.dtype, config: AttentionConfig = CONFIG, layout: Layout | None = None
) -> None:
    """Raise if fused output, KL or gradients differ from the reference with the same seed: nothing wrong is timed."""
    _, h, n, d = shape
    calls = Calls((2, h, min(n, 512), d), device, dtype, layout=layout)
    results = []
    for backend in ("auto", "reference"):
        options = {"config": config, "log_prior": calls.priors[0] if config.has_kl else None, "seed": 7, "backend": backend}
        output, kl = attention(*calls.inputs, **options, **calls.options)
        assert kl is not None
        leaves = [*calls.inputs, *(calls.priors if config.has_kl else ())]
        gradients = torch.autograd.grad((output.float() ** 2).sum() + kl.sum(), leaves)
        results.append([x.detach().double() for x in (output, *((kl,) if config.has_kl else ()), *gradients)])
    for fused, plain in zip(*results, strict=True):
        error = float((fused - plain).norm() / plain.norm())
        if not error < (3e-2 if dtype != torch.float32 else 1e-4):
            raise RuntimeError(f"{shape}, {config.variant}: fused and reference differ by {error:.2e}; nothing was timed")


class Calls:
    """One set of tensors, and the calls that can be timed on it.

    With several layers, the output of one is the query of the next; each layer has its own keys, values and prior.
    """

    def __init__(self, shape: Shape, device: str, dtype: torch.dtype, layers: int = 1, layout: Layout | None = None) -> None:
        b, h, n, d = shape
        layout = layout or Layout()
        key_heads = layout.key_heads or h

        def draw(heads: int) -> Tensor:
            return torch.randn(b, heads, n, d, device=device, dtype=dtype, requires_grad=True)

        self.query, self.pairs = draw(h), [(draw(key_heads), draw(key_heads)) for _ in range(layers)]
        self.upstream = torch.randn(shape, device=device, dtype=dtype)
        priors = (torch.randn(b, key_heads, 1, n, device=device) for _ in range(layers))
        self.priors = [prior.log_softmax(-1).requires_grad_() for prior in priors]
        self.weight = torch.full((b,), 1e-3, device=device)
        self.options = {"mask": layout.mask(b, n, device), "is_causal": layout.is_causal, "window": layout.window}
        # torch's attention takes a mask or the flag
        allowed = Allowed(self.options["mask"], layout.is_causal, (b, h, n, n), layout.window)
        self._dense = allowed.dense(torch.device(device))
        self._is_grouped = key_heads != h

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of the first layer."""
        return self.query, *self.pairs[0]

    def soft(self, backend: SDPBackend | None, dropout: float = 0.0, *, masked: bool = False) -> Callable[[], None]:
        """Return forward and backward of torch's attention, with one backend or the one torch chooses."""

        def call() -> None:
            output = self.query
            for pair in self.pairs:
                output = self._sdpa(output, *pair, backend, dropout, masked)
            self._backward([output], [self.upstream])

        return call

    def bayesian(self, backend: str, function: Callable = attention, config: AttentionConfig = CONFIG) -> Callable[[], None]:
        """Return forward and backward of Bayesian attention, with its KL if the config has one."""
        has_kl = config.has_kl

        def call() -> None:
            output, divergences = self.query, []
            for pair, prior in zip(self.pairs, self.priors, strict=True):
                options = {"log_prior": prior if has_kl else None, "need_kl": has_kl, "backend": backend, **self.options}
                output, kl = function(output, *pair, config=config, **options)
                divergences.append(kl)
            if not has_kl:
                self._backward([output], [self.upstream])
                return
            total = kl if len(divergences) == 1 else torch.stack(divergences).sum(0)
            self._backward([output, total], [self.upstream, self.weight])

        return call

    def soft_forward(self, backend: SDPBackend | None) -> Callable[[], object]:
        """Return the forward pass of torch's attention alone."""
        return torch.no_grad()(lambda: self._sdpa(*self.inputs, backend, 0.0, False))

    def bayesian_forward(self, config: AttentionConfig = CONFIG) -> Callable[[], object]:
        """Return one draw of a Monte Carlo prediction: no KL, no gradients."""
        return torch.no_grad()(lambda: attention(*self.inputs, config=config, need_kl=False, **self.options))

    def observation(self) -> Callable[[], object]:
        """Return the statistics that `observe(model)` adds to a forward pass."""
        query, key, _ = self.inputs
        # `observe` takes a window only as a mask, as models give it
        has_window = self.options["window"] is not None
        options = {"mask": self._dense if has_window else self.options["mask"], "is_causal": self.options["is_causal"]}
        return lambda: row_statistics(query, key, scale=query.shape[-1] ** -0.5, **options)

    def _sdpa(
        self, query: Tensor, key: Tensor, value: Tensor, backend: SDPBackend | None, dropout: float, masked: bool
    ) -> Tensor:
        mask, is_causal = (self._dense, False) if masked else (None, self.options["is_causal"])
        with nullcontext() if backend is None else sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value, mask, dropout, is_causal, enable_gqa=self._is_grouped)

    def _backward(self, outputs: list[Tensor], gradients: list[Tensor]) -> None:
        torch.autograd.backward(outputs, gradients)
        for tensor in (self.query, *itertools.chain(*self.pairs), *self.priors):
            tensor.grad = None


def run(device: str, shapes: list[Shape] | None = None) -> list[Row]:
    """Time forward + backward with KL, and the forward pass of Monte Carlo prediction, for every shape and provider."""
    suite = Suite("attention", device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for shape in shapes or (GPU_SHAPES if device == "cuda" else CPU_SHAPES):
        check(shape, device, dtype)
        case, calls = "x".join(map(str, shape)), Calls(shape, device, dtype)
        if device == "cuda":
            is_short = shape[2] <= SHORT
            _run_on_gpu(suite, case, calls, is_short)
            if shape == REPLACED:
                _run_replaced(suite, case, calls)
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
        "observe": calls.observation(),
    }
    measure("forward", predicted)
    measure("forward, CUDA graph", {provider: recorded(call) for provider, call in predicted.items()})


def _run_replaced(suite: Suite, case: str, calls: Calls) -> None:
    """Time the same attention in plain torch and compiled, the alternatives without the kernels."""
    calls_in_torch = {
        "sdpa flash": calls.soft(SDPBackend.FLASH_ATTENTION),
        "BAM-WC": calls.bayesian("auto"),
        "BAM-WC eager": calls.bayesian("reference"),
        "BAM-WC eager, compiled": calls.bayesian("reference", torch.compile(attention, fullgraph=True)),
    }
    suite.run_all(case, "fwd+bwd, plain torch", calls_in_torch, in_turns=False)
    torch._dynamo.reset()
