"""What the fused kernels replace: the same attention in plain torch, compiled, and FlexAttention with noise from a hash."""

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from bayesattn.bench.attention import CONFIG, GPU_SHAPES, Calls, check
from bayesattn.bench.harness import Row, Suite
from bayesattn.functional import attention

# the plain version holds about eight arrays of n × n numbers
LARGEST_BYTES = 100 * 2**30


def run(device: str, shapes: list[tuple[int, int, int, int]] | None = None) -> list[Row]:
    """Time them against SDPA flash and the fused kernels; those that would not fit into memory are left out."""
    if device != "cuda":
        raise ValueError(f"device is {device!r}; allowed for this suite: 'cuda' (on a CPU `attention` has the eager row)")
    suite = Suite("eager", device)
    flash = SDPBackend.FLASH_ATTENTION
    for shape in shapes or GPU_SHAPES:
        check(shape, device, torch.bfloat16)
        case, calls = "x".join(map(str, shape)), Calls(shape, device, torch.bfloat16)
        b, h, n, _ = shape
        if b * h * n * n * 4 * 8 < LARGEST_BYTES:
            suite.run(case, "sdpa flash", "fwd+bwd", calls.soft(flash))
            suite.run(case, "BAM-WC", "fwd+bwd", calls.bayesian("auto"))
            suite.run(case, "BAM-WC eager", "fwd+bwd", calls.bayesian("reference"))
            compiled = torch.compile(attention, fullgraph=True)
            suite.run(case, "BAM-WC compiled eager", "fwd+bwd", calls.bayesian("reference", compiled))
            torch._dynamo.reset()
        suite.run(case, "sdpa flash", "forward", calls.soft_forward(flash))
        suite.run(case, "BAM-WC", "forward", calls.bayesian_forward())
        suite.run(case, "flex, hash noise", "forward", torch.no_grad()(_flex_hash(*calls.inputs)))
    return suite.rows


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
