"""Benchmarks: ratios to the usual alternatives, measured in one run, written as CSV with a plot."""

from importlib import import_module
from pathlib import Path

SUITES = ("attention", "causal", "doubt", "graph", "step", "translation", "vision")


def run_suite(name: str, device: str, out: Path) -> None:
    """Run one suite and write `out` (CSV) and a plot of its ratios beside it.

    While it runs, the rows measured so far are in a file named like `out` but ending in `.partial.csv`, which stays if the
    run fails.
    """
    # imported late: the command line imports this package to find the command
    import torch

    from bayesattn_recipes.bench.harness import keeping_rows, write_csv
    from bayesattn_recipes.bench.plot import plot_ratios
    from bayesattn_recipes.common.figures import write_figure

    if name not in SUITES:
        raise ValueError(f"suite must be one of {', '.join(SUITES)}, got {name!r}")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'cpu' or 'cuda', got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but torch finds no GPU. Use 'cpu'")
    if out.suffix != ".csv":
        raise ValueError(f"out must be a path that ends in .csv, got {str(out)!r}")
    run = import_module(f"bayesattn_recipes.bench.{name}").run
    partial = out.with_suffix(".partial.csv")
    with keeping_rows(partial):
        rows = run(device)
    write_csv(rows, out)
    write_figure(out.with_suffix(".png"), plot_ratios(rows))
    partial.unlink()
