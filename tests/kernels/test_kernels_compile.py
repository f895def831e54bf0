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
    dtype: torch.dtype,
    variant: str,
    *,
    masked: bool,
    is_causal: bool,
    in_one_pass: bool,
    dropout: float = 0.0,
    window: int | None = None,
    features: int = 64,
) -> None:
    """Run forward and backward of one setting."""
    import bayesattn as ba
    from bayesattn.ops.attention import triton as fused
    from bayesattn.ops.attention import weibull
    from bayesattn.ops.attention.masking import Allowed

    fused.one_pass = weibull.one_pass = lambda head_dim: in_one_pass
    query, key, value = (torch.zeros(1, heads, 128, features, dtype=dtype, requires_grad=True) for heads in (4, 2, 2))
    mask = torch.ones(1, 1, 1, 128, dtype=torch.bool) if masked else None
    output, kl = fused.attention(
        query, key, value, config=ba.AttentionConfig(variant), log_prior=torch.zeros(1, 1, 1, 128, requires_grad=True),
        scale=0.125, seed=1, dropout_p=dropout, need_kl=True,
        allowed=Allowed(mask, is_causal, (1, 4, 128, 128), window),
    )  # fmt: skip
    assert kl is not None
    (output.sum() + kl.sum()).backward()


def prior(dtype: torch.dtype) -> None:
    """Run forward and backward of the contextual prior."""
    from bayesattn.ops.prior.triton import log_prior

    key = torch.zeros(1, 2, 128, 64, dtype=dtype, requires_grad=True)
    network = [torch.zeros(1, *shape, requires_grad=True) for shape in ((64, 10), (1, 10), (10, 1), (1, 1))]
    log_prior(key, *network, torch.ones(1, 1, 128, dtype=torch.bool)).sum().backward()


def statistics(dtype: torch.dtype, head_dim: int, *, is_causal: bool, **options: torch.Tensor | float | None) -> None:
    """Run the statistics of one setting."""
    from bayesattn.ops.attention.statistics_triton import launch_statistics

    query, key = (torch.zeros(1, heads, 128, head_dim, dtype=dtype) for heads in (4, 2))
    mask, bias, softcap, positions = (options.get(name) for name in ("mask", "bias", "softcap", "positions"))
    launch_statistics(query, key, mask, bias, is_causal, 0.125, softcap, positions)


def graph(dtype: torch.dtype, variant: str, preset: str = "default", *, longest: int = 512) -> None:
    """Run forward and backward of a graph layer, which also runs the contextual prior of many keys."""
    import bayesattn as ba
    from bayesattn import priors
    from bayesattn.integrations.pyg import BayesianGATConv
    from bayesattn.ops.prior import launch as prior_ops
    from bayesattn.ops.segment import launch, support

    # the kernels are only compiled, so tensors may be on a CPU
    support.INTERPRETED = priors.INTERPRETED = True
    launch.LONGEST_RUN, prior_ops.MANY_KEYS = longest, 100
    layer = BayesianGATConv(16, 8, heads=8, config=ba.AttentionConfig(variant, preset=preset), backend="triton").to(dtype)
    with ba.record_kl() as kl:
        output = layer(torch.zeros(128, 16, dtype=dtype), torch.tensor([[0], [1]]))
    torch.autograd.backward([output, kl.total()], [torch.ones_like(output), torch.ones(())])


def doubt(dtype: torch.dtype, width: int, **options: object) -> None:
    """Run the squared score gradients."""
    from bayesattn.ops.attention.score_gradients_triton import squared_score_gradients

    shapes = ((4, 128), (4, 128), (2, 96), (2, 96), (4, 128))
    tensors = [torch.zeros(1, heads, length, width, dtype=dtype) for heads, length in shapes]
    defaults = {"mask": None, "bias": None, "is_causal": False, "scale": 0.125, "softcap": None}
    squared_score_gradients(*tensors, **{**defaults, **options})


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

