"""The tables and the curve of the VQA experiment, from the measures of its runs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from bayesattn.evaluation.aggregate import over_runs
from bayesattn.plots.style import COLORS, LINES, MARKERS, legend, new_figure, plain
from bayesattn_recipes.common.figures import write_figure
from bayesattn_recipes.common.tables import Cells, Column, difference_table, mean_table

# noise of the curve: its variance in units of the features' own; models of photos break down only at larger noise
LEVELS = {"shapes": (0.5, 1.0, 2.0), "daquar": (0.5, 1.0, 2.0, 4.0, 8.0), "vqa2": (0.5, 1.0, 2.0, 4.0, 8.0)}
# the paper's VQA table, on VQA-v2: accuracy clean and noisy, PAvPU clean and noisy, in percent; NOKL is not reported
PAPER = {
    "soft": (66.95, 61.25, 70.04, 65.34),
    "lf": (66.89, 61.43, 69.92, 65.48),
    "lc": (66.93, 61.58, 70.14, 65.60),
    "wf": (66.93, 61.60, 70.09, 65.62),
    "wc": (67.02, 62.89, 71.21, 66.75),
}
COLUMNS = (
    Column("accuracy", "accuracy", 100.0),
    Column("leave-one-out", "accuracy_leave_one_out", 100.0),
    Column("PAvPU, p ≤ 0.01", "pavpu_01", 100.0),
    Column("p ≤ 0.05", "pavpu_05", 100.0),
    Column("p ≤ 0.1", "pavpu_10", 100.0),
    Column("NLL", "nll", digits=3),
    Column("ECE", "ece", 100.0),
)
COMPARED = (
    Column("accuracy", "accuracy", 100.0),
    Column("PAvPU, p ≤ 0.05", "pavpu_05", 100.0),
    Column("NLL", "nll", digits=3),
)


def render(dataset: str, by_variant: Cells, num_samples: int) -> str:
    """Return the tables of a data set: clean, noisy, by type of question."""
    first = next(iter(next(iter(by_variant.values())).values()))
    conditions = list(dict.fromkeys(key.rsplit(" accuracy_leave_one_out", 1)[0] for key in first if "leave_one_out" in key))
    text = f"## {dataset}\n\nMean over seeds ± half a 95 % t-interval; {num_samples} draws, Welch's test.\n\n"
    for condition in conditions:
        more = _paper_columns(condition) if dataset == "vqa2" and condition in ("clean", "variance 5") else None
        text += f"**{_title(condition)}**\n\n" + mean_table(by_variant, _of(condition, COLUMNS), more=more) + "\n"
        differences = difference_table(
            by_variant, _of(condition, COMPARED), first="difference", label=lambda variant: f"{variant} − soft"
        )
        text += differences + "\n" if differences else ""
    kinds = [key.removeprefix("clean accuracy ") for key in first if key.startswith("clean accuracy ")]
    columns = [
        Column(f"{heading} {kind}", f"clean {name} {kind}", 100.0)
        for kind in kinds
        for heading, name in (("accuracy", "accuracy"), ("PAvPU", "pavpu_05"))
    ]
    text += "**Clean, by type of question** (PAvPU at p ≤ 0.05)\n\n"
    text += mean_table(by_variant, columns, has_seeds=False) + "\n"
    if "clean accuracy_single" in first:
        columns = [Column(_title(condition), f"{condition} accuracy_single", 100.0) for condition in conditions]
        text += "**Accuracy on questions whose answer is one thing, not a list**\n\n"
        text += mean_table(by_variant, columns, has_seeds=False) + "\n"
    more = {
        "parameters": lambda variant: f"{next(iter(by_variant[variant].values()))['num_parameters']:,}",
        "seconds of training": lambda variant: f"{_mean_seconds(by_variant, variant):.0f}",
    }
    text += mean_table(by_variant, [], has_seeds=False, more=more) + "\n"
    if any("wups" in key for key in first):
        columns = [Column("WUPS 0.9", "clean wups_0.9", 100.0), Column("WUPS 0.0", "clean wups_0", 100.0)]
        text += mean_table(by_variant, columns, has_seeds=False) + "\n"
    elif dataset == "daquar":
        text += "WUPS was not computed: it needs nltk and its WordNet data.\n\n"
    return text


def _of(condition: str, columns: Sequence[Column]) -> list[Column]:
    """Return the columns with the measures of one condition."""
    return [replace(column, measure=f"{condition} {column.measure}") for column in columns]


def _paper_columns(condition: str) -> dict[str, Callable[[str], str]]:
    is_noisy = condition != "clean"

    def show_paper(place: int) -> Callable[[str], str]:
        return lambda variant: f"{PAPER[variant][place]:.2f}" if variant in PAPER else "–"

    return {"paper: accuracy": show_paper(is_noisy), "paper: PAvPU": show_paper(2 + is_noisy)}


def _mean_seconds(by_variant: Cells, variant: str) -> float:
    return over_runs([cell["train_seconds"] for cell in by_variant[variant].values()]).value


def draw_curve(dataset: str, by_variant: Cells, path: Path) -> None:
    """Draw accuracy and PAvPU against the variance of the noise, in units of the features' own."""
    figure, axes = new_figure(8.2, 3.4, columns=2)
    places = [0.0, *LEVELS[dataset]]
    conditions = ["clean", *(f"noise {level:g}x" for level in LEVELS[dataset])]
    for ax, (name, label) in zip(axes[0], (("accuracy", "accuracy"), ("pavpu_05", "PAvPU, p ≤ 0.05")), strict=True):
        for index, (variant, by_seed) in enumerate(by_variant.items()):
            points = [over_runs([cell[f"{condition} {name}"] for cell in by_seed.values()]) for condition in conditions]
            values = [point.value for point in points]
            # the interval of two runs is 12.7 standard errors to each side and would hide all others
            errors = [0.0 if point.high is None or point.num_runs < 3 else point.high - point.value for point in points]
            style = {"color": COLORS[index], "marker": MARKERS[index], "linestyle": LINES[index % len(LINES)]}
            # side by side, so that the intervals can be told apart
            aside = 0.01 * places[-1] * (index - (len(by_variant) - 1) / 2)
            ax.errorbar(
                [place + aside for place in places],
                values,
                yerr=errors,
                label=variant,
                markersize=4,
                linewidth=1.2,
                capsize=2,
                **style,
            )
        ax.set_xlabel("variance of the noise / variance of the features")
        ax.set_ylabel(label)
        plain(ax)
    legend(axes[0, 0])
    write_figure(path, figure)


def _title(condition: str) -> str:
    if condition == "clean":
        return "Clean features"
    if condition.startswith("noise "):
        return f"Noise of {condition.removeprefix('noise ').removesuffix('x')} times the features' variance, at test only"
    return "Noise of variance 5, at test only (the paper's)"
