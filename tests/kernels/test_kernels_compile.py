"""Every kernel compiles to machine code for a Hopper GPU, without one: the interpreter also accepts what does not compile.

A launch is replaced by a compilation for the same argument types; results are garbage and nobody looks at them.
"""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

pytestmark = pytest.mark.kernel

PROGRAM = """
import sys
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.bool: "*i1", torch.int64: "*i64"}
compiled = set()

def compile_instead(self, *args, grid, warmup, **options):
    names = self.arg_names
    settings = {name: options.pop(name) for name in ("num_warps", "num_stages") if name in options}
    values = dict(zip(names, args)) | options
    # Triton takes an absent pointer and an integer of 1 as constants
    signature, constants = {}, {}
    for index, name in enumerate(names):
        value = values[name]
        if isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
        elif name in options or value is None or (type(value) is int and value == 1):
            signature[name], constants[(index,)] = "constexpr", value
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
    kernel = triton.compile(ASTSource(self, signature, constants), target=GPUTarget("cuda", 90, 32), options=settings)
    assert len(kernel.asm["cubin"]) > 0
    compiled.add(self.__name__)

JITFunction.run = compile_instead

import bayesattn as ba
from bayesattn.ops.attention import support, triton as fused
from bayesattn.ops.attention.masking import Allowed
from bayesattn.ops.prior import triton as prior

def attend(variant, dtype, d, *, masked, causal):
    b, h, hk, m, n = 2, 4, 2, 70, 90
    config = ba.AttentionConfig(variant, preset="paper" if d > 64 else "default")
    query, key, value = (torch.randn(b, x, y, d, dtype=dtype, requires_grad=True) for x, y in ((h, m), (hk, n), (hk, n)))
    log_prior = torch.randn(b, h, 1, n).log_softmax(-1).requires_grad_() if config.prior_kind == "contextual" else None
    mask = torch.rand(b, 1, 1, n) > 0.5 if masked else None
    output, kl = fused.attention(
        query, key, value, config=config, log_prior=log_prior, allowed=Allowed(mask, causal, (b, h, m, n)),
        scale=0.125, seed=3, need_kl=config.has_kl,
    )
    (output.float().sum() + (kl.sum() if kl is not None else 0.0)).backward()

# float32 products are not for tensor cores: they unroll, and compile for long
attend("BAM-WC", torch.float32, 16, masked=False, causal=False)
attend("BAM-LC", torch.bfloat16, 128, masked=True, causal=False)
attend("BAM-WF", torch.float16, 128, masked=False, causal=False)
attend("BAM-WC", torch.bfloat16, 64, masked=True, causal=False)
attend("BAM-NOKL", torch.bfloat16, 24, masked=False, causal=True)
keys = torch.randn(2, 3, 50, 64, dtype=torch.bfloat16, requires_grad=True)
network = [torch.randn(1, *shape, requires_grad=True) for shape in ((64, 10), (1, 10), (10, 1), (1, 1))]
prior.log_prior(keys, *network, torch.rand(2, 1, 50) > 0.5).sum().backward()
print(" ".join(sorted(compiled)))
"""

KERNELS = {
    "forward_kernel", "columns_kernel", "prepare_kernel", "grad_query_kernel", "grad_key_kernel",
    "weibull_kl_kernel", "weibull_kl_grad_kernel", "prior_logits_kernel", "prior_softmax_kernel", "prior_grad_kernel",
}  # fmt: skip


def test_every_kernel_compiles_for_sm_90():
    # a process of its own: the interpreter, which the other tests run in, is chosen when triton is imported
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    assert set(result.stdout.split()) == KERNELS
