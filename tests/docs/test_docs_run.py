"""Everything the documentation shows is run: Python blocks page by page, command lines down to their options."""

import multiprocessing
import os
import re
import shlex
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import typer.main

from bayesattn.cli.commands import app

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(p for folder in ("docs", "src", "recipes") for p in (ROOT / folder).rglob("*.md"))])
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# a text block right after a Python block is what the latter prints
OUTPUT = re.compile(r"^```\n\n```text\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [body for found, body in FENCE.findall(page.read_text(encoding="utf-8")) if found == language]


def commands(page: Path) -> list[list[str]]:
    lines = "\n".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    parsed = [shlex.split(line, comments=True) for line in lines]
    return [words[1:] for words in parsed if words and words[0] == "bayesattn"]


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def processes():
    """Processes for one page each, forked from one that has imported what takes most of a page's time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers.trainer", "matplotlib.pyplot"])
    return context


def run_page(code: str, folder: Path) -> None:
    """Run a page as a program in `folder`; what it prints goes to files."""
    os.chdir(folder)
    with open("stdout", "w") as sys.stdout, open("stderr", "w") as sys.stderr:
        try:
            exec(compile(code, "page", "exec"), {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
            raise SystemExit(1) from None


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=page_name)
def test_python_blocks_of_a_page_run_in_order(page, tmp_path, processes):
    process = processes.Process(target=run_page, args=("\n".join(blocks(page, "python")), tmp_path))
    process.start()
    process.join(timeout=300)
    if process.exitcode is None:
        process.kill()
    assert process.exitcode == 0, (tmp_path / "stderr").read_text(encoding="utf-8")
    printed = (tmp_path / "stdout").read_text(encoding="utf-8")
    for shown in OUTPUT.findall(page.read_text(encoding="utf-8")):
        assert shown in printed


@pytest.mark.parametrize("words", [pytest.param(words, id=" ".join(words)) for page in PAGES for words in commands(page)])
def test_shown_commands_are_understood(words):
    group = typer.main.get_command(app)
    name, *rest = words
    if name.startswith("-"):
        return
    assert name in group.commands, f"unknown command {name}"
    # parses arguments and options; an unknown option or a missing argument raises
    group.commands[name].make_context(name, [word for word in rest if word != "--debug"])


def test_bash_blocks_use_make_targets_that_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test", "test-all", "lint"} <= targets
    for page in PAGES:
        for line in "\n".join(blocks(page, "bash")).splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["make"]:
                shown = [word for word in words[1:] if "=" not in word]
                assert set(shown) <= targets, f"{page_name(page)}: {line}"


@pytest.mark.parametrize("target", ["demo", "test"])
def test_the_two_commands_of_the_readme_are_targets(target):
    result = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert {"demo": "bayesattn demo", "test": "pytest"}[target] in result.stdout


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        # an indexed call in a code block looks like a link
        prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", prose):
            assert (page.parent / target).exists(), f"{page_name(page)} links to {target}"
