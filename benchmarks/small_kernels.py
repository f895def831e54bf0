"""The kernels of the prior's gradients and of the KL alone, at MCAN's and BERT's sizes: how their tiles were chosen.

    python benchmarks/small_kernels.py benchmarks/results/h200/small-kernels.csv

Launches as CUDA graphs, so that only the GPU counts; the sum over the programs' partial results is included.
"""

import csv
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import triton.testing

from bayesattn.ops.attention import kl_kernels
from bayesattn.ops.attention.launch import blocks_of, layout, padded
from bayesattn.ops.common.launch import prepared
from bayesattn.ops.prior import kernels
from bayesattn.ops.prior import triton as prior_ops

HEADER = ("kernel", "shape", "block", "warps", "programs or stages", "microseconds")
Row = tuple[str, str, int, int, int, float]


def microseconds(call) -> float:
    """Return the median time of a call."""
    return round(triton.testing.do_bench_cudagraph(call, rep=20, return_mode="median") * 1e3, 2)


def prior_gradients(b: int, h: int, n: int, d: int, hidden: int) -> Iterator[Row]:
    """All gradients of the prior network: keys of a block, warps, programs."""
    key = torch.randn(b, n, h, d, device="cuda").transpose(1, 2).bfloat16()
    weights = [torch.randn(shape, device="cuda") for shape in ((1, d, hidden), (1, 1, hidden), (1, hidden, 1))]
    valid = (torch.rand(b, 1, n, device="cuda") > 0.1).expand(b, h, n)
    log_prior, grad = torch.zeros(b, h, 1, n, device="cuda"), torch.randn(b, h, 1, n, device="cuda")
    grad_key, columns = torch.empty(b, h, n, d, device="cuda", dtype=key.dtype), d * hidden + 2 * hidden + 1
    for block, warps in ((32, 4), (32, 8), (64, 4), (128, 8)):
        for programs in (264, 528, 1056):
            items = b * h * blocks_of(n, block)
            rows = min(items, programs)
            sums = torch.empty(rows, columns, device="cuda")
            launch = prepared(
                kernels.prior_grad_kernel, (rows, 1), *layout(key).strides[:3], valid.stride(0), valid.stride(1),
                grad.stride(0), grad.stride(1), grad.stride(3), h, 1, n, d, hidden, items, columns,
                **prior_ops._shared(d, hidden), BN=block, BLOCK=256, HAS_VALID=True, NEED_KEY=True, num_warps=warps,
            )  # fmt: skip

            def call(launch=launch, sums=sums) -> None:
                launch(key, *weights, valid, log_prior, grad, grad_key, sums)
                sums.sum(dim=0)

            yield "prior's gradients", f"{b}x{h}x{n}x{d}, {hidden} hidden", block, warps, programs, microseconds(call)


def divergences(b: int, h: int, n: int, d: int) -> Iterator[Row]:
    """The Weibull KL of every head: rows of a tile, warps, stages."""
    query, key = (torch.randn(b, n, h, d, device="cuda").transpose(1, 2).bfloat16() for _ in range(2))
    clean, prior = torch.randn(b, h, n, device="cuda"), torch.randn(b, h, 1, n, device="cuda")
    valid = torch.rand(b, n, device="cuda") > 0.1
    kl, stats = torch.empty(b, h, device="cuda"), torch.empty(b, h, kl_kernels.NUM_STATS.value, device="cuda")
    columns, sums = torch.empty(b, h, 1, n, device="cuda"), torch.empty(2, b, h, 1, d, device="cuda")
    for block, stages, warps in ((16, 1, 4), (32, 1, 4), (64, 1, 4), (128, 1, 4), (128, 1, 8), (128, 3, 8), (256, 3, 8)):
        if block > 2 * padded(n):
            continue
        strides = (*layout(query).strides[:3], *layout(key).strides[:3], prior.stride(0), prior.stride(1), n)
        numbers = (1.0 / math.sqrt(d), 0.0, 0.5, 0.1, 1.0, 0.0, 10.0, math.exp(10.0))
        launch = prepared(
            kl_kernels.weibull_kl_kernel, (b * h,), *strides, h, 1, n, n, d, *numbers, HAS_PRIOR=True, HAS_VALID=True,
            RAW=True, PER=0, BLOCK=block, BD=padded(d), STAGES=stages, num_warps=warps,
        )  # fmt: skip

        def call(launch=launch) -> None:
            launch(query, key, clean, prior, valid, kl, stats, columns, *sums)

        yield "Weibull KL", f"{b}x{h}x{n}x{d}", block, warps, stages, microseconds(call)


def main(path: Path) -> None:
    """Measure and write."""
    rows: list[Row] = []
    for sizes in ((64, 8, 100, 64, 20), (64, 8, 14, 64, 20), (16, 12, 512, 64, 5)):
        rows += prior_gradients(*sizes)
    for sizes in ((64, 8, 100, 64), (64, 8, 14, 64), (16, 12, 512, 64), (8, 16, 2048, 64)):
        rows += divergences(*sizes)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([HEADER, *rows])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
