"""The page of translation results from its CSV files."""

from pathlib import Path

from bayesattn_recipes.common import page as pages

NAMES = {
    "exact": "exact marginal", "wc": "BAM-WC", "nokl": "BAM-NOKL", "wf": "BAM-WF", "lc": "BAM-LC", "lf": "BAM-LF",
    "mc-dropout": "MC dropout, mean", "uniform": "uniform",
}  # fmt: skip
TESTS = ("test-2016", "test-2017", "test-2018", "test-mscoco")
# BLEU on IWSLT14 (the paper's Table 4): over soft attention
PAPER = {"exact": 33.29 - 32.77, "wc": 33.81 - 32.77, "lc": 33.63 - 32.77}
# seeds of Multi30k whose run was trained before runs shared soft attention's initial values, as the others do
UNPAIRED = {"wc": (0, 1, 2)}
SEARCH = {"wc": "4 / 3", "nokl": "4 / WC's", "wf": "4 / WC's"}


def read(folder: Path) -> pages.Page:
    """Return the differences in BLEU: Multi30k, mean of its four tests, and Tatoeba."""
    found = []
    sets = {
        "Multi30k, mean of 4 tests": ("translation/multi30k.csv", TESTS),
        "Tatoeba": ("translation/tatoeba.csv", ("test",)),
    }
    for group, (name, tests) in sets.items():
        rows = [row for row in pages.read_rows(folder / name) if row["test"] in tests and row["bleu"]]
        means = {variant: _means(rows, variant, len(tests)) for variant in ("soft", *NAMES)}
        if group.startswith("Multi30k"):
            for variant, seeds in UNPAIRED.items():
                means[variant] = {seed: value for seed, value in means[variant].items() if seed not in seeds}
        for variant, shown in NAMES.items():
            if len(means[variant].keys() & means["soft"].keys()) >= 2:
                paper = PAPER.get(variant) if group.endswith("tests") else None
                options = {"search": "none" if group == "Tatoeba" else SEARCH.get(variant, "4 / soft's"), "paper": paper}
                found.append(pages.compare(group, shown, means[variant], means["soft"], **options))
    return pages.Page(pages.corrected(found), "Translation: BLEU", "BLEU")


def _means(rows: list[dict[str, str]], variant: str, count: int) -> dict[int, float]:
    by_seed: dict[int, list[float]] = {}
    for row in rows:
        if row["variant"] == variant:
            by_seed.setdefault(int(row["seed"]), []).append(float(row["bleu"]))
    return {seed: sum(values) / count for seed, values in by_seed.items() if len(values) == count}


def rebuild(folder: Path) -> Path:
    """Write the figure and the table of the page."""
    return pages.rebuild(folder, "translation", read(folder))
