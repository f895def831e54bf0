"""Cells of an experiment: a cell holds the measures of one run in a file, so an interrupted experiment goes on later.

Finished ones are read; missing ones are run while there is time.
"""

import json
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from bayesattn.cli.registry import Request
from bayesattn.files import RunError, write_json
from bayesattn_recipes.common.parallel import Outcome, run_all, warm_up
from bayesattn_recipes.common.progress import show_runs

CELLS_FOLDER, FAILURES_FOLDER = "cells", "failures"
Key = TypeVar("Key", bound=Hashable)


def cell_path(out: Path, name: str) -> Path:
    """Return where the measures of a run are kept."""
    return out / CELLS_FOLDER / f"{name}.json"


def write_cell(path: Path, identity: dict[str, Any], measures: dict[str, Any]) -> None:
    """Write one finished run of an experiment; the file appears whole or not at all."""
    write_json(path, {"identity": identity, "measures": measures})


def read_cell(path: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """Return the measures of a finished run, or None if it has not been run.

    Raises:
        RunError: The file is broken, or belongs to a run with other settings: the two must not be mixed in a table.
    """
    if not path.exists():
        return None
    try:
        cell = json.loads(path.read_text(encoding="utf-8"))
        found, measures = cell["identity"], cell["measures"]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise RunError(f"{path} is not a finished run of an experiment: {error}. Remove it to run it again") from None
    expected = json.loads(json.dumps(identity))
    if found != expected:
        changed = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
        raise RunError(f"{path} was run with other settings ({', '.join(changed)}). Choose another folder or remove it")
    return measures


def run_cells(
    request: Request,
    wanted: Mapping[str, Key],
    identity: Callable[[Key], dict[str, Any]],
    run: Callable[..., Any],
    arguments: Callable[[list[Key]], Iterable[tuple[Any, ...]]],
    *,
    path: Callable[[Path, str], Path] = cell_path,
    read: Callable[[Path, dict[str, Any]], Any] = read_cell,
    write: Callable[[Path, dict[str, Any], Any], Any] = write_cell,
    module: str | None = None,
    is_strict: bool = False,
    has_steps: bool = False,
) -> tuple[dict[Key, Any], Outcome]:
    """Return the cells that are finished, in their order, and what became of those that were not.

    Args:
        request: Says where cells go, how many run at the same time, and until when. Tracebacks are in its folder `failures`.
        wanted: What identifies each cell, by its name.
        identity: Returns what the measures of a cell depend on.
        run: Returns the measures of a cell; with several processes, it and `write` are functions of a module.
        arguments: Returns the arguments of `run` for every missing cell; not called if there is none.
        path: Returns the file of a name in a folder.
        read: Reads a file; None if there is none.
        write: Writes it.
        module: What new processes import early; None takes that of `run`.
        is_strict: Whether an error ends the work of a single process.
        has_steps: Whether `run` takes `on_progress`, and tells it the steps done and the steps in all.

    Raises:
        RunError: A finished cell has other settings.
    """

    def finished(names: Iterable[str]) -> dict[Key, Any]:
        cells = {wanted[name]: read(path(request.out, name), identity(wanted[name])) for name in names}
        return {key: cell for key, cell in cells.items() if cell is not None}

    found = finished(wanted)
    missing = {name: key for name, key in wanted.items() if key not in found}
    if not missing:
        return found, Outcome()
    if request.jobs > 1:
        warm_up([module or run.__module__])
    work = {
        name: (write, path(request.out, name), identity(key), run, *given)
        for (name, key), given in zip(missing.items(), arguments([*missing.values()]), strict=True)
    }
    with show_runs(request.console, len(wanted), len(found)) as display:

        def run_here(*given: Any) -> None:
            _run_and_write(*given, on_progress=display.step)

        outcome = run_all(
            run_here if has_steps and request.jobs == 1 else _run_and_write,
            work,
            num_processes=request.jobs,
            deadline=request.deadline,
            is_strict=is_strict and request.jobs == 1,
            on_begin=display.begin,
            on_end=display.end,
        )
    outcome.write_failures(request.out / FAILURES_FOLDER)
    found |= finished(outcome.done)
    return {key: found[key] for key in wanted.values() if key in found}, outcome


def _run_and_write(
    write: Callable[..., Any], path: Path, identity: dict[str, Any], run: Callable[..., Any], *given: Any, **options: Any
) -> None:
    write(path, identity, run(*given, **options))


def check_complete(outcome: Outcome, request: Request, what: str) -> None:
    """Say that time was up if cells were left out, and raise a RunError that begins with `what` if some failed."""
    if outcome.failures:
        raise RunError(f"{what}: {outcome.reasons()} (tracebacks in {request.out / FAILURES_FOLDER})")
    if outcome.left:
        request.console.print(f"{outcome.reasons()}: the time is up. Run the same command to continue")
