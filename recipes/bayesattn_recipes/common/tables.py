"""Tables of experiments: mean ± 95 % interval over seeds, and paired differences to a baseline."""

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from rich.console import Console
from scipy import stats

from bayesattn.evaluation.aggregate import Summary, over_runs
from bayesattn_recipes.common.folders import write_csv as write_csv

Name = TypeVar("Name", bound=str)


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
        baseline: The same for the baseline; needs every seed of `ours`.
    """
    missing = sorted(ours.keys() - baseline.keys())
    if missing:
        raise ValueError(f"the baseline must have every seed of ours, but lacks {missing}")
    differences = [ours[seed] - baseline[seed] for seed in sorted(ours)]
    return Paired(over_runs(differences), p_of_mean(differences))


def p_of_mean(differences: Sequence[float]) -> float | None:
    """Return the two-sided p-value of a t-test that the mean is 0; None for fewer than two differences."""
    if len(differences) < 2:
        return None
    size = max(map(abs, differences))
    if max(differences) - min(differences) <= 1e-12 * size:
        # no spread but rounding: all differences are equal
        return 1.0 if size == 0.0 else 0.0
    return float(stats.ttest_1samp(differences, 0.0)[1])  # type: ignore[arg-type]


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values after Holm's correction, in their order."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = largest
    return corrected


def show(summary: Summary, scale: float = 1.0, digits: int = 2) -> str:
    """Return `83.22 ± 0.31`, or the value alone if there is no interval."""
    text = f"{summary.value * scale:.{digits}f}"
    if summary.low is None or summary.high is None:
        return text
    return f"{text} ± {(summary.high - summary.low) / 2 * scale:.{digits}f}"


def show_p(p_value: float | None) -> str:
    """Return a p-value with two digits, `< 0.0001` below that, and a dash if there is none."""
    if p_value is None:
        return "–"
    return "< 0.0001" if p_value < 1e-4 else f"{p_value:.2g}"


# measures of a run by variant and seed
Cells = Mapping[str, Mapping[int, Mapping[str, Any]]]


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        heading: Its heading.
        measure: Key of a run's measures, or a function that reads the number from them; None if a run has none.
        scale: Factor of the numbers shown.
        digits: Decimal places.
    """

    heading: str
    measure: str | Callable[[Mapping[str, Any]], float | None]
    scale: float = 1.0
    digits: int = 2

    def values(self, by_seed: Mapping[int, Mapping[str, Any]]) -> dict[int, float]:
        """Return the measure of every run, by seed; empty if one of them lacks it."""
        found = {
            seed: self.measure(cell) if callable(self.measure) else cell.get(self.measure) for seed, cell in by_seed.items()
        }
        return {} if None in found.values() else found  # type: ignore[return-value]

    def show(self, by_seed: Mapping[int, Mapping[str, Any]], *, interval: bool = True) -> str:
        """Return the mean over runs, with its interval unless the runs are not independent."""
        values = list(self.values(by_seed).values())
        return _show_mean(values, self.scale, self.digits, interval) if values else "–"

    def show_difference(
        self, ours: Mapping[int, Mapping[str, Any]], baseline: Mapping[int, Mapping[str, Any]], *, interval: bool = True
    ) -> list[str]:
        """Return ours minus the baseline over the seeds that both have, and the p-value of a paired t-test."""
        first, second = self.values(ours), self.values(baseline)
        seeds = sorted(first.keys() & second.keys())
        if not seeds:
            return ["–", "–"]
        if not interval:
            return [_show_mean([first[seed] - second[seed] for seed in seeds], self.scale, self.digits, interval), "–"]
        found = paired({seed: first[seed] for seed in seeds}, second)
        return [show(found.difference, self.scale, self.digits), show_p(found.p_value)]


def _show_mean(values: Sequence[float], scale: float, digits: int, interval: bool) -> str:
    summary = over_runs(values)
    return show(summary if interval else replace(summary, low=None, high=None), scale, digits)


