"""Pages of results: paired differences to soft attention, Holm's correction, a forest plot, and tables, all from CSV files.

A recipe's module `page` reads the CSV files of `docs/results` and returns a `Page`; `rebuild` writes its figure and the
block between the marks of its Markdown file, without training anything.
"""

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from bayesattn.files import write_bytes
from bayesattn.plots.style import BAD, COLORS, MARKERS, NEUTRAL, new_figure, plain
from bayesattn_recipes.common.figures import write_figure
from bayesattn_recipes.common.tables import holm, markdown, paired, show_p

BEGIN, END = "<!-- table: bayesattn reproduce --from-csv -->", "<!-- end of table -->"
# a difference counts as clear below this p-value, after Holm's correction over the page
ALPHA = 0.01


@dataclass(frozen=True)
class Effect:
    """A difference to soft attention over paired runs; above 0 is better.

    Attributes:
        group: Data set and measure.
        kind: What is compared with soft attention.
        runs: Pairs.
        baseline: Mean of soft attention.
        value: The difference.
        low: Lower end of its 95 % interval.
        high: Upper end.
        p_value: p-value of the paired t-test.
        search: How many settings were tried for soft attention and for this kind.
        paper: The paper's gain.
        holm: The p-value after Holm's correction.
        is_drawn: Whether the figure shows it.
    """

    group: str
    kind: str
    runs: int
    baseline: float
    value: float
    low: float
    high: float
    p_value: float
    search: str
    paper: float | None = None
    holm: float = 1.0
    is_drawn: bool = True

    @property
    def is_clear(self) -> bool:
        """Whether the difference is clear."""
        return self.holm < ALPHA


@dataclass(frozen=True)
class Page:
    """The content of a page, from CSV files.

    Attributes:
        effects: The differences, with Holm's correction over all of them.
        title: Title of the figure.
        axis: What its axis measures.
        digits: Decimal places of the differences.
    """

    effects: tuple[Effect, ...]
    title: str
    axis: str
    digits: int = 2


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file; none if it does not exist."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def compare(
    group: str,
    kind: str,
    ours: Mapping[int, float],
    soft: Mapping[int, float],
    *,
    search: str,
    paper: float | None = None,
    scale: float = 1.0,
    is_drawn: bool = True,
) -> Effect:
    """Return the effect of a kind over the seeds that both have; a negative scale is for measures where less is better.

    Args:
        group: Data set and measure.
        kind: What is compared.
        ours: Its measures by seed.
        soft: Soft attention's.
        search: How many settings were tried for soft attention and for this kind.
        paper: The paper's gain.
        scale: Factor of the numbers shown.
        is_drawn: Whether the figure shows it.
    """
    seeds = sorted(ours.keys() & soft.keys())
    if len(seeds) < 2:
        raise ValueError(f"{kind} of {group} must share at least 2 seeds with soft attention, got {len(seeds)}")
    found = paired({seed: scale * ours[seed] for seed in seeds}, {seed: scale * soft[seed] for seed in seeds})
    low, high = found.difference.low, found.difference.high
    assert low is not None
    assert high is not None
    assert found.p_value is not None
    mean = abs(scale) * sum(soft[seed] for seed in seeds) / len(seeds)
    return Effect(
        group, kind, len(seeds), mean, found.difference.value, low, high, found.p_value, search, paper, is_drawn=is_drawn
    )


def compare_kinds(
    rows: Sequence[Mapping[str, str]], group: str, measures: Mapping[str, tuple[str, float]], **options: Any
) -> list[Effect]:
    """Return the effects of all kinds in a comparison with equal search (`common.search`) on one data set, by measure.

    Args:
        rows: Rows of its CSV file.
        group: Name of the data set; the measure's is added if there are several.
        measures: Column and scale by name.
        options: Passed to `compare`.
    """
    runs: dict[str, list[Mapping[str, str]]] = {}
    for row in rows:
        runs.setdefault(row["kind"], []).append(row)
    found = []
    for measure, (column, scale) in measures.items():
        values = {kind: {int(row["seed"]): float(row[column]) for row in own} for kind, own in runs.items()}
        for kind, own in runs.items():
            if kind != "soft":
                search = f"{runs['soft'][0]['settings_tried']} / {own[0]['settings_tried']}"
                name = f"{group}, {measure}" if len(measures) > 1 else group
                found.append(compare(name, kind, values[kind], values["soft"], search=search, scale=scale, **options))
    return found


def corrected(effects: Sequence[Effect]) -> tuple[Effect, ...]:
    """Return the effects with Holm's correction over all of them."""
    found = holm([effect.p_value for effect in effects])
    return tuple(replace(effect, holm=p_value) for effect, p_value in zip(effects, found, strict=True))


