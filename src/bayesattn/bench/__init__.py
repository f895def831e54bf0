"""Benchmarks: ratios against what a user would pick instead, measured in one run, written as CSV with a plot."""

from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

import torch

SUITES = ("attention", "conversion", "eager", "graph", "model")
# where other packages announce a function `run(device)` that returns rows
GROUP = "bayesattn.benchmarks"


def run_suite(name: str, device: str, out: Path) -> None:
    """Run one suite and write `out` (CSV) and a plot of its ratios beside it."""
    from bayesattn.bench.harness import write_csv
    from bayesattn.bench.plot import plot_ratios

    added = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in SUITES and name not in added:
        raise ValueError(f"suite is {name!r}; allowed: {', '.join([*SUITES, *added])}")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}; allowed: 'cpu', 'cuda'")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but torch sees no GPU; allowed here: 'cpu'")
    if out.suffix != ".csv":
        raise ValueError(f"out is {str(out)!r}; allowed: a path that ends in .csv")
    run = added[name].load() if name in added else import_module(f"bayesattn.bench.{name}").run
    rows = run(device)
    write_csv(rows, out)
    plot_ratios(rows).savefig(out.with_suffix(".png"))
