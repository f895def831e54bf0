"""The page of captioning results from its CSV files."""

from pathlib import Path

from bayesattn_recipes.captioning.reproduce import PAPER, VARIANTS
from bayesattn_recipes.common import page as pages

# a row needs at least this many seeds
LEAST_SEEDS = 5
# title: file of the runs, data set, search, and how many settings were tried on validation images (captioning-search.csv)
GROUPS = {
    "Flickr8k, greedy search": ("captioning.csv", "flickr8k", "greedy search", "2 / 2"),
    "Flickr8k, 5 beams": ("captioning.csv", "flickr8k", "5 beams", "2 / 2"),
}
# the same number of settings for every kind
SEARCHED = "shapes, 3 beams"
# rivals without a search of their settings
NOT_TUNED = ("hard (REINFORCE)", "Gaussian context")


def read(folder: Path) -> pages.Page:
    """Return the differences in BLEU-4 of every kind with enough seeds and a search of its settings."""
    gains = {VARIANTS[variant]: values[0] - PAPER["soft"][0] for variant, values in PAPER.items()}
    found = []
    for group, (name, dataset, search, tried) in GROUPS.items():
        rows = pages.read_rows(folder / name)
        inside = [row for row in rows if (row["dataset"], row["search"]) == (dataset, search)]
        kinds = [kind for kind in dict.fromkeys(row["variant"] for row in inside) if kind not in NOT_TUNED]
        values = {k: {int(r["seed"]): float(r["BLEU-4"]) for r in inside if r["variant"] == k} for k in kinds}
        for kind in kinds:
            if kind != "soft" and len(values[kind]) >= LEAST_SEEDS:
                # the control runs with the settings that were chosen for soft attention
                settings = f"{tried.split()[0]} / soft's" if kind == "uniform" else tried
                options = {"search": settings, "paper": gains.get(kind) if search == "greedy search" else None}
                found.append(pages.compare(group, kind, values[kind], values["soft"], **options))
    found += pages.compare_kinds(pages.read_rows(folder / "captioning-tuned.csv"), SEARCHED, {"BLEU-4": ("BLEU-4", 1.0)})
    return pages.Page(pages.corrected(found), "Captions: BLEU-4", "BLEU-4")


def rebuild(folder: Path) -> Path:
    """Write the figure and the table of the page."""
    return pages.rebuild(folder, "captioning", read(folder))
