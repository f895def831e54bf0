"""The page of language results from its CSV files."""

from pathlib import Path

from bayesattn_recipes.common import page as pages
from bayesattn_recipes.language.tasks import TASKS

# tasks with five pairs or more; parts of MNLI and QQP and SQuAD have three or four
SHOWN = ("mrpc", "cola", "rte", "sst2", "stsb", "qnli")
METRICS = {"accuracy": "accuracy", "matthews": "Matthews", "pearson": "Pearson"}
# kind: its row, and whether it has draws
KINDS = {"MC dropout": ("dropout", True), "BAM-NOKL": ("BAM-NOKL", True), "BAM-WC": ("BAM-WC", True)}
# settings tried on validation texts (language-search.csv, language-search-noise.csv): soft, BAM-NOKL, BAM-WC; the other
# tasks use those of similar tasks. BAM-WC's five settings on MRPC and CoLA had a KL weight at which it hardly learns, so
# none of them counts: the reported weight comes from RTE
SEARCHED = {"mrpc": (6, 5, 0), "cola": (5, 5, 0), "rte": (6, 5, 9), "stsb": (0, "WC's", 3)}
SHIFTED = ("characters-1", "words-1", "qqp", "mnli", "mrpc", "rte")

Values = dict[tuple[str, str, str, str, bool], dict[int, float]]


def read_values(folder: Path) -> Values:
    """Return the measures by seed, by task, variant, split, metric and whether they are of draws."""
    values: Values = {}
    for row in pages.read_rows(folder / "language.csv"):
        key = (row["config"], row["variant"], row["split"], row["metric"], row["draws"] == "True")
        values.setdefault(key, {})[int(row["seed"])] = float(row["value"])
    return values


def read(folder: Path) -> pages.Page:
    """Return the differences in GLUE's metrics, and in NLL after a temperature."""
    values = read_values(folder)
    effects = pages.corrected([*_quality(values), *_scaled(values)])
    return pages.Page(effects, "Language: GLUE's metrics, in %", "percentage points")


def _quality(values: Values) -> list[pages.Effect]:
    found = []
    for name in SHOWN:
        task = TASKS[name]
        metric = task.metrics[0]
        soft = values[name, "soft", "test", metric, False]
        for kind, (variant, draws) in KINDS.items():
            ours = values.get((name, variant, "test", metric, draws), {})
            if len(ours) < 2:
                continue
            gain = task.paper[1] - task.paper[0] if kind == "BAM-WC" and task.paper else None
            group = f"{task.folder}, {METRICS[metric]}"
            options = {"search": _search(name, kind), "paper": gain, "scale": 100.0, "is_drawn": kind != "BAM-NOKL"}
            found.append(pages.compare(group, kind, ours, soft, **options))
    return found


def _scaled(values: Values) -> list[pages.Effect]:
    found = []
    for name in SHOWN:
        soft = values.get((name, "soft", "test", "scaled_nll", False))
        if soft is None:
            continue
        for kind in ("MC dropout", "BAM-WC"):
            ours = values.get((name, KINDS[kind][0], "test", "scaled_nll", True), {})
            if len(ours) >= 2:
                group = f"{TASKS[name].folder}, 100 NLL"
                options = {"search": _search(name, kind), "scale": -100.0, "is_drawn": False}
                found.append(pages.compare(group, kind, ours, soft, **options))
    return found


def shifted(values: Values, metric: str) -> tuple[pages.Effect, ...]:
    """Return BAM-WC's difference to soft on every shifted set of five tasks, with Holm's correction over these."""
    found = []
    for name in ("mrpc", "cola", "rte", "qnli", "qqp"):
        for split in SHIFTED:
            soft, ours = (
                values.get((name, *rest), {}) for rest in (("soft", split, metric, False), ("BAM-WC", split, metric, True))
            )
            if len(soft.keys() & ours.keys()) >= 2:
                options = {"search": _search(name, "BAM-WC"), "scale": -1.0}
                found.append(pages.compare(f"{name} {split}", "BAM-WC", ours, soft, **options))
    return pages.corrected(found)


def _search(name: str, kind: str) -> str:
    soft, *others = SEARCHED.get(name, ("–", "–", "–"))
    own = dict(zip(KINDS, ("soft's", *others)))
    return f"{soft} / {own[kind]}"


def rebuild(folder: Path) -> Path:
    """Write the figure and the table of the page."""
    return pages.rebuild(folder, "language", read(folder))
