"""Every public name is documented, and every one of the rooms below has an example, which `make test-docs` runs."""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import bayesattn as ba
from bayesattn import integrations

ROOMS = ["bayesattn", *(f"bayesattn.{room}" for room in ("nn", "functional", "metrics", "plots", "convert", "doubt"))]
ROOMS += [f"bayesattn.integrations.{found.name}" for found in pkgutil.iter_modules(integrations.__path__)]
# every class and function of these has an example
WITH_EXAMPLES = [
    "bayesattn",
    "bayesattn.convert",
    "bayesattn.distributions",
    "bayesattn.divergences",
    "bayesattn.doubt",
    "bayesattn.functional",
    "bayesattn.integrations.hf",
    "bayesattn.integrations.lightning",
    "bayesattn.integrations.lm_polygraph",
    "bayesattn.integrations.pyg",
    "bayesattn.integrations.sklearn",
    "bayesattn.entropy",
    "bayesattn.kl",
    "bayesattn.metrics",
    "bayesattn.metrics.running",
    "bayesattn.nn",
    "bayesattn.noise",
    "bayesattn.objective",
    "bayesattn.plots",
    "bayesattn.prediction",
    "bayesattn.priors",
]
API = Path(__file__).parents[2] / "docs" / "reference" / "api"


def names(room: str) -> list[str]:
    module = importlib.import_module(room)
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == room and name[0] != "_"]
    return list(getattr(module, "__all__", own))


def documented(room: str) -> list[str]:
    """Return the modules, classes and functions; a type alias or a tuple has no docstring of its own."""
    values = {name: getattr(importlib.import_module(room), name) for name in names(room)}
    return [
        name
        for name, value in values.items()
        if inspect.ismodule(value) or inspect.isclass(value) or inspect.isroutine(value)
    ]


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_name_has_a_docstring_of_its_own(room):
    module = importlib.import_module(room)
    assert documented(room)
    # an inherited docstring, or the signature that a dataclass writes, documents nothing
    bare = [
        n
        for n in documented(room)
        if not (getattr(module, n).__doc__ or "").strip() or f"{n}(" == getattr(module, n).__doc__[: len(n) + 1]
    ]
    assert bare == []


@pytest.mark.parametrize("room", WITH_EXAMPLES)
def test_every_class_and_function_has_an_example(room):
    module = importlib.import_module(room)
    asked = [name for name in documented(room) if not inspect.ismodule(getattr(module, name))]
    assert asked
    # an inherited docstring shows how to use something else
    assert [name for name in asked if ">>> " not in (getattr(module, name).__doc__ or "")] == []


@pytest.mark.parametrize("room", [room for room in ROOMS if room != "bayesattn"])
def test_every_room_is_in_the_reference(room):
    asked = re.findall(r"^\[\[names: ([\w.*]+)", "\n".join(page.read_text() for page in API.glob("*.md")), re.MULTILINE)
    assert room in asked or f"{room.rpartition('.')[0]}.*" in asked


def test_every_name_of_the_package_is_in_the_reference():
    asked = "\n".join(page.read_text() for page in API.glob("*.md"))
    shown = {name for room in ("convert", "doubt") for name in names(f"bayesattn.{room}")}
    shown |= set(re.findall(r"^::: bayesattn\.(\w+)$", asked, re.MULTILINE))
    assert {name for name in documented("bayesattn") if not inspect.ismodule(getattr(ba, name))} <= shown
