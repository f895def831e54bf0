"""mkdocs hook: `[[names: PACKAGE]]` on a page stands for the documentation of every public name of the package.

`[[names: PACKAGE.*]]` stands for all packages and modules directly inside it, each with a heading and its docstring's first
line; `[[names: PACKAGE except A, B]]` leaves names out, which another page shows.
"""

import importlib
import inspect
import pkgutil
import re

LINE = re.compile(r"^\[\[names: ([\w.]+?)(\.\*)?(?: except (.+?))?\]\]$", re.MULTILINE)


def public_names(package: str) -> list[str]:
    """Return the public classes, functions and values of a package, not its subpackages."""
    module = importlib.import_module(package)
    listed = getattr(module, "__all__", None) or [
        name for name, value in vars(module).items() if getattr(value, "__module__", "") == package and name[0] != "_"
    ]
    return [name for name in listed if not inspect.ismodule(getattr(module, name))]


def inside(package: str) -> list[str]:
    """Return the modules directly inside a package."""
    return [f"{package}.{found.name}" for found in pkgutil.iter_modules(importlib.import_module(package).__path__)]


def path(package: str, name: str, value: object) -> str:
    """Return where a name is defined: `bayesattn.doubt.uncertainty` alone is a module, too."""
    if (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__.startswith("bayesattn."):
        return f"{value.__module__}.{value.__qualname__}"
    return f"{package}.{name}"


def blocks(package: str, left_out: list[str], level: int) -> str:
    """Return one mkdocstrings block per name: functions, then classes, then values."""
    module = importlib.import_module(package)
    values = {name: getattr(module, name) for name in public_names(package) if name not in left_out}
    names = sorted(values, key=lambda name: (not inspect.isfunction(values[name]), not inspect.isclass(values[name])))
    return "\n\n".join(f"::: {path(package, n, values[n])}\n    options:\n      heading_level: {level}" for n in names)


def on_page_markdown(markdown, page, config, files):
    """Write the blocks in place of the lines that ask for them."""

    def write(match):
        left_out = (match[3] or "").split(", ")
        if not match[2]:
            return blocks(match[1], left_out, 2)
        rooms = [package for package in inside(match[1]) if public_names(package)]
        first_line = {room: inspect.getdoc(importlib.import_module(room)).partition("\n")[0] for room in rooms}
        return "\n\n".join(f"## {room}\n\n{first_line[room]}\n\n{blocks(room, left_out, 3)}" for room in rooms)

    return LINE.sub(write, markdown)
