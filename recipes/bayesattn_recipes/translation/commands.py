"""`bayesattn translate`: parsing and printing only."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

# from certain to uncertain, chosen by the share of draws that disagree, or else by 1 − probability
COLORS = ("green", "yellow", "dark_orange", "red")


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command()(translate)


def translate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder of the translation recipe.")],
    samples: Annotated[int, typer.Option(min=2, help="Draws behind the uncertainty.")] = 20,
    method: Annotated[str | None, typer.Option(help="What is drawn: mean, attention, dropout or attention+dropout.")] = None,
    beam: Annotated[int, typer.Option(min=1, help="Hypotheses kept by the search.")] = 10,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line, with every number.")] = False,
    plots: Annotated[Path | None, typer.Option(help="Folder for a picture of the attention of every sentence.")] = None,
) -> None:
    """Translate lines of standard input, with a certainty per word."""
    import torch

    from bayesattn_recipes import TRANSLATION
    from bayesattn_recipes.translation.text import decode_lines

    if plots is not None and plots.exists() and not plots.is_dir():
        raise ValueError(f"plots must be a folder, got {str(plots)!r}")
    config, vocabulary, model = TRANSLATION.load("train").load_run(run)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    sentences = decode_lines(sys.stdin.buffer.read(), "input")
    module = TRANSLATION.load("translate")
    found = module.translate(
        model,
        vocabulary,
        sentences,
        max_tokens=config.max_tokens,
        method=method,
        num_samples=samples,
        beam=beam,
        seed=seed,
    )
    console = Console(highlight=False, soft_wrap=True)
    for translation in found:
        if as_json:
            print(json.dumps(translation.to_dict(), ensure_ascii=False))
        else:
            console.print(colored(translation))
    if plots is not None:
        drawn = TRANSLATION.load("figures").write_attention_maps(
            model, vocabulary, found, plots, num_samples=samples, seed=seed
        )
        # on stderr: another program may read the translations from stdout
        Console(stderr=True, soft_wrap=True).print(f"figures: {drawn}", style="dim", markup=False, highlight=False)


def colored(translation) -> Text:
    """Return a translation with a color for the uncertainty of every word, followed by its numbers."""
    text = Text()
    for token in translation.tokens[:-1]:
        doubt = max(token.disagreement, 1.0 - token.probability)
        color = COLORS[min(int(doubt * len(COLORS)), len(COLORS) - 1)]
        text.append(token.piece.replace("▁", " "), style=color)
    text = text[1:] if text.plain.startswith(" ") else text
    numbers = f"score {translation.score:.2f}, entropy {translation.entropy:.2f}"
    if translation.samples:
        numbers += f", disagreement {translation.disagreement:.2f}"
    text.append(f"  [{numbers}]", style="dim")
    return text
