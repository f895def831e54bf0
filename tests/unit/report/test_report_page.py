"""The page: self-contained, escaped, guarded by its policy, and written whole or not at all."""

import base64
import hashlib
import os
import re
from html.parser import HTMLParser

import pytest
from report_runs import HOSTILE, make_run

from bayesattn import files, metrics
from bayesattn.evaluation import runs
from bayesattn.evaluation.report import figures, write_report
from bayesattn.evaluation.report.gather import group_runs, read_runs


class Reader(HTMLParser):
    """Collect what a browser would see: tags with attributes, scripts, and visible text."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.text, self.scripts, self._inside = [], [], [], None
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = tag if tag in ("script", "style") else None

    def handle_endtag(self, tag):
        self._inside = None

    def handle_data(self, data):
        (self.scripts if self._inside == "script" else self.text).append(data)


@pytest.fixture
def page(page_path):
    return page_path.read_text()


def test_page_names_every_run_and_section(page):
    text = " ".join(Reader(page).text)
    for word in ("wc-0", "wc-1", "soft-0", "Metrics", "Decide", "Figures", "Calibration", "Examples", "Reproduce"):
        assert word in text


def test_page_loads_nothing_from_elsewhere(page):
    for tag, attributes in Reader(page).tags:
        for name in ("src", "href", "srcset", "data", "action"):
            value = attributes.get(name)
            assert value is None or value.startswith(("data:", "#")), f"{tag} {name}={value[:60]}"
    style = page[page.index("<style>") : page.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style


def test_policy_admits_the_page_s_own_script_only(page):
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page).group(1)
    scripts = Reader(page).scripts
    # the data block is not executed; the other one must match the hash to the last byte
    assert len(scripts) == 2
    digest = base64.b64encode(hashlib.sha256(scripts[1].encode()).digest()).decode()
    assert policy == f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def test_hostile_names_stay_text(tmp_path):
    folder = make_run(
        tmp_path / "x<img src=x onerror=alert(1)>",
        variant=HOSTILE,
        class_names=(HOSTILE, "</script><script>alert(2)</script>", "{{ 7 * 7 }}", "d"),
        config={"seed": 0, "note": HOSTILE},
    )
    page = write_report([folder], tmp_path / "page.html", title=HOSTILE).read_text()
    reader = Reader(page)
    assert [tag for tag, _ in reader.tags].count("script") == 2
    assert "alert" not in "".join(reader.scripts)
    assert not any(name.startswith("on") for _, attributes in reader.tags for name in attributes)
    assert all(attributes.get("src", "data:").startswith("data:") for tag, attributes in reader.tags if tag == "img")
    assert HOSTILE in "".join(reader.text)
    assert "{{ 7 * 7 }}" in "".join(reader.text)


def test_page_is_labeled_for_screen_readers(page):
    reader = Reader(page)
    ids = [attributes["id"] for _, attributes in reader.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    labeled = {attributes.get("for") for tag, attributes in reader.tags if tag == "label"}
    for tag, attributes in reader.tags:
        if tag in ("select", "input"):
            assert attributes["id"] in labeled
        if tag == "img":
            assert attributes["alt"]
        if tag == "th":
            assert attributes["scope"] in ("row", "col")
        if attributes.get("class") == "scroll":
            assert attributes["tabindex"] == "0"
            assert attributes["aria-label"]
    assert ("html", {"lang": "en"}) in reader.tags


def test_figures_are_also_saved_as_files(page_path):
    files = {file.name: file for file in (page_path.parent / "figures").iterdir()}
    assert {"risk-coverage.png", "pavpu-threshold.png", "pavpu-draws.png", "reliability-1-scaled.png"} <= set(files)
    assert {"p-values-2.png", "entropy-2-1.png", "heads-2.png"} <= set(files)
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files.values())


def test_legend_gives_the_aurc_of_the_table(run_folders, monkeypatch):
    groups = group_runs(read_runs(run_folders))
    # of runs that are pooled the area would be another
    pooled = groups[1].pooled_table("test")
    expected = groups[1].metric("test", "aurc").value
    assert abs(float(metrics.aurc(pooled.confidence, pooled.accuracy)) - expected) > 1e-3
    made = []
    monkeypatch.setattr(figures, "draw", lambda section, name, caption, make, **options: made.append((name, make)))
    list(figures._comparisons(groups, "test", ""))
    legend = dict(made)["risk-coverage"]().legends[0]
    assert legend.get_texts()[1].get_text() == f"BAM-WC, draws (AURC {expected:.3f})"


def test_recipes_have_tables_and_figures_of_their_own(run_folders, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "_of_group", lambda *group: [])
    other = make_run(tmp_path / "graph-0", recipe="graph", class_names=("a" * 70, "b c " * 30))
    page = write_report([run_folders[0], run_folders[2], other], tmp_path / "page.html").read_text()
    tables = [table for table in page.split("</table>") if "split <strong>test</strong>, " in table]
    rows = [re.findall(r'<th scope="row">([^<]*)</th>', table.split("<table>")[-1]) for table in tables]
    assert rows == [
        ["digits BAM-WC, no draws", "digits BAM-WC, draws", "digits soft, no draws", "digits soft, draws"],
        ["graph BAM-WC, no draws", "graph BAM-WC, draws"],
    ]
    assert page.count("<option>strange</option>") == 1
    assert re.findall("<h3>(Comparison[^<]*)</h3>", page) == ["Comparison: digits", "Comparison: graph"]


def test_figures_have_a_dark_version(page):
    sources = [attributes for tag, attributes in Reader(page).tags if tag == "source"]
    plots = [attributes for tag, attributes in Reader(page).tags if tag == "img" and attributes.get("class") == "plot"]
    assert len(sources) == len(plots) > 0
    assert all(source["media"] == "(prefers-color-scheme: dark)" for source in sources)
    assert all(source["srcset"] != plot["src"] for source, plot in zip(sources, plots, strict=True))


@pytest.mark.usefixtures("without_figures")
def test_failed_write_leaves_the_old_page(run_folders, tmp_path, monkeypatch):
    out = tmp_path / "site" / "page.html"
    out.parent.mkdir()
    out.write_text("old")

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_report(run_folders, out)
    assert out.read_text() == "old"
    assert list(out.parent.iterdir()) == [out]


@pytest.mark.usefixtures("without_figures")
def test_broken_run_writes_no_page(run_folders, tmp_path):
    broken = make_run(tmp_path / "wc-2")
    (broken / runs.PREDICTIONS_FILE).write_bytes(b"not tensors")
    with pytest.raises(files.RunError, match=r"wc-2.*cannot be read as safetensors"):
        write_report([*run_folders, broken], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_no_runs_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="at least one run folder"):
        write_report([], tmp_path / "page.html")
