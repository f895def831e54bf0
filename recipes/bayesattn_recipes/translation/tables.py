"""The tables of `reproduce` from its finished runs: Markdown beside the paper's BLEU, and every number as CSV."""

from typing import Any

from bayesattn.evaluation.aggregate import over_runs
from bayesattn_recipes.common import tables as _tables
from bayesattn_recipes.translation import bleu
from bayesattn_recipes.translation.measure import REJECTED
from bayesattn_recipes.translation.text import Pairs

# IWSLT14 German–English, tokenised and lower-cased (Sec. 4.4); the last two are in comments of the paper's source
PAPER_BLEU = {"soft": 32.77, "dirichlet": 30.05, "enum": 33.68, "sample": 33.30, "wc": 33.81, "lc": 33.63, "exact": 33.29}

# by variant and seed; the measures of a run, or why it diverged
Cells = dict[str, dict[int, dict[str, Any]]]


def finished_runs(cells: Cells) -> Cells:
    """Return the runs that did not diverge, without variants that have none."""
    kept = {v: {s: cell for s, cell in by_seed.items() if "diverged" not in cell} for v, by_seed in cells.items()}
    return {variant: by_seed for variant, by_seed in kept.items() if by_seed}


def csv_rows(dataset: str, cells: Cells) -> list[dict[str, Any]]:
    """Return one row for every variant, seed and test set; of a run that diverged, what it said."""
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
    """Return the Markdown of one data set: quality beside the paper's BLEU, and the worth of the uncertainty."""
    finished = finished_runs(cells)
    any_soft = next(iter(finished["soft"].values()))
    tests = list(any_soft["tests"])
    main = tests[0]
    rows = [
        _quality_row(variant, by_seed, main, [row for row in comparisons if row["variant"] == variant])
        for variant, by_seed in finished.items()
    ]
    header = ["attention", "seeds", f"BLEU, {main}", "− soft", "p (bootstrap), each seed", "perplexity", "token ECE"]
    others = [
        [
            variant,
            *(_show_all([cell["tests"][t]["bleu"] for cell in by_seed.values() if t in cell["tests"]]) for t in tests[1:]),
        ]
        for variant, by_seed in finished.items()
    ]
    lines = [
        f"## {dataset}, split {digest[:16]}\n\n",
        _tables.markdown([*header, "paper, IWSLT14"], rows),
        f"\n{any_soft['tests'][main]['bleu_signature']}; paired bootstrap of 1,000 resamples.\n\n",
        *(
            f"{variant}, seed {seed}, diverged: {cell['diverged']}.\n\n"
            for variant, by_seed in cells.items()
            for seed, cell in by_seed.items()
            if "diverged" in cell
        ),
    ]
    if tests[1:]:
        lines += [_tables.markdown(["BLEU", *tests[1:]], others), "\n"]
    lines += [_tables.markdown(_CALIBRATION_HEADER, _calibration_rows(finished)), "\n"]
    lines += [_tables.markdown(_UNCERTAINTY_HEADER, _uncertainty_rows(finished)), "\n"]
    return "".join(lines)


def _show_all(values: list[float]) -> str:
    return _tables.show(over_runs(values)) if values else "–"


def _quality_row(variant: str, by_seed: dict[int, Any], main: str, comparisons: list[dict[str, Any]]) -> list[str]:
    def shown(name: str, digits: int = 2) -> str:
        return _tables.show(over_runs([cell["tests"][main][name] for cell in by_seed.values()]), digits=digits)

    return [
        variant,
        str(len(by_seed)),
        shown("bleu"),
        _show_all([row["difference"] for row in comparisons]),
        ", ".join(_tables.show_p(row["bootstrap_p"]) for row in comparisons) or "–",
        shown("perplexity"),
        shown("token_ece", digits=3),
        f"{PAPER_BLEU[variant]:.2f}" if variant in PAPER_BLEU else "–",
    ]


def _by_name(by_seed: dict[int, Any], kind: str) -> dict[str, list[dict[str, Any]]]:
    """Return what the seeds say under every name; a run that was not measured so closely says nothing."""
    found: dict[str, list[dict[str, Any]]] = {}
    for cell in by_seed.values():
        for name, values in cell[kind].items():
            found.setdefault(name, []).append(values)
    return found


_CALIBRATION_HEADER = ["attention, draws", "perplexity", "token accuracy", "token ECE"]


def _calibration_rows(cells: Cells) -> list[list[str]]:
    rows = []
    for variant, by_seed in cells.items():
        for method, found in _by_name(by_seed, "calibration").items():
            columns = (("perplexity", 3), ("token_accuracy", 4), ("token_ece", 4))
            rows.append(
                [f"{variant}, {method}", *(_tables.show(over_runs([f[n] for f in found]), digits=d) for n, d in columns)]
            )
    return rows


_UNCERTAINTY_HEADER = ["attention, draws, signal", "Spearman chrF", "Spearman BLEU", "BLEU, all", "BLEU, 20 % withheld"]


def _uncertainty_rows(cells: Cells) -> list[list[str]]:
    rows = []
    for variant, by_seed in cells.items():
        for signal, found in _by_name(by_seed, "uncertainty").items():
            numbers = [[f["spearman_chrf"], f["spearman_bleu"], f["rejection"][0], f["rejection"][2]] for f in found]
            columns = zip(*numbers, strict=True)
            shown = [_tables.show(over_runs(list(c)), digits=d) for c, d in zip(columns, (3, 3, 2, 2), strict=True)]
            rows.append([f"{variant}, {signal}", *shown])
    return rows
