"""Tables of experiments: mean ± 95 % interval over seeds, paired differences to a baseline, the paper's number beside ours.

A cell of an experiment is one finished run: what identifies it (data set, variant, seed) and its measures. Cells are kept as
one JSON file each, so an interrupted experiment goes on where it stopped.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy import stats

from bayesattn.recipes._train import comparable
from bayesattn.report.aggregate import Summary, over_runs
from bayesattn.runs import RunError, write_json
from bayesattn.runs import write_csv as write_csv


@dataclass(frozen=True)
class Paired:
    """Difference to a baseline over runs that share their seed.

    Attributes:
        difference: Mean of ours minus baseline, with its interval.
        p_value: Two-sided paired t-test; 1 where all differences are 0, None for fewer than two pairs.
    """

    difference: Summary
    p_value: float | None


def paired(ours: dict[int, float], baseline: dict[int, float]) -> Paired:
    """Compare two variants seed by seed.

    Args:
        ours: Measure by seed.
        baseline: The same of the baseline; needs every seed of `ours`.
    """
    missing = sorted(ours.keys() - baseline.keys())
    if missing:
        raise ValueError(f"baseline lacks seeds {missing}; allowed: every seed of ours")
    differences = [ours[seed] - baseline[seed] for seed in sorted(ours)]
    if len(differences) < 2:
        return Paired(over_runs(differences), None)
    if len(set(differences)) == 1:
        # no spread to test against: equal everywhere, or by the same amount everywhere
        return Paired(over_runs(differences), 1.0 if differences[0] == 0.0 else 0.0)
    p_value = float(stats.ttest_1samp(differences, 0.0)[1])  # type: ignore[arg-type]
    return Paired(over_runs(differences), p_value)


def show(summary: Summary, scale: float = 1.0, digits: int = 2) -> str:
    """Return `83.22 ± 0.31`, or the value alone where there is no interval."""
    text = f"{summary.value * scale:.{digits}f}"
    if summary.low is None or summary.high is None:
        return text
    return f"{text} ± {(summary.high - summary.low) / 2 * scale:.{digits}f}"


def show_p(p_value: float | None) -> str:
    """Return a p-value with two digits, `< 0.0001` below that, and a dash where there is none."""
    if p_value is None:
        return "–"
    return "< 0.0001" if p_value < 1e-4 else f"{p_value:.2g}"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; the first column is left-aligned, the others right."""
    lines = [list(header), ["---", *["--:"] * (len(header) - 1)], *map(list, rows)]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def write_cell(path: Path, identity: dict[str, Any], measures: dict[str, Any]) -> None:
    """Write one finished run of an experiment; the file appears whole or not at all."""
    write_json(path, {"identity": identity, "measures": measures})


def read_cell(path: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """Return the measures of a finished run, or None if it has not been run.

    Raises:
        RunError: The file is broken, or of a run with other settings: mixing the two would make a table of neither.
    """
    if not path.exists():
        return None
    try:
        cell = json.loads(path.read_text(encoding="utf-8"))
        found, measures = cell["identity"], cell["measures"]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise RunError(f"{path} is not a finished run of an experiment: {error}; remove it to run it again") from None
    found, expected = comparable(found), comparable(json.loads(json.dumps(identity)))
    if found != expected:
        changed = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
        raise RunError(f"{path} was run with other settings ({', '.join(changed)}); choose another folder or remove it")
    return measures
