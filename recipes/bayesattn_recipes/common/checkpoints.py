"""The last two checkpoints of a run: each is checked when read, and refused if it belongs to another run."""

import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from bayesattn.files import RunError, write_json
from bayesattn_recipes.common.folders import CHECKPOINTS_FOLDER, FAILURE_FILE, remove_leftovers, write_log
from bayesattn_recipes.common.state import read_state, write_state

# settings that do not change the computation: when to save, and what to do about a step that fails
FREE_SETTINGS = frozenset(f"config.training.{name}" for name in ("checkpoint_steps", "checkpoint_seconds", "on_nonfinite"))
KEPT = 2


class Checkpoints:
    """The folder `checkpoints` of a run.

    Args:
        run: The run folder.
        identity: What identifies a run (recipe, config, size of the data); plain values, nested dictionaries.
    """

    def __init__(self, run: Path, identity: dict[str, Any]) -> None:
        self.run = run
        self.folder = run / CHECKPOINTS_FOLDER
        self.identity = identity

    def paths(self) -> list[Path]:
        """Return the existing checkpoints, newest first."""
        return sorted(self.folder.glob("step-*.safetensors"), reverse=True)

    def save(self, step: int, flat: tuple[Any, dict[str, Tensor]], rows: list[dict[str, Any]]) -> Path:
        """Write `flatten`'s result for `{"identity": …, "state": …}` and the log so far; remove all but the last two."""
        path = self.folder / f"step-{step:010d}.safetensors"
        write_state(path, flat)
        if rows:
            write_log(self.run, rows)
        for old in self.paths()[KEPT:]:
            old.unlink(missing_ok=True)
        return path

    def write_failure(self, facts: dict[str, Any]) -> Path:
        """Write what is known about a step that went wrong, as JSON."""
        write_json(self.run / FAILURE_FILE, facts)
        return self.run / FAILURE_FILE

    def load(self) -> dict[str, Any] | None:
        """Return the newest state that can be read, or None if there is no checkpoint; warn about damaged ones.

        Raises:
            RunError: The state belongs to another run, or no checkpoint can be read.
        """
        for folder in (self.run, self.folder):
            remove_leftovers(folder)
        paths, reasons = self.paths(), []
        for path in paths:
            try:
                found = read_state(path)
                identity, state = found["identity"], found["state"]
            except (RunError, KeyError, TypeError) as error:
                reasons.append(str(error))
                continue
            check_identity(self.run, identity, self.identity)
            for reason in reasons:
                warnings.warn(f"{reason}; continuing from {path.name} instead", UserWarning, stacklevel=2)
            return state
        if paths:
            raise RunError(f"none of the {len(paths)} checkpoints can be read: {'; '.join(reasons)}")
        return None

    def clear(self) -> None:
        """Remove all checkpoints, and leftovers of a killed writer."""
        remove_leftovers(self.run)
        if self.folder.is_dir():
            remove_leftovers(self.folder)
            for path in self.paths():
                path.unlink()
            if not any(self.folder.iterdir()):
                self.folder.rmdir()


def check_identity(run: Path, found: Any, wanted: dict[str, Any]) -> None:
    """Raise an error that names the differences if the run in the folder is not the one to continue."""
    before, now = dict(leaves(found)), dict(leaves(wanted))
    names = [name for name in {**before, **now} if name not in FREE_SETTINGS]
    changed = [name for name in names if before.get(name) != now.get(name) or (name in before) != (name in now)]
    if changed:
        is_, was = ({name: repr(part[name]) if name in part else "missing" for name in changed} for part in (now, before))
        shown = ", ".join(f"{name} is {is_[name]} and was {was[name]}" for name in changed[:3])
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise RunError(
            f"{run} has another config: {shown}{more}. Use --resume only with the config that the run was started with"
        )


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of everything in nested dictionaries; tuples count as lists, as in JSON."""
    if isinstance(value, dict):
        pairs = ((f"{name}.{key}" if name else str(key), item) for key, item in value.items())
        yield from itertools.chain.from_iterable(leaves(item, inner) for inner, item in pairs)
    else:
        yield name, list(value) if isinstance(value, tuple) else value