def effect_table(page: Page) -> str:
    """Return the one table of a page."""
    rows = []
    for effect in page.effects:
        half = (effect.high - effect.low) / 2
        rows.append(
            [
                effect.group,
                effect.kind,
                str(effect.runs),
                effect.search,
                f"{effect.baseline:.{page.digits}f}",
                f"{effect.value:+.{page.digits}f} ± {half:.{page.digits}f}",
                show_p(effect.holm),
                "–" if effect.paper is None else f"{effect.paper:+.2f}",
            ]
        )
    header = [
        "data set",
        "attention",
        "pairs",
        "settings tried: soft / this",
        "soft",
        "difference to soft",
        "p, Holm",
        "paper's gain",
    ]
    return markdown(header, rows)


def side_by_side(effects: Sequence[Effect], measures: Sequence[str], digits: int) -> str:
    """Return a table with one line per data set and kind, its measures side by side.

    Args:
        effects: Their groups are "data set, measure".
        measures: In the order of the effects of a data set.
        digits: Decimal places of the differences.
    """
    lines: dict[tuple[str, str], list[str]] = {}
    for effect in effects:
        dataset = next(effect.group.removesuffix(f", {name}") for name in measures if effect.group.endswith(f", {name}"))
        line = lines.setdefault((dataset, effect.kind), [dataset, effect.kind, str(effect.runs), effect.search])
        half = (effect.high - effect.low) / 2
        line += [f"{effect.value:+.{digits}f} ± {half:.{digits}f}", show_p(effect.holm)]
    header = ["data set", "attention", "pairs", "settings tried: soft / this"]
    return markdown(header + [cell for name in measures for cell in (name, "p, Holm")], list(lines.values()))


def forest(page: Page, path: Path) -> None:
    """Draw the differences with their intervals, grouped by data set, and the paper's gains; readable at 700 pixels."""
    drawn = [effect for effect in page.effects if effect.is_drawn]
    groups = list(dict.fromkeys(effect.group for effect in drawn))
    kinds = list(dict.fromkeys(effect.kind for effect in drawn))
    height = 1.1 + 0.19 * (len(drawn) + 0.6 * len(groups))
    figure, axes = new_figure(7.0, height)
    ax: Axes = axes[0, 0]
    place, ticks = 0.0, []
    seen: set[str] = set()
    for group in groups:
        inside = [effect for effect in drawn if effect.group == group]
        ticks.append(place + (len(inside) - 1) / 2)
        for effect in inside:
            index = kinds.index(effect.kind)
            # a color that comes again has another marker
            color, marker = COLORS[index % len(COLORS)], MARKERS[(index + index // len(COLORS)) % len(MARKERS)]
            label = None if effect.kind in seen else effect.kind
            seen.add(effect.kind)
            ax.plot([effect.low, effect.high], [place, place], color=color, linewidth=1.6)
            fill = color if effect.is_clear else "white"
            look = {"marker": marker, "color": color, "markerfacecolor": fill, "markersize": 5.5, "linestyle": ""}
            ax.plot(effect.value, place, label=label, **look)
            if effect.paper is not None:
                name = None if "paper" in seen else "the paper's gain"
                seen.add("paper")
                ax.plot(effect.paper, place, marker="*", color=BAD, markersize=9, linestyle="", label=name)
            place += 1.0
        place += 0.6
    ax.axvline(0.0, color=NEUTRAL, linewidth=1.0)
    ax.set_yticks(ticks, groups, fontsize=9)
    ax.invert_yaxis()
    ax.set_xlabel(f"{page.axis}\nright of 0: better than soft; filled: p < {ALPHA} after Holm", fontsize=9)
    plain(ax)
    ax.set_title(page.title, fontsize=10, loc="left")
    ax.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    write_figure(path, figure, dpi=120)


def with_table(text: str, table: str) -> str:
    """Return a page's text with its block between the marks replaced."""
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ValueError(f"the page must have exactly one block from {BEGIN!r} to {END!r}")
    return pattern.sub(lambda _: f"{BEGIN}\n{table}{END}", text)


def rebuild(folder: Path, name: str, page: Page, table: str | None = None) -> Path:
    """Write `NAME.png` and the table of `NAME.md` in a folder of results; return the path of the page.

    Args:
        folder: Folder of the pages and their CSV files.
        name: Name of the page.
        page: The content from the CSV files.
        table: Replaces the result of `effect_table`.
    """
    path = folder / f"{name}.md"
    text = with_table(path.read_text(encoding="utf-8"), table or effect_table(page))
    forest(page, folder / f"{name}.png")
    write_bytes(path, text.encode())
    return path
