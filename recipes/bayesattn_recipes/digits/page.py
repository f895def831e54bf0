"""The page of digit results from its CSV file."""

from pathlib import Path

from bayesattn_recipes.common import page as pages
from bayesattn_recipes.digits.reproduce import KINDS, NOISE

# title: condition, column and the factor of what is shown; less NLL is better
GROUPS = {
    "accuracy": ("test", "accuracy", 100.0),
    "accuracy under noise": (f"noise-{NOISE:g}", "accuracy", 100.0),
    "100 NLL, after a temperature": ("test", "scaled_nll", -100.0),
}


def read(folder: Path) -> pages.Page:
    """Return the differences of every kind to soft attention, each with settings chosen from equally many."""
    rows, found = pages.read_rows(folder / "digits.csv"), []
    for group, (condition, column, scale) in GROUPS.items():
        by_kind = {
            kind: {int(r["seed"]): r for r in rows if (r["kind"], r["condition"]) == (kind, condition)} for kind in KINDS
        }
        values = {kind: {seed: float(row[column]) for seed, row in runs.items()} for kind, runs in by_kind.items()}
        tried = {kind: next(iter(runs.values()))["settings_tried"] for kind, runs in by_kind.items()}
        for kind in KINDS:
            if kind != "soft":
                # the control lies so far off that it would hide the others
                options = {"search": f"{tried['soft']} / {tried[kind]}", "scale": scale, "is_drawn": kind != "uniform"}
                found.append(pages.compare(group, kind, values[kind], values["soft"], **options))
    return pages.Page(pages.corrected(found), "Digits, 200 training images", "percentage points; hundredths of a nat")


def rebuild(folder: Path) -> Path:
    """Write the figure and the table of the page."""
    return pages.rebuild(folder, "digits", read(folder))