# the order of the backward pass is autograd's: the KL's node is the later one
LOGNORMAL = [
    *("forward_kernel", "moments_kernel", "moments_kernel"),
    *("moments_gradient_kernel", "moments_gradient_kernel", "prepare_kernel", "grad_key_kernel"),
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
        ["forward_kernel", "weibull_kl_kernel", "weibull_prepare_kernel", "grad_key_kernel"],
    ),
    "window and padding, wide heads": (
        lambda: attend(torch.bfloat16, "BAM-WC", masked=True, is_causal=True, in_one_pass=False, window=70, features=128),
        ["forward_kernel", "weibull_kl_kernel", "weibull_prepare_kernel", "grad_key_kernel", "grad_query_kernel"],
    ),
    "lognormal": (
        lambda: attend(torch.float16, "BAM-LC", masked=True, is_causal=True, in_one_pass=False),
        ["forward_kernel", "prepare_kernel", "grad_key_kernel", "grad_query_kernel"],
    ),
    "lognormal, where all queries have the same keys": (
        lambda: attend(torch.bfloat16, "BAM-LC", masked=True, is_causal=False, in_one_pass=True),
        LOGNORMAL,
    ),
    "lognormal, where all queries have the same keys, wide heads, float32": (
        lambda: attend(torch.float32, "BAM-LF", masked=False, is_causal=False, in_one_pass=False, features=128),
        [*LOGNORMAL, "grad_query_kernel"],
    ),
    "statistics": (
        lambda: statistics(torch.bfloat16, 64, is_causal=False),
        ["statistics_kernel"],
    ),
    "statistics, everything": (
        lambda: statistics(
            torch.float16,
            128,
            is_causal=True,
            mask=torch.ones(1, 1, 128, 128, dtype=torch.bool),
            bias=torch.zeros(1, 4, 128, 128, dtype=torch.float16),
            softcap=30.0,
            positions=torch.ones(1, 128, dtype=torch.bool),
        ),
        ["statistics_kernel"],
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
    "doubt": (lambda: doubt(torch.bfloat16, 64), ["score_rows_kernel", "score_columns_kernel"]),
    "doubt with the log-sum-exp": (
        lambda: doubt(torch.bfloat16, 64, log_sum_exp=torch.zeros(1, 4, 128)),
        ["score_columns_kernel"],
    ),
    "doubt, all options": (
        lambda: doubt(
            torch.float16,
            128,
            mask=torch.ones(1, 1, 128, 96, dtype=torch.bool),
            bias=torch.zeros(1, 4, 1, 96),
            is_causal=True,
            softcap=50.0,
        ),
        ["score_rows_kernel", "score_columns_kernel"],
    ),
    "doubt, float32": (
        lambda: doubt(torch.float32, 128, mask=torch.ones(1, 1, 1, 96, dtype=torch.bool)),
        ["score_rows_kernel", "score_columns_kernel"],
    ),
    "prior": (lambda: prior(torch.bfloat16), ["prior_logits_kernel", "prior_softmax_kernel", "prior_grad_kernel"]),
}


# cases that share a process, since importing and starting takes as long as compiling a small kernel
GROUPS = {
    "attention": [case for case in CASES if not case.startswith(("graph", "doubt", "statistics", "prior", "window"))],
    "wide heads": [case for case in CASES if case.startswith("window")],
    "graph": [case for case in CASES if case.startswith(("graph", "prior"))],
    "doubt and statistics": [case for case in CASES if case.startswith(("doubt", "statistics"))],
}


def test_every_case_is_in_one_group():
    assert sorted(case for group in GROUPS.values() for case in group) == sorted(CASES)


# the widest tiles take ptxas half a minute
@pytest.mark.parametrize("group", [pytest.param(g, marks=pytest.mark.slow) if g == "wide heads" else g for g in GROUPS])
def test_every_kernel_compiles_for_sm_90(group, tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, __file__, group],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, f"{result.stdout[-500:]}\n{result.stderr[-3000:]}"
    _, *printed = result.stdout.split("case: ")
    compiled = {case: [line.split() for line in lines] for case, *lines in (text.splitlines() for text in printed)}
    assert {case: [name for name, _ in kernels] for case, kernels in compiled.items()} == {
        case: CASES[case][1] for case in GROUPS[group]
    }
    assert all(int(size) > 1000 for kernels in compiled.values() for _, size in kernels)


if __name__ == "__main__":
    from triton.runtime.jit import JITFunction

    JITFunction.run = compile_instead
    for case in GROUPS[sys.argv[1]]:
        print(f"case: {case}", flush=True)
        CASES[case][0]()
