"""Attention on edges by the kernels against the reference in float64."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bayesattn.ops.common.launch import LAUNCHES


def check_edges(results: Callable[[list[Tensor], str], list[Tensor]], tensors: list[Tensor], kernels: Sequence[str]) -> None:
    """Compare what a function makes of tensors with either backend; each of these kernels has to run once."""
    before = LAUNCHES.copy()
    ours = results(tensors, "triton")
    found = LAUNCHES - before
    assert {name: found[name] for name in kernels} == dict.fromkeys(kernels, 1)
    truth = results([x.double() for x in tensors], "reference")
    for x, y in zip(ours, truth, strict=True):
        # float32 against float64: sums of some hundred terms of the size of the largest
        torch.testing.assert_close(x, y, rtol=0.0, atol=3e-5 * float(y.abs().max().clamp(min=1.0)))
