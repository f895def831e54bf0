"""`bayesattn predict`: answers for new texts, with their uncertainty."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def predict(
        run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder of recipe language.")],
        text: Annotated[str | None, typer.Option(help="The text, or the question.")] = None,
        second: Annotated[
            str | None, typer.Option(help="The second text of a pair, or the paragraph of a question.")
        ] = None,
        file: Annotated[
            Path | None,
            typer.Option(help="One input a line: JSON objects in a .jsonl file, else text, a tab before a second."),
        ] = None,
        samples: Annotated[int, typer.Option(min=2, help="Draws per answer.")] = 20,
        threshold: Annotated[float, typer.Option(help="An answer is trusted if its p-value is at most this.")] = 0.05,
        seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
        method: Annotated[str | None, typer.Option(help="How to draw; default: the usual way of the run.")] = None,
    ) -> None:
        """Answer for new texts: label, probability, p-value, and whether to trust it.

        Without --text and --file, standard input is read as JSON lines with "text" and, for pairs, "second"; each is
        answered before the next is read.
        """
        from bayesattn import recipes

        if text is not None and file is not None:
            raise ValueError("both --text and --file are given; allowed: one of them, or neither for standard input")
        if second is not None and text is None:
            raise ValueError("--second is given without --text; allowed: both, or lines with two texts")
        serve = recipes.load("language", "serve")
        model = serve.load(run, num_samples=samples, threshold=threshold, seed=seed, method=method)
        if text is not None:
            print(_line(model(*(part for part in (text, second) if part is not None))))
            return
        if file is None:
            answers = serve.answer_lines(model, serve.read_lines(sys.stdin, is_json=True))
        else:
            # a file that is not there must be an error before the first answer
            lines = serve.read_lines(file.read_text(encoding="utf-8").split("\n"), is_json=file.suffix == ".jsonl")
            answers = serve.answer_file(model, lines)
        for served in answers:
            print(json.dumps(served.to_dict(), ensure_ascii=False), flush=True)


def _line(served) -> str:
    """Return one answer in words."""
    parts = [served.label or "(no answer)"]
    if served.probability is not None:
        parts.append(f"probability {served.probability:.3f}")
    if served.deviation is not None:
        parts.append(f"± {served.deviation:.3f}")
    if served.p_value is not None:
        parts.append(f"p-value {served.p_value:.2g}")
        parts.append("trust" if served.trust else "do not trust")
    if served.truncated:
        parts.append("(text was too long: its end was not read)")
    return "  ".join(parts)
