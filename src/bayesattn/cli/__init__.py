"""The command line: `bayesattn doubt | demo | list | train | evaluate | report | …`. Parsing and printing only.

A user error is one line on stderr and exit code 2; `--debug` shows the traceback instead.
"""

import sys
import warnings
from collections.abc import Sequence
from typing import Any

from bayesattn.cli import registry
from bayesattn.optional import MissingExtra, needs_extra

LINE_LIMIT = 2000
# options whose value may be empty
TEXTS = ("--text", "--second")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"] or ["--help"]
    before, warnings.showwarning = warnings.showwarning, _show_warning
    try:
        _check_empty(arguments)
        with needs_extra("the command line", "cli"):
            from bayesattn.cli.commands import app
        # the first word that is not an option: users know the command they typed, not the package it imports
        command = next((word for word in arguments if not word.startswith("-")), "")
        with needs_extra(f"bayesattn {command}".strip(), "all"):
            code = app(arguments, prog_name="bayesattn", standalone_mode=False)
    except KeyboardInterrupt:
        print("bayesattn: interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if debug:
            raise
        message, code = _explain(error)
        print(f"bayesattn: {message}", file=sys.stderr)
    finally:
        warnings.showwarning = before
    sys.exit(code if isinstance(code, int) else 0)


def _check_empty(arguments: Sequence[str]) -> None:
    """Refuse an empty word, such as a shell variable that is not set: as a path it would mean the current folder."""
    for before, word in zip(["", *arguments], arguments):
        option, equals, value = word.partition("=")
        if (word == "" and before not in TEXTS) or (word.startswith("--") and equals and not value and option not in TEXTS):
            place = f"the value of {option or before}" if (option or before).startswith("--") else "an argument"
            raise ValueError(f"{place} is empty. Leave it out, or give it a value")


def _show_warning(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
    print(f"bayesattn: warning: {' '.join(str(message).split())}", file=sys.stderr)


def _explain(error: Exception) -> tuple[str, int]:
    """Return one line and an exit code: 2 for what the user can fix, 1 for a bug in the program."""
    # typer's usage errors carry their text in a method of this name
    text = error.format_message() if hasattr(error, "format_message") else str(error)  # type: ignore[attr-defined]
    if isinstance(error, OSError) and error.filename and error.strerror:
        text = f"{error.filename}: {error.strerror}"
    context = getattr(error, "ctx", None)
    if context is not None:
        text = f"{text if text.endswith(('.', '?')) else f'{text}.'} Try: {context.command_path} --help"
        if text.startswith("No such command") and not registry.installed():
            text += f". Recipes add commands, and none is installed. Get the paper's with: {registry.INSTALL}"
    # names from files may hold anything: remove control characters and cut long lines
    line = "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))
    line = line if len(line) <= LINE_LIMIT else f"{line[: LINE_LIMIT // 2]} … {line[-LINE_LIMIT // 2 :]}"
    if isinstance(error, ValueError | OSError | MissingExtra) or hasattr(error, "format_message"):
        return line, 2
    return f"internal error: {type(error).__name__}: {line} (run again with --debug for the traceback)", 1
