"""The numbers on README, home page and guides are those of the CSV files; `python docs/site/front.py` writes them."""

import csv
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("front", ROOT / "docs" / "site" / "front.py")
assert SPEC is not None
assert SPEC.loader is not None
front = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(front)
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_pages_are_what_the_files_give():
    stale = [str(path.relative_to(ROOT)) for path, text in front.pages().items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "run: python docs/site/front.py"


def test_a_changed_file_changes_the_readme(monkeypatch):
    read = front.doubt.read_rows
    monkeypatch.setattr(front.doubt, "read_rows", lambda path: [r for r in read(path) if r["task"] != "rte"])
    changed = front.pages()[ROOT / "README.md"]
    assert "fine-tuned on six\nGLUE tasks with five seeds each. Intervals are over 30 models" in changed
    assert changed.count("−9.1 %") == 0


def test_numbers_are_written_across_line_breaks_and_capital_letters():
    page = "Five seeds.\nIt gained 1.0\npoints, and 2.0 points. Points: 4."
    templates = ("{seeds} seeds", "{gain} points", "Points: {gain}")
    found = front.with_numbers(page, templates, {"seeds": "seven", "gain": "3.5"})
    assert found == "Seven seeds.\nIt gained 3.5\npoints, and 3.5 points. Points: 3.5."
    with pytest.raises(ValueError, match="a page has lost the words"):
        front.with_numbers(page, ("{gain} percent",), {"gain": "1"})


def test_no_difference_is_seen_where_the_readme_says_so():
    found = front.numbers()
    assert min(float(found[name]) for name in ("trained_p", "laplace_p", "change_p_tasks")) > 0.01
    assert not [e for e in front.language.read(front.RESULTS).effects if e.kind == "BAM-WC" and e.is_clear]


def test_every_number_of_a_template_is_known():
    known = front.numbers()
    asked = {name for page in front.TEMPLATES.values() for template in page for name in re.findall(r"\{(\w+)\}", template)}
    assert asked <= known.keys()


def test_own_confidence_is_better_where_the_readme_says_so():
    with (ROOT / "docs" / "results" / "doubt-elsewhere.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["measure"] == "AURC"]

    def higher(task: str) -> bool:
        own, closed = (
            sum(float(row["value"]) for row in rows if row["task"] == task and row["row"] == name)
            for name in ("own confidence", "closed form")
        )
        return closed > own

    said = " ".join(README.split())
    assert "On SQuAD 2.0 and on generated sentences, the model's own confidence sorts better" in said
    assert higher("squad2")
    # whether any of these is clear: tests/docs/test_doubt_results.py
    assert "on digits and graphs trained from scratch, results go both ways" in said
    assert {higher(task) for task in ("digits", "citeseer", "pubmed")} == {False, True}


def test_readme_opens_with_a_sentence_a_picture_and_a_few_lines_of_code():
    shown = re.sub(r"<!--.*?-->\n?", "", README, flags=re.DOTALL)
    assert len(shown.split()) <= 900
    first = shown.split("\n## ")[0]
    assert re.search(r"!\[[^\]]{40,}\]\(docs/images/doubt\.png\)", first)
    code = re.findall(r"^```python\n(.*?)^```", first, re.MULTILINE | re.DOTALL)
    assert len(code) == 1
    assert 5 <= len([line for line in code[0].splitlines() if line.strip()]) <= 8
