"""Benchmarks: ratios to the usual alternatives, measured in one run, written as CSV with a plot."""

from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

import torch

SUITES = ("attention", "causal", "doubt", "graph", "step")
# entry points by which other packages add a suite: a function `run(device)` that returns rows
GROUP = "bayesattn.benchmarks"


def run_suite(name: str, device: str, out: Path) -> None:
    """Run one suite and write `out` (CSV) and a plot of its ratios beside it.

    While it runs, the rows measured so far are in `out` with the ending `.partial.csv`, which stays if the run fails.
    """
    from bayesattn.bench.harness import keeping_rows, write_csv
    from bayesattn.bench.plot import plot_ratios

    added = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in SUITES and name not in added:
        raise ValueError(f"suite must be one of {', '.join([*SUITES, *added])}, got {name!r}")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'cpu' or 'cuda', got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but torch finds no GPU. Use 'cpu'")
    if out.suffix != ".csv":
        raise ValueError(f"out must be a path that ends in .csv, got {str(out)!r}")
    run = added[name].load() if name in added else import_module(f"bayesattn.bench.{name}").run
    partial = out.with_suffix(".partial.csv")
    with keeping_rows(partial):
        rows = run(device)
    write_csv(rows, out)
    plot_ratios(rows).savefig(out.with_suffix(".png"))
    partial.unlink()
