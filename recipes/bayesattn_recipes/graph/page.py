"""The page of graph results from its CSV files."""

from collections.abc import Sequence
from pathlib import Path

from bayesattn_recipes.common import page as pages
from bayesattn_recipes.graph.reproduce import DATASETS, PAPER

NAMES = {"nokl": "BAM-NOKL", "lf": "BAM-LF", "lc": "BAM-LC", "wf": "BAM-WF", "wc": "BAM-WC"}
TITLES = {"cora": "Cora", "citeseer": "Citeseer", "pubmed": "PubMed"}
PUBLIC = "public split"
# measure of the random splits: column, factor of the numbers shown; less NLL is better
MEASURES = {"accuracy": ("accuracy", 100.0), "100 NLL, scaled": ("scaled_nll", -100.0)}


def read(folder: Path) -> pages.Page:
    """Return the differences: accuracy with the paper's settings on the public split, and random splits with equal search.

    The random splits are included only if `reproduce graph --splits` has written its CSV file there.
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
            group = f"{TITLES[dataset]}, {PUBLIC}"
            options = {"search": "the paper's", "paper": gain, "scale": 100.0, "is_drawn": variant == "wc"}
            found.append(pages.compare(group, name, by_variant[variant], by_variant["soft"], **options))
    splits = pages.read_rows(folder / "graph-splits.csv")
    for dataset in DATASETS:
        inside = [row for row in splits if row["dataset"] == dataset]
        found += pages.compare_kinds(inside, f"{TITLES[dataset]}, splits", MEASURES)
    return pages.Page(pages.corrected(found), "Graph attention networks", "percentage points; hundredths of a nat")


def table(page: pages.Page) -> str:
    """Return the tables of the page: the paper's settings, then the random splits."""
    public = [effect for effect in page.effects if effect.group.endswith(PUBLIC)]
    splits = [effect for effect in page.effects if not effect.group.endswith(PUBLIC)]
    found = _public_table(public)
    return f"{found}\n{pages.side_by_side(splits, tuple(MEASURES), page.digits)}" if splits else found


def _public_table(effects: Sequence[pages.Effect]) -> str:
    """Return the table of the public split: one line per kind, with every graph and the paper's gain there."""
    graphs = list(dict.fromkeys(effect.group for effect in effects))
    header, lines = ["public split", "pairs", "settings"], []
    for group in graphs:
        soft = next(effect.baseline for effect in effects if effect.group == group)
        header += [f"{group.removesuffix(f', {PUBLIC}')}, soft {soft:.2f}", "paper"]
    for kind in dict.fromkeys(effect.kind for effect in effects):
        own = {effect.group: effect for effect in effects if effect.kind == kind}
        pairs = dict.fromkeys(str(effect.runs) for effect in own.values())
        lines.append([kind, ", ".join(pairs), own[graphs[0]].search])
        for effect in map(own.__getitem__, graphs):
            assert effect.paper is not None
            half = (effect.high - effect.low) / 2
            lines[-1] += [f"{effect.value:+.2f} ± {half:.2f}, p {pages.show_p(effect.holm)}", f"{effect.paper:+.2f}"]
    return pages.markdown(header, lines)


def _of(row: dict[str, str], dataset: str, variant: str) -> bool:
    return (row["dataset"], row["variant"]) == (dataset, variant)


def rebuild(folder: Path) -> Path:
    """Write the figure and the table of the page."""
    page = read(folder)
    return pages.rebuild(folder, "graph", page, table(page))
