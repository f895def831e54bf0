"""The tables of the docs name things that exist."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _cells(page: str, column: int) -> list[str]:
    rows = [line.split("|") for line in (ROOT / "docs" / page).read_text().splitlines() if line.startswith("| ")]
    return [name for row in rows[1:] for name in re.findall(r"`([^`]+)`", row[column])]


def _resolve(dotted: str) -> object:
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            value = getattr(value, part)
        return value
    raise ModuleNotFoundError(dotted)


@pytest.mark.parametrize("name", _cells("concepts/notation.md", 4))
def test_every_place_of_the_notation_table_exists(name):
    _resolve(name)


@pytest.mark.parametrize("name", [n for n in _cells("concepts/notation.md", 3) if n not in ("log_s", "prior_weights")])
def test_every_name_of_the_notation_table_is_used_in_the_code(name):
    sources = "".join(path.read_text() for folder in ("src", "recipes") for path in (ROOT / folder).rglob("*.py"))
    assert re.search(rf"\b{name}\b", sources)


@pytest.mark.parametrize("path", [p for p in _cells("concepts/paper-map.md", 3) if p.startswith("tests/")])
def test_every_test_of_the_paper_map_exists(path):
    assert (ROOT / path).exists()


@pytest.mark.parametrize("name", _cells("concepts/paper-map.md", 2))
def test_every_function_of_the_paper_map_exists(name):
    dotted = re.sub(r"\(.*\)", "", name)
    if dotted != "eval":
        _resolve(dotted if dotted.startswith("bayesattn") else f"bayesattn.{dotted}")
