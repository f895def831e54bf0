"""Every kernel compiles for a Hopper GPU, down to machine code, on a machine that has none: ptxas comes with triton.

The interpreter, in which the other tests run without a GPU, accepts what the compiler does not. The two exclude each other
in one process, so this file is also the script of a second one: it calls the operators with launches that compile instead
of running, with exactly the arguments that a GPU would get.
"""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

pytestmark = pytest.mark.kernel

POINTERS = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32"}
POINTERS |= {torch.int64: "i64", torch.bool: "i1"}


def compile_instead(kernel, *args: object, grid: tuple[int, ...], warmup: bool, **named: object) -> None:
    """Compile what a launch with these arguments would run, and print its name and the size of its code."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options = {key: named.pop(key) for key in ("num_warps", "num_stages") if key in named}
    values = {**dict(zip(kernel.arg_names, args, strict=False)), **named}
    signature, aligned = {}, {}
    for i, (parameter, value) in enumerate((p, values[p.name]) for p in kernel.params):
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
        elif isinstance(value, torch.Tensor):
            signature[parameter.name], aligned[(i,)] = f"*{POINTERS[value.dtype]}", [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
    constexprs = {key: values[key] for key, kind in signature.items() if kind == "constexpr"}
    source = ASTSource(kernel, signature, constexprs, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    print(kernel.fn.__name__, len(compiled.asm["cubin"]))


def attend(
    dtype: torch.dtype, variant: str, *, masked: bool, is_causal: bool, in_one_pass: bool, dropout: float = 0.0
) -> None:
    """Run forward and backward of one setting."""
    import bayesattn as ba
    from bayesattn.ops.attention import triton as fused
    from bayesattn.ops.attention import weibull
    from bayesattn.ops.attention.masking import Allowed

    fused.one_pass = weibull.one_pass = lambda head_dim: in_one_pass
    query, key, value = (torch.zeros(1, heads, 128, 64, dtype=dtype, requires_grad=True) for heads in (4, 2, 2))
    mask = torch.ones(1, 1, 1 + 127 * is_causal, 128, dtype=torch.bool) if masked else None
    output, kl = fused.attention(
        query, key, value, config=ba.AttentionConfig(variant), log_prior=torch.zeros(1, 1, 1, 128, requires_grad=True),
        scale=0.125, seed=1, dropout_p=dropout, allowed=Allowed(mask, is_causal, (1, 4, 128, 128)), need_kl=True,
    )  # fmt: skip
    assert kl is not None
    (output.sum() + kl.sum()).backward()


def prior(dtype: torch.dtype) -> None:
    """Run forward and backward of the contextual prior."""
    from bayesattn.ops.prior.triton import log_prior

    key = torch.zeros(1, 2, 128, 64, dtype=dtype, requires_grad=True)
    network = [torch.zeros(1, *shape, requires_grad=True) for shape in ((64, 10), (1, 10), (10, 1), (1, 1))]
    log_prior(key, *network, torch.ones(1, 1, 128, dtype=torch.bool)).sum().backward()


def graph(dtype: torch.dtype, variant: str, preset: str = "default", *, longest: int = 512) -> None:
    """Run forward and backward of a graph layer, which also runs the contextual prior of many keys."""
    import bayesattn as ba
    from bayesattn import priors
    from bayesattn.integrations.pyg import BayesianGATConv
    from bayesattn.ops.prior import triton as prior_ops
    from bayesattn.ops.segment import launch, support

    # the kernels are only compiled, so tensors may be on a CPU
    support.INTERPRETED = priors.INTERPRETED = True
    launch.LONGEST_RUN, prior_ops.MANY_KEYS = longest, 100
    layer = BayesianGATConv(16, 8, heads=8, config=ba.AttentionConfig(variant, preset=preset), backend="triton").to(dtype)
    with ba.record_kl() as kl:
        output = layer(torch.zeros(128, 16, dtype=dtype), torch.tensor([[0], [1]]))
    torch.autograd.backward([output, kl.total()], [torch.ones_like(output), torch.ones(())])


# a graph layer with the Weibull family and a contextual prior, in the order of the launches
CONTEXTUAL_GRAPH = [
    "node_scores_kernel",
    "prior_logits_kernel",
    "prior_softmax_kernel",
    "edge_alpha_kernel",
    "edge_forward_kernel",
    "edge_kl_kernel",
    "edge_prepare_kernel",
    "edge_backward_kernel",
    "edge_pair_grad_kernel",
    "prior_grad_kernel",
    "node_grad_kernel",
]

CASES = {
    "one node": (
        lambda: attend(torch.bfloat16, "BAM-WC", masked=True, is_causal=False, in_one_pass=True),
        ["forward_kernel", "weibull_kl_kernel", "weibull_prepare_kernel", "grad_key_kernel"],
    ),
    "one node, two passes, dropout": (
        lambda: attend(torch.float16, "BAM-WC", masked=False, is_causal=False, in_one_pass=False, dropout=0.1),
        ["forward_kernel", "weibull_kl_kernel", "weibull_prepare_kernel", "grad_key_kernel", "grad_query_kernel"],
    ),
    "causal": (
        lambda: attend(torch.bfloat16, "BAM-WC", masked=False, is_causal=True, in_one_pass=True),
        ["forward_kernel", "columns_kernel", "prepare_kernel", "grad_key_kernel"],
    ),
    "lognormal": (
        lambda: attend(torch.float16, "BAM-LC", masked=True, is_causal=True, in_one_pass=False),
        ["forward_kernel", "prepare_kernel", "grad_key_kernel", "grad_query_kernel"],
    ),
    "graph": (
        lambda: graph(torch.float32, "BAM-WC"),
        CONTEXTUAL_GRAPH,
    ),
    "graph, sum over raw scores, split rows": (
        lambda: graph(torch.bfloat16, "BAM-WC", "paper", longest=1),
        CONTEXTUAL_GRAPH,
    ),
    "graph, fixed prior": (
        lambda: graph(torch.float16, "BAM-WF", "official-code"),
        [
            "node_scores_kernel",
            "edge_forward_kernel",
            "edge_kl_kernel",
            "edge_prepare_kernel",
            "edge_backward_kernel",
            "edge_pair_grad_kernel",
            "node_grad_kernel",
        ],
    ),
    "graph, lognormal": (
        lambda: graph(torch.float32, "BAM-LC"),
        [
            "prior_logits_kernel",
            "prior_softmax_kernel",
            "node_scores_kernel",
            "edge_forward_kernel",
            "edge_prepare_kernel",
            "edge_backward_kernel",
            "edge_pair_grad_kernel",
            "node_grad_kernel",
            "prior_grad_kernel",
        ],
    ),
    "prior": (lambda: prior(torch.bfloat16), ["prior_logits_kernel", "prior_softmax_kernel", "prior_grad_kernel"]),
}


@pytest.mark.parametrize("case", CASES)
def test_every_kernel_compiles_for_sm_90(case, tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, __file__, case],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    sizes = dict(line.split() for line in result.stdout.splitlines())
    assert list(sizes) == CASES[case][1]
    assert all(int(size) > 1000 for size in sizes.values())


if __name__ == "__main__":
    from triton.runtime.jit import JITFunction

    JITFunction.run = compile_instead
    CASES[sys.argv[1]][0]()
