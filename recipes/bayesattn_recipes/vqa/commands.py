"""Commands about pictures: answer a question about one, compute features of your own."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

console = Console()

DataOption = Annotated[
    Path | None, typer.Option(envvar="BAYESATTN_DATA", help="Folder of the data sets, where the image is one of theirs.")
]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command()(ask)
    app.command()(features)


def ask(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder of recipe vqa.")],
    image: Annotated[Path, typer.Argument(help="A picture file, or the name of an image of the data set.")],
    question: Annotated[str, typer.Argument(help="A question about it.")],
    out: Annotated[Path | None, typer.Option(help="The overlay to write; default: IMAGE-attention.png here.")] = None,
    features: Annotated[Path | None, typer.Option(help="A file of `bayesattn features` with the image in it.")] = None,
    data: DataOption = None,
    samples: Annotated[int, typer.Option(min=2, help="Draws of the attention.")] = 20,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
) -> None:
    """Answer a question about a picture and draw where it looked."""
    from bayesattn_recipes import VQA

    answer = VQA.load("ask").ask(run, image, question, features=features, data=data, num_samples=samples, seed=seed)
    certainty = "no draws" if answer.p_value is None else f"p-value {answer.p_value:.2g} against {answer.second}"
    line = f"{answer.text}  probability {answer.probability:.3f}  {certainty}"
    console.print(escape(line), highlight=False, soft_wrap=True)
    if answer.unknown:
        console.print(escape(f"unknown words: {', '.join(answer.unknown)}"), highlight=False, soft_wrap=True)
    if answer.grid is None and answer.boxes is None:
        console.print("no overlay: the features have no places of their regions", soft_wrap=True)
        return
    path = Path(f"{image.stem}-attention.png") if out is None else out
    answer.draw(path, f"{question} {line}")
    console.print(f"overlay: {escape(str(path))}", highlight=False, soft_wrap=True)


def features(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of pictures, or an uncompressed tar file.")],
    out: Annotated[Path, typer.Option(help="The feature file to write.")],
    backbone: Annotated[str, typer.Option(help="A timm model whose last feature map is taken.")] = "resnet50",
    weights: Annotated[
        Path | None, typer.Option(help="Its weights as a safetensors file; default: those that timm finds.")
    ] = None,
    project: Annotated[
        Path | None, typer.Option(help="A …_meta.npz with the principal components of the features a run was trained on.")
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(help="HEIGHTxWIDTH that pictures are squashed to; default: what --project was made for, or 224x224."),
    ] = None,
    skip_broken: Annotated[bool, typer.Option("--skip-broken", help="Leave out pictures that cannot be read.")] = False,
) -> None:
    """Compute features of your own pictures, for ask and caption."""
    from bayesattn_recipes.vision.extract import extract_folder

    count, skipped = extract_folder(
        folder,
        out,
        backbone=backbone,
        weights=weights,
        project=project,
        size=None if size is None else _read_size(size),
        skip_broken=skip_broken,
    )
    for name, reason in skipped.items():
        console.print(escape(f"left out {name}: {reason}"), highlight=False, soft_wrap=True)
    console.print(
        f"features of {count} images, {len(skipped)} left out: {escape(str(out))}", highlight=False, soft_wrap=True
    )


def _read_size(text: str) -> tuple[int, int]:
    height, _, width = text.partition("x")
    if not (height.isdigit() and width.isdigit()):
        raise ValueError(f"size must be HEIGHTxWIDTH in pixels, as in 224x288, got {text!r}")
    return int(height), int(width)
