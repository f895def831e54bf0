"""Run folders and a page for the tests of this folder; drawing the figures takes seconds, so it is done once."""

from pathlib import Path

import pytest
from report_runs import WORDS, make_doubtful, make_run

from bayesattn.evaluation.report import figures, write_report


@pytest.fixture(scope="session")
def run_folders(tmp_path_factory) -> list[Path]:
    """Return two runs of one variant and one of another, which has doubt in closed form; not to be changed."""
    folder = tmp_path_factory.mktemp("runs")
    return [
        make_run(folder / "wc-0", seed=0),
        make_run(folder / "wc-1", seed=1),
        make_run(folder / "soft-0", variant="soft", seed=2, doubtful=make_doubtful(WORDS)),
    ]


@pytest.fixture(scope="session")
def page_path(run_folders, tmp_path_factory) -> Path:
    """Return the page of these runs; its figures are beside it."""
    folder = tmp_path_factory.mktemp("page")
    return write_report(run_folders, folder / "page.html", figures=folder / "figures")


@pytest.fixture
def without_figures(monkeypatch) -> None:
    """Leave the figures out where they do not matter."""
    monkeypatch.setattr(figures, "draw_all", lambda groups: [])
