"""The tables of `reproduce` from its finished runs: Markdown beside the paper's BLEU, and every number as CSV."""

from collections.abc import Mapping
from typing import Any

from bayesattn_recipes.common.tables import Cells, Column, markdown, mean_table, show_p
from bayesattn_recipes.translation import bleu
from bayesattn_recipes.translation.measure import REJECTED
from bayesattn_recipes.translation.text import Pairs

# IWSLT14 German–English, tokenized and lower-cased (Sec. 4.4); the last two are in comments of the paper's source
PAPER_BLEU = {"soft": 32.77, "dirichlet": 30.05, "enum": 33.68, "sample": 33.30, "wc": 33.81, "lc": 33.63, "exact": 33.29}


def finished_runs(cells: Cells) -> Cells:
    """Return the runs that did not diverge, without variants that have none."""
    kept = {v: {s: cell for s, cell in by_seed.items() if "diverged" not in cell} for v, by_seed in cells.items()}
    return {variant: by_seed for variant, by_seed in kept.items() if by_seed}


def csv_rows(dataset: str, cells: Cells) -> list[dict[str, Any]]:
    """Return one row for every variant, seed and test set; for a run that diverged, its message."""
    rows = [
        {
            "dataset": dataset,
            "variant": variant,
            "seed": seed,
            "test": test,
            **{name: values[name] for name in ("bleu", "chrf", "perplexity", "token_accuracy", "token_ece")},
            "bleu_signature": values["bleu_signature"],
            "validation_perplexity": cell["validation_perplexity"],
            "parameters": cell["parameters"],
            "train_seconds": cell["seconds"]["train"],
            "test_seconds": cell["seconds"][test],
            "uncertainty_seconds": cell["seconds"].get("uncertainty", ""),
            "not_measured": " ".join(cell["not_measured"]),
            "diverged": "",
        }
        for variant, by_seed in finished_runs(cells).items()
        for seed, cell in by_seed.items()
        for test, values in cell["tests"].items()
    ]
    lost = [
        {**dict.fromkeys(rows[0], ""), "dataset": dataset, "variant": v, "seed": seed, "diverged": cell["diverged"]}
        for v, by_seed in cells.items()
        for seed, cell in by_seed.items()
        if "diverged" in cell
    ]
    return [*rows, *lost]


def uncertainty_csv_rows(dataset: str, cells: Cells) -> list[dict[str, Any]]:
    """Return one row for every variant, seed and signal, with its whole rejection curve."""
    return [
        {
            "dataset": dataset,
            "variant": variant,
            "seed": seed,
            "signal": signal,
            "spearman_chrf": found["spearman_chrf"],
            "spearman_bleu": found["spearman_bleu"],
            **{f"bleu_{share:.0%}_withheld": value for share, value in zip(REJECTED, found["rejection"], strict=True)},
        }
        for variant, by_seed in finished_runs(cells).items()
        for seed, cell in by_seed.items()
        for signal, found in cell["uncertainty"].items()
    ]


def calibration_csv_rows(dataset: str, cells: Cells) -> list[dict[str, Any]]:
    """Return one row for every variant, seed and kind of draws."""
    return [
        {"dataset": dataset, "variant": variant, "seed": seed, "draws": method, **found}
        for variant, by_seed in finished_runs(cells).items()
        for seed, cell in by_seed.items()
        for method, found in cell["calibration"].items()
    ]


def comparison_csv_rows(dataset: str, cells: Cells, splits: dict[str, Pairs]) -> list[dict[str, Any]]:
    """Return BLEU minus that of soft attention with the same seed, and the paired bootstrap's p, for the first test."""
    finished = finished_runs(cells)
    soft, rows = finished["soft"], []
    for variant, by_seed in finished.items():
        for seed, cell in by_seed.items():
            if variant == "soft" or seed not in soft:
                continue
            test, ours = next(iter(cell["tests"].items()))
            baseline = soft[seed]["tests"][test]
            p_value = bleu.bootstrap_p_value(baseline["outputs"], ours["outputs"], splits[test].targets)
            row = {"dataset": dataset, "variant": variant, "seed": seed, "test": test, "bleu": ours["bleu"]}
            rows.append({**row, "difference": ours["bleu"] - baseline["bleu"], "bootstrap_p": p_value})
    return rows


