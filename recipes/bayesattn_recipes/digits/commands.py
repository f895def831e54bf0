"""`bayesattn demo`: the demo of this recipe and of the graph recipe, and one report page of both."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bayesattn.cli import registry

console = Console()


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(demo)


def demo(
    out: Annotated[Path, typer.Option(help="Folder for runs, figures and report.")] = Path("runs/demo"),
    seeds: Annotated[int, typer.Option(min=1, help="Runs per variant.")] = 3,
    samples: Annotated[int, typer.Option(min=2, help="Draws per prediction.")] = 20,
    epochs: Annotated[int | None, typer.Option(min=1, help="Override the number of epochs.")] = None,
) -> None:
    """Train small models, find their errors, write a report page.

    It begins with ordinary soft attention and finds its errors by closed form, by draws and by confidence. Then it trains
    soft and Bayesian attention side by side. The data are embedded.
    """
    # before the imports, which take seconds
    console.print("Small models are trained on embedded data; this takes one to two minutes.", highlight=False)
    start = time.perf_counter()
    from bayesattn_recipes.common import parallel

    parallel.warm_up(
        [f"bayesattn_recipes.{recipe}.{part}" for recipe in ("digits", "graph") for part in ("demo", "evaluate")]
    )
    parts = [(registry.find(recipe), folder) for recipe, folder in (("digits", out), ("graph", out / "graph"))]
    folders = [
        run
        for recipe, folder in parts
        for run in recipe.load("demo").run_demo(folder, num_seeds=seeds, num_samples=samples, epochs=epochs, console=console)
    ]
    from bayesattn.evaluation.report import write_report
    from bayesattn.evaluation.runs import REPORT_FILE

    with console.status("drawing figures and report"):
        page = write_report(folders, out / REPORT_FILE, figures=out / "figures", title="Demo")
    took = time.perf_counter() - start
    console.print(f"figures: {out / 'figures'}\nreport:  {page}\ntook {took:.0f} s", soft_wrap=True, highlight=False)
