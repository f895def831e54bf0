"""The page of visual question answering from its CSV files."""

from pathlib import Path

from bayesattn_recipes.common import page as pages

LEAST_SEEDS = 5
NAMES = {"nokl": "BAM-NOKL", "lf": "BAM-LF", "lc": "BAM-LC", "wf": "BAM-WF", "wc": "BAM-WC"}
CONDITIONS = {
    "daquar": {"clean": "DAQUAR, clean", "variance 5": "DAQUAR, noise of the paper", "noise 8x": "DAQUAR, strong noise"},
    "shapes": {"clean": "shapes, clean"},
}
# the paper's Table 2, VQA 2.0, accuracy: clean and noisy, soft and BAM-WC
PAPER = {"clean": 67.02 - 66.95, "variance 5": 62.89 - 61.25}


def read(folder: Path) -> pages.Page:
    """Return the differences in accuracy of every kind with enough seeds."""
    rows = pages.read_rows(folder / "vqa.csv")
    found = []
    for dataset, conditions in CONDITIONS.items():
        for condition, group in conditions.items():
            measure = f"{condition} accuracy"
            inside = [row for row in rows if (row["dataset"], row["measure"]) == (dataset, measure)]
            values = {
                variant: {int(row["seed"]): float(row["value"]) for row in inside if row["variant"] == variant}
                for variant in ("soft", *NAMES)
            }
            for variant, name in NAMES.items():
                if len(values[variant]) >= LEAST_SEEDS:
                    paper = PAPER.get(condition) if dataset == "daquar" else None
                    search = "4 / 4" if dataset == "daquar" else "1 / 2" if variant == "wc" else "1 / 0"
                    options = {"search": search, "scale": 100.0, "paper": paper}
                    found.append(pages.compare(group, name, values[variant], values["soft"], **options))
    return pages.Page(pages.corrected(found), "Visual questions: accuracy", "percentage points")


def rebuild(folder: Path) -> Path:
    """Write the figure and the table of the page."""
    return pages.rebuild(folder, "vqa", read(folder))
