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
        text: Annotated[list[str] | None, typer.Option(help="The text, or the question; may be repeated.")] = None,
        second: Annotated[
            list[str] | None,
            typer.Option(help="The second text of a pair, or the paragraph of a question; one for every --text."),
        ] = None,
        file: Annotated[
            Path | None,
            typer.Option(help="One input a line: JSON objects in a .jsonl file, else text, a tab before a second."),
        ] = None,
        samples: Annotated[
            int | None, typer.Option(min=2, help="Draws per answer; default: as many as `evaluate` took, or 20.")
        ] = None,
        seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
        method: Annotated[str | None, typer.Option(help="How to draw; default: the usual way of the run.")] = None,
    ) -> None:
        """Answer for new texts: label, probability, p-value, and whether to trust it.

        An answer is trusted if its probability reaches a threshold that `bayesattn evaluate` chose on validation data, for
        a stated error rate.

        Without --text and --file, standard input is read as JSON lines with "text" and, for pairs, "second"; each is
        answered before the next is read.
        """
        from bayesattn_recipes import LANGUAGE

        texts, seconds = text or [], second or []
        if texts and file is not None:
            raise ValueError("both --text and --file are given; allowed: one of them, or neither for standard input")
        if seconds and len(seconds) != len(texts):
            given = "without --text" if not texts else f"{len(seconds)} times with {len(texts)} --text"
            raise ValueError(f"--second is given {given}; allowed: one for every --text, or lines with two texts")
        serve = LANGUAGE.load("serve")
        model = serve.load(run, num_samples=samples, seed=seed, method=method)
        if texts:
            for served in model.answer(list(zip(texts, seconds)) if seconds else [(one,) for one in texts]):
                print(_line(served))
            print(model.about_trust)
            return
        if file is None:
            answers = serve.answer_lines(model, serve.read_lines(sys.stdin, is_json=True))
        else:
            # a file that is not there must be an error before the first answer
            lines = serve.read_lines(file.read_text(encoding="utf-8").split("\n"), is_json=file.suffix == ".jsonl")
            answers = serve.answer_file(model, lines)
        for served in answers:
            print(json.dumps(served.to_dict(), ensure_ascii=False), flush=True)
        # not among the answers, which another program reads
        print(model.about_trust, file=sys.stderr)


def _line(served) -> str:
    """Return one answer in words."""
    parts = [served.label or "(no answer)"]
    if served.probability is not None:
        parts.append(f"probability {served.probability:.3f}")
    if served.deviation is not None:
        parts.append(f"± {served.deviation:.3f}")
    if served.p_value is not None:
        parts.append(f"p-value {served.p_value:.2g}")
    if served.trust is not None:
        parts.append("trust" if served.trust else "do not trust")
    if served.truncated:
        parts.append("(text was too long: its end was not read)")
    return "  ".join(parts)
