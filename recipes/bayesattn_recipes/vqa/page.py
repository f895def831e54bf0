"""The page of visual question answering from its CSV files."""

import itertools
from dataclasses import replace
from pathlib import Path

from bayesattn_recipes.common import page as pages

LEAST_SEEDS = 5
NAMES = {"nokl": "BAM-NOKL", "lf": "BAM-LF", "lc": "BAM-LC", "wf": "BAM-WF", "wc": "BAM-WC"}
# DAQUAR, in vqa.csv
CONDITIONS = {"clean": "DAQUAR, clean", "variance 5": "DAQUAR, noise of the paper", "noise 8x": "DAQUAR, strong noise"}
# shapes, in vqa-tuned.csv
MEASURES = {"clean": ("accuracy", 100.0), "noise": ("noisy_accuracy", 100.0)}
# the paper's complete table, VQA 2.0, accuracy of BAM-WC minus that of soft attention: clean, and with noise
PAPER = {"clean": 67.02 - 66.95, "variance 5": 62.89 - 61.25}
# by type of question; DAQUAR's colors and objects are "other" in the paper, whose third type is yes or no
PAPER_OTHER = {"clean": 58.42 - 58.33, "variance 5": 53.96 - 51.97}
PAPER_BY_TYPE = {
    "number": {"clean": 48.88 - 48.92, "variance 5": 41.90 - 40.80},
    "object": PAPER_OTHER,
    "color": PAPER_OTHER,
}


def read(folder: Path) -> pages.Page:
    """Return the differences in accuracy of every kind with enough seeds and a search of its settings."""
    rows = [row for row in pages.read_rows(folder / "vqa.csv") if row["dataset"] == "daquar"]
    found = []
    for condition, group in CONDITIONS.items():
        found += _compare(rows, f"{condition} accuracy", group, PAPER.get(condition))
    for kind, (condition, group) in itertools.product(PAPER_BY_TYPE, list(CONDITIONS.items())[:2]):
        options = {"paper": PAPER_BY_TYPE[kind][condition], "is_drawn": False}
        found += _compare(rows, f"{condition} accuracy {kind}", f"{group}, {kind}", **options)
    found += pages.compare_kinds(pages.read_rows(folder / "vqa-tuned.csv"), "shapes", MEASURES)
    return pages.Page(pages.corrected(found), "Visual questions: accuracy", "percentage points")


def _compare(
    rows: list[dict[str, str]], measure: str, group: str, paper: float | None, *, is_drawn: bool = True
) -> list[pages.Effect]:
    """Return the effects of all kinds with enough seeds in one measure."""
    values = {
        variant: {int(r["seed"]): float(r["value"]) for r in rows if (r["variant"], r["measure"]) == (variant, measure)}
        for variant in ("soft", *NAMES)
    }
    options = {"search": "4 / 4", "scale": 100.0, "paper": paper, "is_drawn": is_drawn}
    return [
        pages.compare(group, name, values[variant], values["soft"], **options)
        for variant, name in NAMES.items()
        if len(values[variant]) >= LEAST_SEEDS
    ]


def table(page: pages.Page) -> str:
    """Return the tables of the page: DAQUAR, then shapes."""
    parts = (tuple(e for e in page.effects if e.group.startswith("shapes") is shapes) for shapes in (False, True))
    daquar, shapes = parts
    return f"{pages.effect_table(replace(page, effects=daquar))}\n{pages.side_by_side(shapes, tuple(MEASURES), page.digits)}"


def rebuild(folder: Path) -> Path:
    """Write the figure and the tables of the page."""
    page = read(folder)
    return pages.rebuild(folder, "vqa", page, table(page))
