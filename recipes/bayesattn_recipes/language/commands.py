"""`bayesattn predict`: parsing and printing only."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(predict)


def predict(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    text: Annotated[list[str] | None, typer.Option(help="The text, or the question; may be repeated.")] = None,
    second: Annotated[
        list[str] | None,
        typer.Option(help="The second text of a pair, or the paragraph of a question; one for every --text."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(help="One input per line: JSON objects in a .jsonl file, else text, a tab before a second."),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=2, help="Draws per answer; default: as many as `evaluate` used, or 20.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    method: Annotated[str | None, typer.Option(help="How to draw; default: the usual way of the run.")] = None,
) -> None:
    """Answer for new texts, and say whether to trust the answer.

    The recipe of the run has to offer this, such as language. There, an answer is trusted if its probability reaches a
    threshold that `bayesattn evaluate` chose on validation data for a stated error rate.

    Without --text and --file, standard input is read as JSON lines with "text" and, for pairs, "second"; each is
    answered before the next is read.
    """
    from bayesattn_recipes.common.serving import answer_file, answer_lines, load_server, read_lines

    texts, seconds = text or [], second or []
    if texts and file is not None:
        raise ValueError("both --text and --file are given. Use one of them, or neither for standard input")
    if seconds and len(seconds) != len(texts):
        given = "without --text" if not texts else f"{len(seconds)} times with {len(texts)} --text"
        raise ValueError(f"--second is given {given}. Give one for every --text, or lines with two texts")
    server = load_server(run, num_samples=samples, seed=seed, method=method)
    if texts:
        for answer in server.answer(list(zip(texts, seconds)) if seconds else [(one,) for one in texts]):
            print(answer)
        print(server.note)
        return
    if file is None:
        answers = answer_lines(server, read_lines(sys.stdin, is_json=True))
    else:
        # a missing file must be an error before the first answer
        lines = read_lines(file.read_text(encoding="utf-8").split("\n"), is_json=file.suffix == ".jsonl")
        answers = answer_file(server, lines)
    for answer in answers:
        print(json.dumps(answer.to_dict(), ensure_ascii=False), flush=True)
    # on stderr: another program may read the answers from stdout
    print(server.note, file=sys.stderr)
