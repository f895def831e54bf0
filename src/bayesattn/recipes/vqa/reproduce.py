"""The paper's VQA table beside ours: accuracy and PAvPU on clean and noisy features, several seeds, paired tests.

As in the paper, the accuracy is that of the deterministic prediction, and the certainty of an answer comes from M = 20
draws of attention and dropout together (dropout alone where attention is soft), by Welch's test on the probabilities.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from bayesattn.metrics import expected_calibration_error, pavpu
from bayesattn.metrics.pavpu import THRESHOLDS
from bayesattn.plots._style import COLORS, LINES, MARKERS, legend, new_figure, plain
from bayesattn.recipes._tables import markdown, paired, read_cell, show, show_p, write_cell, write_csv
from bayesattn.recipes._train import one_thread, progress
from bayesattn.recipes.vqa.accuracy import soft_targets, wordnet, wups
from bayesattn.recipes.vqa.data import Split, load_splits
from bayesattn.recipes.vqa.evaluate import PAPER_VARIANCE, Condition, available_methods, choose_device, tabulate
from bayesattn.recipes.vqa.model import MCAN
from bayesattn.recipes.vqa.train import VQAConfig, load_config, load_run, train_run
from bayesattn.report.aggregate import over_runs
from bayesattn.runs import write_bytes

DATASETS = ("shapes", "daquar", "vqa2")
VARIANTS = ("soft", "nokl", "lf", "lc", "wf", "wc")
NUM_SAMPLES = 20
# noise of the curve: its variance in units of the features' own
LEVELS = (0.5, 1.0, 2.0)
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


def reproduce(
    names: Sequence[str] | None,
    variants: Sequence[str] | None,
    *,
    num_seeds: int,
    data: Path | None,
    out: Path,
    console: Console,
) -> Path:
    """Train every variant on every data set with several seeds; write and print the tables, and return their file.

    Args:
        names: Data sets; None takes those whose files are in `data`, and shapes.
        variants: Of `VARIANTS`; None takes all. Differences are to `soft`, where it is among them.
        num_seeds: Runs per variant.
        data: The folder of the data sets.
        out: Folder of the runs; a finished one is not repeated.
        console: Where to print.
    """
    names = _choose("datasets", names, DATASETS, [name for name in DATASETS if name == "shapes" or _is_there(name, data)])
    variants = _choose("variants", variants, VARIANTS, list(VARIANTS))
    results: dict[str, dict[str, dict[int, dict[str, float]]]] = {}
    with progress(console) as display:
        task = display.add_task("runs", total=len(names) * len(variants) * num_seeds)
        for dataset in names:
            for variant in variants:
                for seed in range(num_seeds):
                    cell = run_cell(dataset, variant, seed, data, out)
                    results.setdefault(dataset, {}).setdefault(variant, {})[seed] = cell
                    display.advance(task)
    text = "".join(_section(dataset, by_variant) for dataset, by_variant in results.items())
    rows = [
        {"dataset": dataset, "variant": variant, "seed": seed, "measure": measure, "value": value}
        for dataset, by_variant in results.items()
        for variant, by_seed in by_variant.items()
        for seed, cell in by_seed.items()
        for measure, value in cell.items()
    ]
    write_csv(out / "vqa.csv", rows)
    for dataset, by_variant in results.items():
        draw_curve(by_variant, out / f"vqa-{dataset}-noise.png")
    write_bytes(out / "vqa.md", text.encode())
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    return out / "vqa.md"


def run_cell(dataset: str, variant: str, seed: int, data: Path | None, out: Path) -> dict[str, float]:
    """Train and measure one run, or read what an earlier call measured."""
    name = f"{dataset}-{variant}"
    config = load_config(name, [f"seed={seed}"])
    identity = {"config": dataclasses.asdict(config), "num_samples": NUM_SAMPLES, "levels": LEVELS}
    path = out / "cells" / f"{name}-{seed}.json"
    cell = read_cell(path, identity)
    if cell is None:
        folder = out / f"{name}-{seed}"
        train_run(config, folder, data=data, resume=True)
        cell = measure_run(folder, config, data)
        write_cell(path, identity, cell)
    return cell


@one_thread()
def measure_run(folder: Path, config: VQAConfig, data: Path | None) -> dict[str, float]:
    """Return every measure of a run on the test questions, by `condition measure`; nothing is kept per question."""
    _, model = load_run(folder)
    model = model.to(choose_device())
    split = load_splits(config.data, data)["test"]
    conditions = [Condition("clean", split)]
    conditions += [Condition(f"noise {level:g}x", split, level * split.regions.variance) for level in LEVELS]
    if config.data.dataset != "shapes":
        conditions.append(Condition("variance 5", split, PAPER_VARIANCE))
    measures = {}
    for condition in conditions:
        for name, value in measure(model, condition, available_methods(config)[1]).items():
            measures[f"{condition.name} {name}"] = value
    return measures


def measure(model: MCAN, condition: Condition, method: str, num_samples: int = NUM_SAMPLES) -> dict[str, float]:
    """Return the measures of one condition: accuracies of the deterministic answer, the rest from draws."""
    split = condition.split
    plain_table = tabulate(model, condition, "mean", num_samples, seed=0)
    drawn = tabulate(model, condition, method, num_samples, seed=0)
    assert drawn.p_value is not None
    accuracy = plain_table.accuracy
    official = _accuracy_of(plain_table.predicted, split, model)
    measures = {
        "accuracy": float(accuracy.mean()),
        "accuracy_leave_one_out": float(official.mean()),
        "accuracy_drawn": float(drawn.accuracy.mean()),
        "nll": float(drawn.nll.mean()),
        "ece": float(expected_calibration_error(drawn.confidence, drawn.accuracy)),
    }
    for threshold, value in zip(THRESHOLDS, pavpu(accuracy, drawn.p_value, THRESHOLDS).tolist(), strict=True):
        measures[f"pavpu_{round(100 * threshold):02d}"] = value
    kinds = [question.kind for question in split.questions]
    for kind in sorted(set(kinds)):
        chosen = torch.tensor([other == kind for other in kinds])
        measures[f"accuracy {kind}"] = float(accuracy[chosen].mean())
        measures[f"pavpu_05 {kind}"] = float(pavpu(accuracy[chosen], drawn.p_value[chosen]))
    if all(len(question.answers) == 1 for question in split.questions):
        measures |= _wups(plain_table.predicted.tolist(), split, model)
    return measures


def _accuracy_of(predicted: torch.Tensor, split: Split, model: MCAN) -> torch.Tensor:
    """Return the leave-one-out accuracy of the predicted answers, a few questions at a time."""
    parts = []
    for start in range(0, len(split), 1024):
        targets = soft_targets(split.questions[start : start + 1024], model.vocabulary, "leave_one_out")
        parts.append(targets.gather(1, predicted[start : start + 1024, None]).squeeze(1))
    return torch.cat(parts)


def _wups(predicted: list[int], split: Split, model: MCAN) -> dict[str, float]:
    """Return WUPS at both usual thresholds, or nothing where WordNet is not at hand."""
    try:
        reader = wordnet()
    except ValueError:
        return {}
    said = [model.vocabulary.answers[index] for index in predicted]
    right = [question.answers[0] for question in split.questions]
    return {f"wups_{threshold:g}": wups(said, right, threshold, reader) for threshold in (0.9, 0.0)}


def _section(dataset: str, by_variant: dict[str, dict[int, dict[str, float]]]) -> str:
    """Return the tables of a data set: clean, noisy, by type of question."""
    first = next(iter(next(iter(by_variant.values())).values()))
    conditions = list(dict.fromkeys(key.rsplit(" accuracy_leave_one_out", 1)[0] for key in first if "leave_one_out" in key))
    seeds = len(next(iter(by_variant.values())))
    text = f"## {dataset}\n\nMean over {seeds} seeds ± half a 95 % t-interval; {NUM_SAMPLES} draws, Welch's test.\n\n"
    for condition in conditions:
        text += f"**{_title(condition)}**\n\n"
        header = ["attention", *(heading for heading, *_ in COLUMNS)]
        is_noisy = condition != "clean"
        if dataset == "vqa2" and condition in ("clean", "variance 5"):
            header += ["paper: accuracy", "paper: PAvPU"]
        rows = []
        for variant, by_seed in by_variant.items():
            row = [variant]
            for _, name, scale, digits in COLUMNS:
                row.append(show(over_runs([cell[f"{condition} {name}"] for cell in by_seed.values()]), scale, digits))
            if len(header) > len(row):
                paper = PAPER.get(variant)
                row += ["–", "–"] if paper is None else [f"{paper[is_noisy]:.2f}", f"{paper[2 + is_noisy]:.2f}"]
            rows.append(row)
        text += markdown(header, rows) + "\n" + _differences(by_variant, condition)
    text += _by_kind(by_variant, first)
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


def _differences(by_variant: dict[str, dict[int, dict[str, float]]], condition: str) -> str:
    """Return the paired differences of every variant to soft attention."""
    rivals = [variant for variant in by_variant if variant != "soft"]
    if "soft" not in by_variant or not rivals:
        return ""
    rows = []
    for variant in rivals:
        row = [f"{variant} − soft"]
        for measure_name in ("accuracy", "pavpu_05", "nll"):
            key = f"{condition} {measure_name}"
            pair = paired(*({seed: cell[key] for seed, cell in by_variant[v].items()} for v in (variant, "soft")))
            scale, digits = (1.0, 3) if measure_name == "nll" else (100.0, 2)
            row += [show(pair.difference, scale, digits), show_p(pair.p_value)]
        rows.append(row)
    return markdown(["difference", "accuracy", "p", "PAvPU, p ≤ 0.05", "p", "NLL", "p"], rows) + "\n"


def _by_kind(by_variant: dict[str, dict[int, dict[str, float]]], first: dict[str, float]) -> str:
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


def draw_curve(by_variant: dict[str, dict[int, dict[str, float]]], path: Path) -> None:
    """Draw accuracy and PAvPU against the variance of the noise, in units of the features' own."""
    figure, axes = new_figure(8.2, 3.4, columns=2)
    places = [0.0, *LEVELS]
    conditions = ["clean", *(f"noise {level:g}x" for level in LEVELS)]
    for ax, (name, label) in zip(axes[0], (("accuracy", "accuracy"), ("pavpu_05", "PAvPU, p ≤ 0.05")), strict=True):
        for index, (variant, by_seed) in enumerate(by_variant.items()):
            points = [over_runs([cell[f"{condition} {name}"] for cell in by_seed.values()]) for condition in conditions]
            values = [point.value for point in points]
            errors = [0.0 if point.high is None else point.high - point.value for point in points]
            style = {"color": COLORS[index], "marker": MARKERS[index], "linestyle": LINES[index % len(LINES)]}
            ax.errorbar(places, values, yerr=errors, label=variant, markersize=4, linewidth=1.2, capsize=2, **style)
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


def _choose(what: str, given: Sequence[str] | None, allowed: Sequence[str], default: list[str]) -> list[str]:
    for name in given or ():
        if name not in allowed:
            raise ValueError(f"{what} has {name!r}; allowed: {', '.join(allowed)}")
    return default if given is None else list(dict.fromkeys(given))


def _is_there(name: str, data: Path | None) -> bool:
    return data is not None and (data / name).is_dir()
