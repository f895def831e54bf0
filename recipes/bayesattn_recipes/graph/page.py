"""The page of graph results from its CSV files."""

from pathlib import Path

from bayesattn_recipes.common import page as pages
from bayesattn_recipes.graph.reproduce import DATASETS, PAPER

NAMES = {"nokl": "BAM-NOKL", "lf": "BAM-LF", "lc": "BAM-LC", "wf": "BAM-WF", "wc": "BAM-WC"}
TITLES = {"cora": "Cora", "citeseer": "Citeseer", "pubmed": "PubMed"}


def read(folder: Path) -> pages.Page:
    """Return the differences in accuracy: the paper's settings on the public split, and random splits with equal search.

    The latter only where `reproduce graph --splits` has written its CSV file there.
    """
    found = []
    seeds = pages.read_rows(folder / "graph-seeds.csv")
    for place, dataset in enumerate(DATASETS):
        by_variant = {
            variant: {int(row["seed"]): float(row["accuracy"]) for row in seeds if _of(row, dataset, variant)}
            for variant in ("soft", *NAMES)
        }
        for variant, name in NAMES.items():
            gain = PAPER[variant][place] - PAPER["soft"][place]
            group = f"{TITLES[dataset]}, public split"
            options = {"search": "the paper's", "paper": gain, "scale": 100.0, "is_drawn": variant in ("nokl", "wc")}
            found.append(pages.compare(group, name, by_variant[variant], by_variant["soft"], **options))
    splits = pages.read_rows(folder / "graph-splits.csv")
    for dataset in DATASETS:
        inside = [row for row in splits if row["dataset"] == dataset]
        of_kind = {kind: [row for row in inside if row["kind"] == kind] for kind in dict.fromkeys(r["kind"] for r in inside)}
        accuracy = {kind: {int(r["seed"]): float(r["accuracy"]) for r in rows} for kind, rows in of_kind.items()}
        for kind, rows in of_kind.items():
            if kind != "soft":
                options = {"search": f"{of_kind['soft'][0]['settings_tried']} / {rows[0]['settings_tried']}", "scale": 100.0}
                group = f"{TITLES[dataset]}, random splits"
                found.append(pages.compare(group, kind, accuracy[kind], accuracy["soft"], **options))
    return pages.Page(pages.corrected(found), "Graphs: accuracy", "percentage points")


def _of(row: dict[str, str], dataset: str, variant: str) -> bool:
    return (row["dataset"], row["variant"]) == (dataset, variant)


def rebuild(folder: Path) -> Path:
    """Write the figure and the table of the page."""
    return pages.rebuild(folder, "graph", read(folder))
