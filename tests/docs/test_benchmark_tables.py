"""benchmarks/README.md says what the CSV files say, and stays short."""

import importlib.util
import re
from pathlib import Path

import pytest

from bayesattn_recipes.bench import SUITES
from bayesattn_recipes.bench.harness import read_csv

FOLDER = Path(__file__).parents[2] / "benchmarks"
README = (FOLDER / "README.md").read_text(encoding="utf-8")
SPEC = importlib.util.spec_from_file_location("benchmark_tables", FOLDER / "tables.py")
assert SPEC is not None
assert SPEC.loader is not None
tables = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(tables)


def test_tables_are_those_of_the_files():
    assert tables.pages(README) == README


def test_a_changed_file_changes_its_table(monkeypatch):
    read = tables.read
    monkeypatch.setattr(tables, "read", lambda path: read(path)[:-1])
    assert tables.pages(README) != README


def test_a_page_without_a_table_is_refused():
    with pytest.raises(ValueError, match="the page has 0 tables named 'attention'"):
        tables.pages("# Benchmarks")


def test_readme_has_at_most_700_words():
    assert len(re.findall(r"[^\W_][\w.,'%-]*", re.sub(r"<!--.*?-->", "", README))) <= 700


def test_every_suite_has_at_most_one_file_per_device_and_its_name():
    for path in FOLDER.glob("results/*/*.csv"):
        if path.read_text(encoding="utf-8").startswith("suite,"):
            assert {row.suite for row in read_csv(path)} == {path.stem}
            assert path.stem in SUITES


def test_what_a_case_is_called():
    assert tables.show("2x32(8)x4096x128") == "2 × 32(8) × 4096 × 128"
    assert tables.show("19717n 108365e 500f") == "19,717, 108,365, 500"
    assert tables.show("bert-base 16x512 padded 128") == "bert-base 16 × 512 padded 128"