def render(dataset: str, cells: Cells, comparisons: list[dict[str, Any]], digest: str) -> str:
    """Return the Markdown of one data set: quality beside the paper's BLEU, and the quality of the uncertainty."""
    finished = finished_runs(cells)
    any_soft = next(iter(finished["soft"].values()))
    main, *others = any_soft["tests"]
    lines = [
        f"## {dataset}, split {digest[:16]}\n\n",
        _quality_table(finished, main, comparisons),
        f"\n{any_soft['tests'][main]['bleu_signature']}; paired bootstrap of 1,000 resamples.\n\n",
        *(
            f"{variant}, seed {seed}, diverged: {cell['diverged']}.\n\n"
            for variant, by_seed in cells.items()
            for seed, cell in by_seed.items()
            if "diverged" in cell
        ),
    ]
    if others:
        measured = {
            variant: {test: _only(by_seed, "tests", test) for test in others} for variant, by_seed in finished.items()
        }
        rows = [[v, *(_BLEU.show(by_test[test]) for test in others)] for v, by_test in measured.items()]
        lines += [markdown(["BLEU", *others], rows), "\n"]
    for kind, (heading, columns) in _DETAILS.items():
        lines += [mean_table(_by_name(finished, kind), columns, first=heading, has_seeds=False), "\n"]
    return "".join(lines)


_BLEU = Column("BLEU", "bleu")
_QUALITY = (_BLEU, Column("perplexity", "perplexity"), Column("token ECE", "token_ece", digits=3))
_DETAILS = {
    "calibration": (
        "attention, draws",
        (
            Column("perplexity", "perplexity", digits=3),
            Column("token accuracy", "token_accuracy", digits=4),
            Column("token ECE", "token_ece", digits=4),
        ),
    ),
    "uncertainty": (
        "attention, draws, signal",
        (
            Column("Spearman chrF", "spearman_chrf", digits=3),
            Column("Spearman BLEU", "spearman_bleu", digits=3),
            Column("BLEU, all", lambda found: found["rejection"][0]),
            Column("BLEU, 20 % withheld", lambda found: found["rejection"][2]),
        ),
    ),
}


def _quality_table(cells: Cells, main: str, comparisons: list[dict[str, Any]]) -> str:
    header = ["attention", "seeds", f"BLEU, {main}", "− soft", "p (bootstrap), each seed", "perplexity", "token ECE"]
    rows = []
    for variant, by_seed in cells.items():
        compared = {row["seed"]: row for row in comparisons if row["variant"] == variant}
        quality, perplexity, ece = (column.show(_only(by_seed, "tests", main)) for column in _QUALITY)
        difference = Column("− soft", "difference").show(compared)
        p_values = ", ".join(show_p(row["bootstrap_p"]) for row in compared.values()) or "–"
        paper = f"{PAPER_BLEU[variant]:.2f}" if variant in PAPER_BLEU else "–"
        rows.append([variant, str(len(by_seed)), quality, difference, p_values, perplexity, ece, paper])
    return markdown([*header, "paper, IWSLT14"], rows)


def _only(by_seed: Mapping[int, Mapping[str, Any]], kind: str, name: str) -> dict[int, dict[str, Any]]:
    """Return one part of the runs' measures; a run without it is left out."""
    return {seed: cell[kind][name] for seed, cell in by_seed.items() if name in cell[kind]}


def _by_name(cells: Cells, kind: str) -> dict[str, dict[int, dict[str, Any]]]:
    """Return the values of all seeds by variant and name."""
    return {
        f"{variant}, {name}": _only(by_seed, kind, name)
        for variant, by_seed in cells.items()
        for name in dict.fromkeys(name for cell in by_seed.values() for name in cell[kind])
    }
