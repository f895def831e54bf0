"""One self-contained HTML page from evaluated runs: tables, figures, decisions and examples; no network, no server.

Everything that comes from data or configs goes through jinja2's escaping, and a content security policy lets only the
page's own script run, recognized by its hash.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from bayesattn import __version__
from bayesattn.evaluation.report import figures as figures_module
from bayesattn.evaluation.report.examples import certain_mistakes, uncertain_hits
from bayesattn.evaluation.report.gather import Group, Run, group_runs, read_runs
from bayesattn.evaluation.report.names import METRICS, TEST_NAMES
from bayesattn.evaluation.runs import now
from bayesattn.files import write_bytes

TEMPLATES = Path(__file__).parent / "templates"
# the split whose examples and calibration are shown, where a run has it
MAIN_SPLIT = "test"


def write_report(folders: Sequence[Path], out: Path, *, figures: Path | None = None, title: str = "Report") -> Path:
    """Write the page and return its path.

    Args:
        folders: Run folders that `bayesattn evaluate` has measured.
        out: Where the page goes; replaced as a whole.
        figures: Folder to also save the figures in, as PNG files.
        title: Heading of the page.
    """
    if out.is_dir():
        raise ValueError(f"out must be the path of the page to write, got the folder {str(out)!r}")
    runs = read_runs(folders)
    groups = group_runs(runs)
    drawn = figures_module.draw_all(groups)
    page = render(runs, groups, drawn, title)
    if figures is not None:
        for figure in drawn:
            write_bytes(figures / f"{figure.name}.png", figure.png)
    write_bytes(out, page.encode())
    return out


def render(runs: Sequence[Run], groups: Sequence[Group], drawn: Sequence["figures_module.Drawn"], title: str) -> str:
    """Return the HTML."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = (TEMPLATES / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    sampled = [group for group in groups if group.num_samples > 1]
    series_splits = _labeled_splits(sampled)
    return environment.get_template("page.html.jinja").render(
        title=title,
        version=__version__,
        written=now().replace("T", " ").replace("+00:00", " UTC"),
        # the two files of this package that are code, not data
        style=Markup((TEMPLATES / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=Markup(f"sha256-{digest}"),
        runs=[_run_row(run) for run in runs],
        interval_note=_interval_note(groups),
        metric_splits=list(dict.fromkeys(split for group in groups for split in group.splits())),
        tables=_metric_tables(groups),
        test_name=" and ".join(dict.fromkeys(TEST_NAMES[group.runs[0].predictions.test] for group in sampled)),
        series=[group.label for group in sampled] if series_splits else [],
        series_splits=series_splits,
        figures=[(section, list(members)) for section, members in groupby(drawn, key=lambda figure: figure.section)],
        scaling=_scaling_rows(groups),
        main_split=MAIN_SPLIT,
        examples=_example_blocks(groups),
        versions=json.dumps(runs[0].metrics.get("environment", {}), indent=2, ensure_ascii=False),
        data={"series": [_series(group, series_splits) for group in sampled]},
    )


def _labeled_splits(groups: Sequence[Group]) -> list[str]:
    """Return the splits with labels that every group has."""
    if not groups:
        return []
    first = groups[0].runs[0].predictions.splits
    labeled = [name for name in groups[0].splits() if first[name].labels is not None]
    return [name for name in labeled if all(name in group.splits() for group in groups)]


def _run_row(run: Run) -> dict[str, Any]:
    seconds = run.run.get("train_seconds")
    draws = sorted({result["num_samples"] for result in run.metrics["methods"].values()})
    return {
        "name": run.folder.resolve().name,
        "recipe": run.run["recipe"],
        "variant": run.run["variant"],
        "seed": run.run["seed"],
        "num_parameters": run.run.get("num_parameters", "–"),
        "train_seconds": "–" if seconds is None else f"{seconds:.1f} s",
        "num_samples": draws[-1],
        "commands": f"{run.run.get('command', '')}\n{run.metrics.get('command', '')}",
        "config": json.dumps(run.run["config"], indent=2, ensure_ascii=False),
    }


def _interval_note(groups: Sequence[Group]) -> str:
    counts = {len(group.runs) for group in groups}
    notes = []
    if counts - {1}:
        notes.append("Mean over seeds, below it a 95 % t-interval of that mean.")
    if 1 in counts:
        notes.append("Single runs have 95 % bootstrap intervals over the test examples, where they were asked for.")
    return " ".join(notes)


def _metric_tables(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return a table for every split and recipe (each has its own data), without columns that are empty everywhere."""
    tables = []
    found = dict.fromkeys((split, group.recipe) for group in groups for split in group.splits())
    for split, recipe in found:
        members = [group for group in groups if group.recipe == recipe and split in group.splits()]
        columns = [name for name in METRICS if any(group.metric(split, name) for group in members)]
        cells = {name: [group.metric(split, name) for group in members] for name in columns}
        rows = []
        for index, group in enumerate(members):
            row = []
            for name in columns:
                cell = cells[name][index]
                values = [other.value for other in cells[name] if other is not None]
                best = (max if METRICS[name][1] else min)(values)
                is_best = len(values) > 1 and cell is not None and cell.value == best
                row.append(
                    None if cell is None else {"value": cell.value, "low": cell.low, "high": cell.high, "best": is_best}
                )
            rows.append({"label": group.label, "cells": row})
        first = members[0].runs[0].metrics["methods"][members[0].method]["splits"][split]
        headings = [f"{METRICS[name][0]}\N{NO-BREAK SPACE}{'↑' if METRICS[name][1] else '↓'}" for name in columns]
        table = {"split": split, "recipe": recipe, "num_examples": first["num_examples"], "columns": headings, "rows": rows}
        tables.append(table)
    return tables


def _scaling_rows(groups: Sequence[Group]) -> list[dict[str, Any]]:
    rows = []
    for group in groups:
        names = ("ece", "scaled_ece", "nll", "scaled_nll")
        found = [group.metric(MAIN_SPLIT, name) for name in names] if MAIN_SPLIT in group.splits() else []
        temperatures = [run.metrics["methods"][group.method]["temperature"] for run in group.runs]
        values = [summary.value for summary in found if summary is not None]
        if len(values) == len(names) and None not in temperatures:
            rows.append({"label": group.label, "cells": [sum(temperatures) / len(temperatures), *values]})
    return rows


def _example_blocks(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return mistakes and hits of the first run of every model, drawn the usual way."""
    blocks = []
    shown: set[Path] = set()
    for group in sorted(groups, key=lambda group: group.num_samples == 1):
        run = group.runs[0]
        if run.folder in shown or MAIN_SPLIT not in group.splits():
            continue
        shown.add(run.folder)
        name = f"{group.label}, run {run.folder.resolve().name}"
        blocks.append({"title": f"Most certain mistakes: {name}", "examples": certain_mistakes(group, MAIN_SPLIT)})
        blocks.append({"title": f"Least certain hits: {name}", "examples": uncertain_hits(group, MAIN_SPLIT)})
    return blocks


def _series(group: Group, splits: Sequence[str]) -> dict[str, Any]:
    """Return p-values and accuracies of every run and split; base64 of float64, so the page computes with the same bits."""
    return {
        "splits": {
            split: [
                {"p_value": _doubles(table.p_value), "accuracy": _doubles(table.accuracy)} for table in group.tables(split)
            ]
            for split in splits
        }
    }


def _doubles(values: Any) -> str:
    return base64.b64encode(values.double().cpu().numpy().astype("<f8").tobytes()).decode()