def mean_table(
    cells: Cells,
    columns: Sequence[Column],
    *,
    first: str = "attention",
    label: Callable[[str], str] = str,
    has_seeds: bool = True,
    more: Mapping[str, Callable[[str], str]] | None = None,
    sharing: Sequence[str] = (),
) -> str:
    """Return a Markdown table with a row per variant: means over seeds with their intervals.

    Args:
        cells: The finished runs.
        columns: The columns to show.
        first: Heading of the variants.
        label: What the table calls a variant.
        has_seeds: Whether the second column counts the runs.
        more: Further columns, by heading: the content for a variant.
        sharing: Variants whose runs are not independent; they have no interval.
    """
    further = more or {}
    header = [first, *(["seeds"] if has_seeds else []), *(column.heading for column in columns), *further]
    rows = []
    for variant, by_seed in cells.items():
        counted = [str(len(by_seed))] if has_seeds else []
        numbers = [column.show(by_seed, interval=variant not in sharing) for column in columns]
        rows.append([label(variant), *counted, *numbers, *(find(variant) for find in further.values())])
    return markdown(header, rows)


def difference_table(
    cells: Cells,
    columns: Sequence[Column],
    *,
    first: str = "attention",
    label: Callable[[str], str] = str,
    baseline: str = "soft",
    variants: Sequence[str] | None = None,
    sharing: Sequence[str] = (),
) -> str:
    """Return a Markdown table of paired differences to a baseline; empty if it or everything else is missing.

    Args:
        cells: The finished runs.
        columns: The columns to compare.
        first: Heading of the variants.
        label: What the table calls a variant.
        baseline: The variant that all others are compared with.
        variants: The variants to compare; None takes all others.
        sharing: Variants whose runs are not independent; they have neither interval nor test.
    """
    others = [variant for variant in cells if variant != baseline and (variants is None or variant in variants)]
    if baseline not in cells or not others:
        return ""
    rows = []
    for variant in others:
        pairs = (
            column.show_difference(cells[variant], cells[baseline], interval=variant not in sharing) for column in columns
        )
        rows.append([label(variant), *itertools.chain.from_iterable(pairs)])
    return markdown([first, *(part for column in columns for part in (column.heading, "p"))], rows)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; the first column is left-aligned, the others right."""
    lines = [list(header), ["---", *["--:"] * (len(header) - 1)], *map(list, rows)]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def choose(
    what: str, given: Sequence[str] | None, allowed: Sequence[Name], default: Sequence[Name] | None = None
) -> list[Name]:
    """Return the requested names, in the order of `allowed`; None takes the default, or all.

    A variant may be called by either of its names: `wc` or `BAM-WC`.

    Raises:
        ValueError: A name is unknown.
    """
    if given is None:
        return list(allowed if default is None else default)
    known = {_plain(name): name for name in allowed}
    for name in given:
        if _plain(name) not in known:
            raise ValueError(f"{what} must be among {', '.join(allowed)}, got {name!r}")
    wanted = {known[_plain(name)] for name in given}
    return [name for name in allowed if name in wanted]


def _plain(name: str) -> str:
    return name.strip().lower().removeprefix("bam-")


def print_tables(console: Console, text: str) -> None:
    """Print Markdown for a reader: tables with aligned columns, and no line broken."""
    lines: list[str] = []
    for is_table, group in itertools.groupby(text.splitlines(), key=lambda line: line.startswith("|")):
        part = list(group)
        lines += _aligned(part) if is_table else part
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def _aligned(lines: list[str]) -> list[str]:
    # a bar inside a cell is escaped with a backslash
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines]
    header, _, *body = [[cell.strip().replace("\\|", "|") for cell in row] for row in cells]
    widths = [max(map(len, column)) for column in zip(header, *body)]
    rule = ["─" * width for width in widths]
    sides = [str.ljust, *[str.rjust] * (len(widths) - 1)]
    return ["  ".join(side(cell, width) for side, cell, width in zip(sides, row, widths)) for row in (header, rule, *body)]
