"""Attention operators: Bayesian attention against SDPA, FlexAttention and eager code on the same tensors."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bayesattn.bench.harness import Row, Suite, recorded
from bayesattn.config import AttentionConfig
from bayesattn.functional import attention

GPU_SHAPES = [(16, 12, 512, 64), (8, 16, 2048, 64), (4, 16, 4096, 64), (4, 16, 4096, 128), (1, 16, 16384, 64)]
CPU_SHAPES = [(8, 8, 256, 32), (2, 4, 1024, 64)]
CONFIG = AttentionConfig("BAM-WC", weibull_k=10.0, gamma_beta=1e-2)
LOGNORMAL = AttentionConfig("BAM-LC")


def check(shape: tuple[int, int, int, int], device: str, dtype: torch.dtype) -> None:
    """Refuse to time anything wrong: fused output, KL and gradients against the reference with the same seed."""
    _, h, n, d = shape
    prior = torch.randn(1, h, 1, min(n, 512), device=device).log_softmax(-1)
    inputs = [torch.randn(1, h, min(n, 512), d, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
    results = []
    for backend in ("auto", "reference"):
        output, kl = attention(*inputs, config=CONFIG, prior=prior, seed=7, backend=backend)
        assert kl is not None
        gradients = torch.autograd.grad((output.float() ** 2).sum() + kl.sum(), inputs)
        results.append([x.detach().double() for x in (output, kl, *gradients)])
    for fused, plain in zip(*results, strict=True):
        error = float((fused - plain).norm() / plain.norm())
        if not error < (2e-2 if dtype != torch.float32 else 1e-4):
            raise RuntimeError(f"{shape}: fused and reference differ by {error:.2e}; nothing was timed")


def run(device: str, shapes: list[tuple[int, int, int, int]] | None = None) -> list[Row]:
    """Time forward + backward with KL, and the forward of Monte Carlo prediction, for every shape and provider."""
    suite = Suite("attention", device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for shape in shapes or (GPU_SHAPES if device == "cuda" else CPU_SHAPES):
        check(shape, device, dtype)
        _run_shape(suite, shape, device, dtype)
    return suite.rows


def _run_shape(suite: Suite, shape: tuple[int, int, int, int], device: str, dtype: torch.dtype) -> None:
    b, h, n, _ = shape
    case = "x".join(map(str, shape))
    query, key, value = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    upstream = torch.randn(shape, device=device, dtype=dtype)
    prior = torch.randn(b, h, 1, n, device=device).log_softmax(-1).requires_grad_()
    weight = torch.full((b,), 1e-3, device=device)

    def backward(outputs: list[Tensor], gradients: list[Tensor]) -> None:
        torch.autograd.backward(outputs, gradients)
        query.grad = key.grad = value.grad = prior.grad = None

    def soft(backend: SDPBackend | None, dropout: float = 0.0):
        def call() -> None:
            if backend is None:
                backward([F.scaled_dot_product_attention(query, key, value, dropout_p=dropout)], [upstream])
                return
            with sdpa_kernel(backend):
                backward([F.scaled_dot_product_attention(query, key, value, dropout_p=dropout)], [upstream])

        return call

    def bayesian(backend: str, function=attention, config: AttentionConfig = CONFIG):
        def call() -> None:
            output, kl = function(query, key, value, config=config, prior=prior, backend=backend)
            backward([output, kl], [upstream, weight])

        return call

    eager_fits = b * h * n * n * 4 * 8 < 100 * 2**30 if device == "cuda" else True
    if device == "cuda":
        suite.run(case, "sdpa flash", "fwd+bwd", soft(SDPBackend.FLASH_ATTENTION))
        suite.run(case, "sdpa flash dropout", "fwd+bwd", soft(SDPBackend.FLASH_ATTENTION, 0.1))
        suite.run(case, "sdpa cudnn", "fwd+bwd", soft(SDPBackend.CUDNN_ATTENTION))
    else:
        suite.run(case, "sdpa", "fwd+bwd", soft(None))
    suite.run(case, "BAM-WC", "fwd+bwd", bayesian("auto"))
    if device == "cuda":
        mode = "fwd+bwd, CUDA graph"
        suite.run(case, "sdpa flash", mode, recorded(soft(SDPBackend.FLASH_ATTENTION)))
        suite.run(case, "sdpa flash dropout", mode, recorded(soft(SDPBackend.FLASH_ATTENTION, 0.1)))
        suite.run(case, "BAM-WC", mode, recorded(bayesian("auto")))
        suite.run(case, "BAM-LC", "fwd+bwd", bayesian("auto", config=LOGNORMAL))
    if eager_fits:
        suite.run(case, "BAM-WC eager", "fwd+bwd", bayesian("reference"))
        if device == "cuda":
            compiled = torch.compile(attention, fullgraph=True)
            suite.run(case, "BAM-WC compiled eager", "fwd+bwd", bayesian("reference", compiled))
            torch._dynamo.reset()
    with torch.no_grad():
        if device == "cuda":
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                suite.run(case, "sdpa flash", "forward", lambda: F.scaled_dot_product_attention(query, key, value))
            suite.run(case, "BAM-LC", "forward", lambda: attention(query, key, value, config=LOGNORMAL, need_kl=False))
            flex = _flex_hash(query, key, value)
            suite.run(case, "flex, hash noise", "forward", flex)
        else:
            suite.run(case, "sdpa", "forward", lambda: F.scaled_dot_product_attention(query, key, value))
        suite.run(case, "BAM-WC", "forward", lambda: attention(query, key, value, config=CONFIG, need_kl=False))


def _flex_hash(query: Tensor, key: Tensor, value: Tensor):
    """FlexAttention with Weibull noise from an integer hash: what one can have without a kernel of one's own; no KL."""
    from torch.nn.attention.flex_attention import flex_attention

    def noisy(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        x = (i * 1973 + j * 9277 + h * 26699 + b * 31847) & 0x7FFFFFFF
        x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0x7FFFFFFF
        x = ((x ^ (x >> 15)) * 0x2C1B3C6D) & 0x7FFFFFFF
        u = ((x >> 8) + 0.5) * 2.0**-23
        return score + torch.log(-torch.log(u)) / CONFIG.weibull_k

    compiled = torch.compile(flex_attention)
    return lambda: compiled(query, key, value, score_mod=noisy)
