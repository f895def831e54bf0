"""`bayesattn caption`: describe a picture with a captioning run."""

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

console = Console()


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(caption)


def caption(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder of the captioning recipe.")],
    image: Annotated[str, typer.Argument(help="A picture file, or the name of an image of the data set.")],
    out: Annotated[Path, typer.Option(help="The overlay to write: attention over the picture, word by word.")] = Path(
        "caption.png"
    ),
    features: Annotated[Path | None, typer.Option(help="A file of `bayesattn features` with the picture in it.")] = None,
    samples: Annotated[int, typer.Option(min=2, help="Draws behind the probabilities.")] = 20,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    data: Annotated[
        Path | None, typer.Option(envvar="BAYESATTN_DATA", help="Folder of the data sets, for runs on photos.")
    ] = None,
) -> None:
    """Describe a picture and draw where the model looked.

    Every word comes with its probability, entropy and p-value.
    """
    from bayesattn_recipes import CAPTIONING
    from bayesattn_recipes.common.figures import write_figure

    explain = CAPTIONING.load("explain")
    subject, found = explain.caption_image(run, image, data, features, num_samples=samples, seed=seed)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("word")
    for heading in ("probability", "entropy", "p-value"):
        table.add_column(heading, justify="right")
    for index, word in enumerate(found.words):
        p_value = "–" if found.p_value is None else f"{float(found.p_value[index]):.2g}"
        table.add_row(Text(word), f"{float(found.probability[index]):.3f}", f"{float(found.entropy[index]):.3f}", p_value)
    console.print(found.sentence, style="bold", highlight=False, markup=False)
    console.print(table)
    drawn = f"{samples} draws of {found.drawn}" if found.drawn else "nothing to draw: posterior mean only"
    console.print(f"{drawn}; p-value: paired t-test of the two most probable words", highlight=False)
    if subject.grid is None and subject.boxes is None:
        console.print("no overlay: the features have no places of their regions", soft_wrap=True)
        return
    write_figure(out, explain.plot_explanation(subject, found))
    console.print(f"overlay: {out}", soft_wrap=True)
