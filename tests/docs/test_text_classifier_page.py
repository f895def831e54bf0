"""The commands of the page on fine-tuning, in their order, on a small file."""

import re
import shlex
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
from language_files import call, write_sentiment

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "text-classifier.md"


def commands():
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [shlex.split(line)[1:] for block in blocks for line in block.splitlines()]


def test_commands_of_the_page_run_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_sentiment(tmp_path / "texts", train=400, dev=53)
    (tmp_path / "new.txt").write_text("a dull plot\nsuperb music\n")
    shown = {}
    for words in commands():
        # enough steps to run every part, not to learn anything
        few = ["--set=training.steps=5", "--set=max_length=24"] if words[0] == "train" else []
        assert call(*words, *few) == 0, " ".join(words)
        shown[" ".join(words[:2])] = capsys.readouterr().out
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert "post-hoc" in shown["evaluate runs/soft"]
    assert shown["predict runs/soft"].count('"label"') == 2
    # the three lines of Python, on the run of the commands
    lines = re.search(r"From Python:\n\n```text\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert lines is not None
    assert lines[1].count("\n") == 3
    found = {}
    exec(lines[1], found)
    answer = found["answer"]
    assert answer.label in ("good", "bad")
    # five steps teach too little for a promise, so the answer may be without one
    threshold = found["model"].rule.threshold
    assert answer.trust == (None if threshold is None else answer.probability >= threshold)
    assert sum(answer.probabilities.values()) == pytest.approx(1.0)
    assert not answer.truncated


def test_file_shown_on_the_page_is_one_that_can_be_read(tmp_path):
    from bayesattn_recipes.language.data import _own_task, read_examples

    text = re.search(r"```text\n(sentence\tlabel\n.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert text is not None
    examples, _ = read_examples(_own_task(text[1], "page"), text[1], "page")
    assert [example.label for example in examples] == [1, 0]
