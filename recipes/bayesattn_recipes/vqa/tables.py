"""The tables and the curve of the VQA experiment, from the measures of its runs."""

from pathlib import Path
from typing import Any

from bayesattn.evaluation.aggregate import over_runs
from bayesattn.plots.style import COLORS, LINES, MARKERS, legend, new_figure, plain
from bayesattn_recipes.common.tables import markdown, paired, show, show_p
from bayesattn_recipes.vision.cells import Cells

# noise of the curve: its variance in units of the features' own; models that look at photos forget them later
LEVELS = {"shapes": (0.5, 1.0, 2.0), "daquar": (0.5, 1.0, 2.0, 4.0, 8.0), "vqa2": (0.5, 1.0, 2.0, 4.0, 8.0)}
# the paper's VQA table, on VQA-v2: accuracy clean and noisy, PAvPU clean and noisy, in per cent; NOKL is not reported
PAPER = {
    "soft": (66.95, 61.25, 70.04, 65.34),
    "lf": (66.89, 61.43, 69.92, 65.48),
    "lc": (66.93, 61.58, 70.14, 65.60),
    "wf": (66.93, 61.60, 70.09, 65.62),
    "wc": (67.02, 62.89, 71.21, 66.75),
}
# heading, measure, factor, digits
COLUMNS = (
    ("accuracy", "accuracy", 100.0, 2),
    ("leave-one-out", "accuracy_leave_one_out", 100.0, 2),
    ("PAvPU, p ≤ 0.01", "pavpu_01", 100.0, 2),
    ("p ≤ 0.05", "pavpu_05", 100.0, 2),
    ("p ≤ 0.1", "pavpu_10", 100.0, 2),
    ("NLL", "nll", 1.0, 3),
    ("ECE", "ece", 100.0, 2),
)


def render(dataset: str, by_variant: Cells, num_samples: int) -> str:
    """Return the tables of a data set: clean, noisy, by type of question."""
    first = next(iter(next(iter(by_variant.values())).values()))
    conditions = list(dict.fromkeys(key.rsplit(" accuracy_leave_one_out", 1)[0] for key in first if "leave_one_out" in key))
    text = f"## {dataset}\n\nMean over seeds ± half a 95 % t-interval; {num_samples} draws, Welch's test.\n\n"
    for condition in conditions:
        text += f"**{_title(condition)}**\n\n"
        header = ["attention", "seeds", *(heading for heading, *_ in COLUMNS)]
        is_noisy = condition != "clean"
        if dataset == "vqa2" and condition in ("clean", "variance 5"):
            header += ["paper: accuracy", "paper: PAvPU"]
        rows = []
        for variant, by_seed in by_variant.items():
            row = [variant, str(len(by_seed))]
            for _, name, scale, digits in COLUMNS:
                row.append(show(over_runs([cell[f"{condition} {name}"] for cell in by_seed.values()]), scale, digits))
            if len(header) > len(row):
                paper = PAPER.get(variant)
                row += ["–", "–"] if paper is None else [f"{paper[is_noisy]:.2f}", f"{paper[2 + is_noisy]:.2f}"]
            rows.append(row)
        text += markdown(header, rows) + "\n" + _differences(by_variant, condition)
    text += _by_kind(by_variant, first)
    if "clean accuracy_single" in first:
        rows = [
            [
                variant,
                *(show(over_runs([cell[f"{c} accuracy_single"] for cell in by_seed.values()]), 100.0) for c in conditions),
            ]
            for variant, by_seed in by_variant.items()
        ]
        text += "**Accuracy on questions whose answer is one thing, not a list**\n\n"
        text += markdown(["attention", *map(_title, conditions)], rows) + "\n"
    rows = [
        [
            variant,
            f"{next(iter(by_seed.values()))['num_parameters']:,}",
            f"{over_runs([cell['train_seconds'] for cell in by_seed.values()]).value:.0f}",
        ]
        for variant, by_seed in by_variant.items()
    ]
    text += markdown(["attention", "parameters", "seconds of training"], rows) + "\n"
    if any("wups" in key for key in first):
        header = ["attention", "WUPS 0.9", "WUPS 0.0"]
        names = ("clean wups_0.9", "clean wups_0")
        rows = [
            [variant, *(show(over_runs([cell[name] for cell in by_seed.values()]), 100.0) for name in names)]
            for variant, by_seed in by_variant.items()
        ]
        text += markdown(header, rows) + "\n"
    elif dataset == "daquar":
        text += "WUPS was not computed: it needs nltk and its WordNet data.\n\n"
    return text


def _differences(by_variant: Cells, condition: str) -> str:
    """Return the paired differences of every variant to soft attention."""
    rivals = [variant for variant in by_variant if variant != "soft"]
    if "soft" not in by_variant or not rivals:
        return ""
    rows = []
    for variant in rivals:
        row = [f"{variant} − soft"]
        for measure_name in ("accuracy", "pavpu_05", "nll"):
            key = f"{condition} {measure_name}"
            seeds = sorted(by_variant[variant].keys() & by_variant["soft"].keys())
            pair = paired(*({seed: by_variant[v][seed][key] for seed in seeds} for v in (variant, "soft")))
            scale, digits = (1.0, 3) if measure_name == "nll" else (100.0, 2)
            row += [show(pair.difference, scale, digits), show_p(pair.p_value)]
        rows.append(row)
    return markdown(["difference", "accuracy", "p", "PAvPU, p ≤ 0.05", "p", "NLL", "p"], rows) + "\n"


def _by_kind(by_variant: Cells, first: dict[str, Any]) -> str:
    kinds = [key.removeprefix("clean accuracy ") for key in first if key.startswith("clean accuracy ")]
    rows = []
    for variant, by_seed in by_variant.items():
        row = [variant]
        for kind in kinds:
            row += [
                show(over_runs([cell[f"clean {name} {kind}"] for cell in by_seed.values()]), 100.0)
                for name in ("accuracy", "pavpu_05")
            ]
        rows.append(row)
    header = ["attention", *(f"{what} {kind}" for kind in kinds for what in ("accuracy", "PAvPU"))]
    return "**Clean, by type of question** (PAvPU at p ≤ 0.05)\n\n" + markdown(header, rows) + "\n"


def draw_curve(dataset: str, by_variant: Cells, path: Path) -> None:
    """Draw accuracy and PAvPU against the variance of the noise, in units of the features' own."""
    figure, axes = new_figure(8.2, 3.4, columns=2)
    places = [0.0, *LEVELS[dataset]]
    conditions = ["clean", *(f"noise {level:g}x" for level in LEVELS[dataset])]
    for ax, (name, label) in zip(axes[0], (("accuracy", "accuracy"), ("pavpu_05", "PAvPU, p ≤ 0.05")), strict=True):
        for index, (variant, by_seed) in enumerate(by_variant.items()):
            points = [over_runs([cell[f"{condition} {name}"] for cell in by_seed.values()]) for condition in conditions]
            values = [point.value for point in points]
            # that of two runs is 12.7 standard errors to each side, and would hide all others
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
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _title(condition: str) -> str:
    if condition == "clean":
        return "Clean features"
    if condition.startswith("noise "):
        return f"Noise of {condition.removeprefix('noise ').removesuffix('x')} times the features' variance, at test only"
    return "Noise of variance 5, at test only (the paper's)"
