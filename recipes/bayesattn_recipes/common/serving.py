"""`bayesattn predict`: a run answers for new inputs, if its recipe offers that.

A recipe offers it with a module `serve` whose `load(folder, num_samples=…, seed=…, method=…)` returns a `Server`.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from bayesattn.cli import registry
from bayesattn.evaluation.runs import read_run

PART = "serve"
BATCH_SIZE = 32

# one input and its name in messages, such as "line 3"
Line = tuple[str, tuple[str, ...]]


@runtime_checkable
class Answer(Protocol):
    """One answer; its `str()` is one line for a reader."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        ...


@runtime_checkable
class Server(Protocol):
    """A run that answers for new inputs, each one or two texts."""

    @property
    def note(self) -> str:
        """One line about all answers, such as when to trust them."""
        ...

    def check(self, texts: tuple[str, ...], where: str) -> None:
        """Raise a ValueError that begins with `where` if these texts cannot be answered for."""
        ...

    def answer(self, inputs: Sequence[tuple[str, ...]]) -> Sequence[Answer]:
        """Answer for several inputs at once."""
        ...


def load_server(folder: Path, **options: Any) -> Server:
    """Read a run folder for serving.

    Args:
        folder: The run.
        options: Passed to the recipe: `num_samples`, `seed` and `method`.

    Raises:
        ValueError: The recipe of the run does not answer for new inputs.
    """
    recipe = registry.find(read_run(folder)["recipe"])
    if not recipe.has(PART):
        able = [name for name, other in registry.installed().items() if other.has(PART)]
        raise ValueError(
            f"{folder} is a run of recipe {recipe.name!r}, which has no module {PART!r} and so cannot answer for new "
            f"inputs. Use a run of {' or '.join(map(repr, able))}"
        )
    return recipe.load(PART).load(folder, **options)


def read_lines(lines: Iterable[str], *, is_json: bool) -> Iterator[Line]:
    """Read inputs, one per line: JSON objects with `text` and perhaps `second`, or plain text, a tab before the second.

    Raises:
        ValueError: A line cannot be read; the message has its number.
    """
    for number, line in enumerate(lines, start=1):
        line = line.rstrip("\r\n")
        if not line.strip():
            continue
        yield f"line {number}", _parse_json(line, number) if is_json else tuple(line.split("\t"))


def _parse_json(line: str, number: int) -> tuple[str, ...]:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {number}: not JSON ({error.msg})") from None
    except RecursionError:
        raise ValueError(f"line {number}: nested too deeply") from None
    if not isinstance(entry, dict) or not isinstance(entry.get("text"), str) or set(entry) - {"text", "second"}:
        raise ValueError(f'line {number} is {line!r}. Write {{"text": "…"}} or {{"text": "…", "second": "…"}}')
    return (entry["text"], entry["second"]) if "second" in entry else (entry["text"],)


def answer_lines(server: Server, lines: Iterable[Line]) -> Iterator[Answer]:
    """Answer each line before reading the next: the writer may be waiting for the answer.

    Raises:
        ValueError: As `Server.check`; the message has the line, and the lines before it have been answered.
    """
    for where, texts in lines:
        server.check(texts, where)
        yield from server.answer([texts])


def answer_file(server: Server, lines: Iterable[Line]) -> Iterator[Answer]:
    """Answer for all lines, a batch at a time, in order.

    Raises:
        ValueError: As `Server.check`; the message has the line, and nothing has been answered.
    """
    inputs = []
    for where, texts in lines:
        server.check(texts, where)
        inputs.append(texts)
    for start in range(0, len(inputs), BATCH_SIZE):
        yield from server.answer(inputs[start : start + BATCH_SIZE])
