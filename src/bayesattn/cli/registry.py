"""Recipes that the command line can run. Each is announced by an entry point in the group `bayesattn.recipes`.

    [project.entry-points."bayesattn.recipes"]
    mine = "my_package:RECIPE"                   # RECIPE = Recipe("mine", "what it does", package="my_package")

A recipe is a package with a module `train` (`load_config`, `train_run`) and a folder `configs` of YAML files. These modules
are optional: `evaluate` (`predict_run`), `reproduce` (a function of the same name that takes a `Request`) and `commands`
(`register`, for its own commands, such as `demo` and `predict` in the paper's recipes). A module is imported when used,
because each recipe has its own dependencies.
"""

import importlib
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

GROUP = "bayesattn.recipes"
INSTALL = "pip install bayesattn-recipes (in a clone: pip install -e ./recipes)"


@dataclass(frozen=True)
class Recipe:
    """What the command line needs to know about a recipe before importing it.

    Attributes:
        name: NAME of `bayesattn train NAME`.
        summary: One line for `bayesattn list`.
        package: Dotted name of the package.
        needs_files: Whether it reads data sets from files.
        generated: The config field and value that select a data set without files, in a recipe that also has others.
    """

    name: str
    summary: str
    package: str
    needs_files: bool = True
    generated: tuple[str, str] | None = None

    @property
    def config_folder(self) -> Path:
        """The folder of its configs."""
        spec = find_spec(self.package)
        if spec is None or spec.origin is None:
            raise ValueError(f"recipe {self.name!r} is announced, but its package {self.package!r} is not installed")
        return Path(spec.origin).parent / "configs"

    @property
    def config_names(self) -> list[str]:
        """The names of its configs."""
        return sorted(path.stem for path in self.config_folder.glob("*.yaml"))

    def load(self, part: str) -> Any:
        """Import one of its modules, such as `train`."""
        module = f"{self.package}.{part}"
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name == module:
                raise ValueError(f"recipe {self.name!r} has no {part!r}") from None
            if error.name and error.name.partition(".")[0] in ("bayesattn", self.package.partition(".")[0]):
                raise
            raise ValueError(
                f"recipe {self.name!r} needs the package {error.name!r}. Install it with: pip install {error.name}, or all "
                "of them with: pip install 'bayesattn-recipes[all]'"
            ) from None

    def has(self, part: str) -> bool:
        """Whether it has a module of this name."""
        return find_spec(f"{self.package}.{part}") is not None

    def reads_files(self, config: dict[str, Any]) -> bool:
        """Whether a run with this config reads files from the folder of the data sets."""
        if not self.needs_files or self.generated is None:
            return self.needs_files
        field, dataset = self.generated
        value: Any = config
        for name in field.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return value != dataset


@dataclass(frozen=True, kw_only=True)
class Request:
    """What `bayesattn reproduce` asks of a recipe; one that cannot do a part of it raises a ValueError.

    Attributes:
        names: Data sets or tasks; None takes the recipe's own choice.
        variants: Rows of the table; None takes all.
        num_seeds: Runs per row, with seeds 0, 1, …
        data: Folder of the data sets.
        out: Folder of the runs and the tables; finished runs in it are not repeated.
        console: Where to print.
        settings: `name=value` on top of every config.
        jobs: Runs at the same time, each in a process of its own.
        minutes: No run begins later; the tables cover the finished runs, and the same request continues. 0 trains nothing.
        begun: When the minutes began, in seconds of `time.monotonic`.
    """

    names: Sequence[str] | None = None
    variants: Sequence[str] | None = None
    num_seeds: int = 5
    data: Path | None = None
    out: Path
    console: "Console"
    settings: Sequence[str] = ()
    jobs: int = 1
    minutes: float | None = None
    begun: float = field(default_factory=time.monotonic)

    @property
    def deadline(self) -> float:
        """When the last run may begin, in seconds of `time.monotonic`."""
        return float("inf") if self.minutes is None else self.begun + 60.0 * self.minutes


def installed() -> dict[str, Recipe]:
    """Return the recipes of all installed packages, by name; one that cannot be imported is left out with a warning."""
    found = {}
    for entry in entry_points(group=GROUP):
        try:
            found[entry.name] = _load(entry)
        except ValueError as error:
            warnings.warn(f"{error}; it is left out", stacklevel=2)
    return found


def find(name: str) -> Recipe:
    """Return the recipe of this name.

    Raises:
        ValueError: No such recipe is installed, or it cannot be imported.
    """
    entries = {entry.name: entry for entry in entry_points(group=GROUP)}
    if not entries:
        raise ValueError(f"recipe {name!r} is not installed, nor is any other. Get the paper's with: {INSTALL}")
    if name not in entries:
        raise ValueError(f"recipe must be one of {', '.join(map(repr, entries))}, got {name!r}")
    return _load(entries[name])


def _load(entry: EntryPoint) -> Recipe:
    # an import runs the code of another package, which may fail in any way
    try:
        return entry.load()
    except Exception as error:
        raise ValueError(f"recipe {entry.name!r} cannot be imported from {entry.value!r}: {error}") from error
