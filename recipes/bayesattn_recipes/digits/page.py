"""The page of digit results from its CSV file."""

import itertools
from dataclasses import replace
from pathlib import Path

from bayesattn_recipes.common import page as pages
from bayesattn_recipes.digits.reproduce import NOISE

# title: condition, column and factor of the numbers shown; less NLL is better
SETS = ("digits", "shapes")
GROUPS = {
    "accuracy": ("test", "accuracy", 100.0),
    "accuracy under noise": (f"noise-{NOISE:g}", "accuracy", 100.0),
    "100 NLL, scaled": ("test", "scaled_nll", -100.0),
}


def read(folder: Path) -> pages.Page:
    """Return the differences of every kind to soft attention, each with settings chosen from the same number."""
    found = []
    for dataset, (group, (condition, column, scale)) in itertools.product(SETS, GROUPS.items()):
        rows = [row for row in pages.read_rows(folder / f"{dataset}.csv") if row["condition"] == condition]
        effects = pages.compare_kinds(rows, f"{dataset}, {group}", {group: (column, scale)})
        # the control is so far off that it would hide the others
        found += [replace(effect, is_drawn=effect.kind != "uniform") for effect in effects]
    return pages.Page(pages.corrected(found), "200 training images", "percentage points; hundredths of a nat")


def table(page: pages.Page) -> str:
    """Return the table of the page."""
    return pages.side_by_side(page.effects, tuple(GROUPS), page.digits)


def rebuild(folder: Path) -> Path:
    """Write the figure and the table of the page."""
    page = read(folder)
    return pages.rebuild(folder, "digits", page, table(page))
