"""The tables of the docs name things that exist."""

import importlib
import inspect
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


def _links(column: int) -> list[tuple[str, str]]:
    """Return (text, file of the repository) of every link in a column of the paper map."""
    page = ROOT / "docs" / "concepts" / "paper-map.md"
    rows = [line.split("|") for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    found = [link for row in rows[1:] for link in re.findall(r"\[`([^`]+)`\]\(([^)]+)\)", row[column])]
    return [(text, str((page.parent / path).resolve().relative_to(ROOT))) for text, path in found]


@pytest.mark.parametrize(("name", "path"), _links(3))
def test_every_test_of_the_paper_map_is_in_the_linked_file(name, path):
    assert re.search(rf"^def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize(("name", "path"), _links(2))
def test_every_function_of_the_paper_map_is_in_the_linked_file(name, path):
    dotted = re.sub(r"\(.*\)", "", name)
    # the function behind a decorator
    found = inspect.unwrap(_resolve(dotted if dotted.startswith("bayesattn") else f"bayesattn.{dotted}"))
    assert inspect.getsourcefile(found) == str(ROOT / path)


def test_every_row_of_the_paper_map_links_a_function_and_a_test():
    page = (ROOT / "docs" / "concepts" / "paper-map.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| ")][1:]
    assert all("](" in row[2] and "](" in row[3] for row in rows)
