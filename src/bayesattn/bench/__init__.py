"""Benchmarks: ratios against what a user would pick instead, measured in one run, written as CSV with a plot."""

from importlib import import_module
from pathlib import Path

import torch

SUITES = ("attention", "conversion", "eager", "graph", "model", "seeing", "translation")


def run_suite(name: str, device: str, out: Path) -> None:
    """Run one suite and write `out` (CSV) and a plot of its ratios beside it."""
    from bayesattn.bench.harness import write_csv
    from bayesattn.bench.plot import plot_ratios

    if device not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}; allowed: 'cpu', 'cuda'")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but torch sees no GPU; allowed here: 'cpu'")
    if out.suffix != ".csv":
        raise ValueError(f"out is {str(out)!r}; allowed: a path that ends in .csv")
    rows = import_module(f"bayesattn.bench.{name}").run(device)
    write_csv(rows, out)
    plot_ratios(rows).savefig(out.with_suffix(".png"))
