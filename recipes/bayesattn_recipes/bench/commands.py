"""The command that times a suite."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bayesattn_recipes.bench import SUITES, run_suite

console = Console()


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(bench)


def bench(
    suite: Annotated[str, typer.Argument(help=f"One of {', '.join(SUITES)}.")],
    out: Annotated[Path, typer.Option(help="The CSV file to write; a plot goes beside it.")],
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Time Bayesian attention against what it replaces."""
    run_suite(suite, device, out)
    console.print(f"results: {out}", soft_wrap=True)
