"""How settings are chosen: every one of a grid on a few tasks, ranked on validation texts. No test text is read.

    python -m bayesattn.recipes.language.search --tasks rte,mrpc,cola --jobs 8 --data DIR --out runs/search

Validation texts are held out of the training file (`data.py`); GLUE's dev set, which is the test set here, is not predicted.
Each trained variant has a grid of its own with equally many settings, so the baseline gets the settings that suit it best.
One setting is chosen for all tasks: of those whose validation accuracy, averaged over tasks and seeds, is within
`TOLERANCE` of the grid's best, the one with the lowest validation NLL. Soft attention counts without draws, Bayesian
attention with 20. Finished measurements are kept, so the same command goes on where it stopped.
"""

import argparse
import dataclasses
import itertools
import json
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bayesattn.metrics import evaluate_predictions
from bayesattn.recipes._tables import markdown, read_cell, write_cell, write_csv
from bayesattn.recipes._train import progress
from bayesattn.recipes.language.metrics import GLUE_METRICS
from bayesattn.recipes.language.predictor import Predictor, available_methods
from bayesattn.recipes.language.prepare import Prepared
from bayesattn.recipes.language.tasks import find_task
from bayesattn.recipes.language.train import LanguageConfig, load_config, make_collator, prepare_run, train_model
from bayesattn.recipes.language.work import run_all, unpacked, warm_up
from bayesattn.runs import write_bytes

# not those of the tables
FIRST_SEED = 100
NUM_SAMPLES = 20
# of accuracy: what the seeds of one setting differ by
TOLERANCE = 0.01
MEASURES = ("accuracy", "nll", "ece", "aurc")

_SPEED: dict[str, list[Any]] = {"training.learning_rate": [5e-5, 1e-4], "training.epochs": [3, 6]}
# by trained variant; a name with commas sets several values alike
GRIDS: dict[str, dict[str, list[Any]]] = {
    "soft": {**_SPEED, "dropout,attention_dropout,classifier_dropout": [0.1, 0.2]},
    "BAM-NOKL": {**_SPEED, "attention.weibull_k": [1, 0.5]},
    # a pretrained encoder's KL has a gradient 80 to 140 times the likelihood's, through the keys 500 times and more
    # (docs/results/language-gradient.json). With weights of 1e-3 and 1e-2, which were tried first, nearly all models said
    # the majority class of their task, whatever the text
    "BAM-WC": {
        "training.learning_rate": [5e-5],
        "training.epochs": [3, 6],
        "training.kl_schedule.final": [1e-6, 1e-5, 1e-4, 3e-4],
        "attention.detach_keys": ["true"],
    },
}


@dataclass(frozen=True)
class Trial:
    """One setting of a grid on one task with one seed.

    Attributes:
        variant: Whose grid.
        settings: Of the grid, `name=value`.
        config: All settings.
        out: Folder of the search.
    """

    variant: str
    settings: tuple[str, ...]
    config: LanguageConfig
    out: Path

    @property
    def name(self) -> str:
        """Names the trial's file."""
        values = "-".join(setting.partition("=")[2] for setting in self.settings)
        return f"{self.config.task}-{self.variant}-{values}-{self.config.seed}"

    @property
    def path(self) -> Path:
        """The trial's file."""
        return self.out / "cells" / f"{self.name}.json"

    @property
    def identity(self) -> dict[str, Any]:
        """What the numbers depend on."""
        return {"config": dataclasses.asdict(self.config), "num_samples": NUM_SAMPLES}


def grid_settings(grid: dict[str, list[Any]]) -> list[tuple[str, ...]]:
    """Return every combination of a grid as `name=value`."""
    return [
        tuple(f"{name}={value}" for names, value in zip(grid, values) for name in names.split(","))
        for values in itertools.product(*grid.values())
    ]


def trials(
    tasks: Sequence[str],
    variants: Sequence[str],
    num_seeds: int,
    settings: Sequence[str],
    out: Path,
    only: Sequence[str] = (),
) -> list[Trial]:
    """Return all trials; the grids take turns, so that where the time ends early none has lost more than the others."""
    grids = [[(variant, found) for found in grid_settings(GRIDS[variant])] for variant in variants]
    turns = [entry for entries in itertools.zip_longest(*grids) for entry in entries if entry is not None]
    chosen = [(variant, found) for variant, found in turns if set(only) <= set(found)]
    if not chosen:
        raise ValueError(f"only is {list(only)}, which no setting has; allowed, for instance: {' '.join(turns[0][1])}")
    return [
        Trial(
            variant, found,
            load_config(task, [*settings, f"attention.variant={variant}", *found, f"seed={FIRST_SEED + seed}"]), out,
        )
        for seed in range(num_seeds)
        for variant, found in chosen
        for task in tasks
    ]  # fmt: skip


def measure(trial: Trial, prepared: Prepared) -> None:
    """Train one model, measure all its ways to predict on the validation texts, and write the numbers."""
    fitted = train_model(trial.config, None, prepared=prepared)
    task, split = prepared.task, prepared.splits["validation"]
    collator = make_collator(trial.config, prepared.tokenizer)
    predictor = Predictor(fitted.model, task, trial.config, collator, prepared.class_names)
    methods = [method for method in available_methods(trial.config, fitted.model) if method != "post-hoc"]
    predictions, _ = predictor.predict({"validation": split}, methods=methods, num_samples=NUM_SAMPLES)
    labels = torch.tensor(split.labels)
    found: dict[str, dict[str, float]] = {}
    for method, samples in predictions.splits["validation"].samples.items():
        estimates = evaluate_predictions(samples, labels, num_resamples=0)
        found[method] = {name: estimates[name].value for name in MEASURES}
        found[method]["main"] = GLUE_METRICS[task.metrics[0]](samples.mean(dim=0).argmax(dim=1), labels)
    values = {"methods": found, "last_row": fitted.log.rows[-1], "train_seconds": fitted.log.seconds}
    write_cell(trial.path, trial.identity, values)


def own_method(variant: str) -> str:
    """Return the way to predict that a grid is ranked by."""
    return "mean" if variant == "soft" else "attention"


def rank(found: Iterable[Trial], num_tasks: int) -> list[dict[str, Any]]:
    """Return a row for every setting that was tried on all tasks, by grid; the chosen one of each grid is marked."""
    cells: dict[tuple[str, tuple[str, ...]], list[tuple[str, dict[str, Any]]]] = {}
    for trial in found:
        values = read_cell(trial.path, trial.identity)
        if values is not None:
            cells.setdefault((trial.variant, trial.settings), []).append((trial.config.task, values["methods"]))
    rows: list[dict[str, Any]] = []
    for (variant, settings), values in cells.items():
        if len({task for task, _ in values}) < num_tasks:
            continue
        row: dict[str, Any] = {"variant": variant, "settings": " ".join(settings), "trials": len(values)}
        for method in values[0][1]:
            for name in (*MEASURES, "main"):
                row[f"{method} {name}"] = _over_tasks([(task, methods[method][name]) for task, methods in values])
        method = own_method(variant)
        row |= {name: row[f"{method} {name}"] for name in MEASURES}
        rows.append(row)
    for variant in dict.fromkeys(row["variant"] for row in rows):
        mine = [row for row in rows if row["variant"] == variant]
        best = max(row["accuracy"] for row in mine)
        chosen = min((row for row in mine if row["accuracy"] >= best - TOLERANCE), key=lambda row: row["nll"])
        for row in mine:
            row["chosen"] = row is chosen
    return sorted(rows, key=lambda row: (row["variant"], row["nll"]))


def _over_tasks(values: Sequence[tuple[str, float]]) -> float:
    """Return the mean over tasks of the means over seeds: a task with a seed more counts as much as the others."""
    by_task: dict[str, list[float]] = {}
    for task, value in values:
        by_task.setdefault(task, []).append(value)
    return sum(sum(found) / len(found) for found in by_task.values()) / len(by_task)


def search(
    tasks: Sequence[str],
    variants: Sequence[str],
    *,
    num_seeds: int,
    data: Path | None,
    out: Path,
    console: Console,
    jobs: int = 1,
    minutes: float | None = None,
    settings: Sequence[str] = (),
    only: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Run the trials that are missing and return the table, which is also written as `search.md` and `search.csv`.

    Args:
        tasks: Classification tasks.
        variants: Of `GRIDS`.
        num_seeds: Trials per setting and task.
        data: The data folder.
        out: Where trials and table go.
        console: For progress.
        jobs: Trials at the same time.
        minutes: No trial begins later than this.
        settings: On top of every config, below the grid's.
        only: `name=value` of the grids: settings without them are left out.
    """
    unknown = [name for name in variants if name not in GRIDS]
    if unknown:
        raise ValueError(f"variants has {unknown}; allowed: {', '.join(GRIDS)}")
    others = [name for name in tasks if find_task(name).kind != "classification"]
    if others:
        raise ValueError(f"tasks has {others}; allowed: tasks of classification, which alone have an NLL and a calibration")
    if jobs > 1:
        warm_up()
    found = trials(tasks, variants, num_seeds, settings, out, only)
    todo = [trial for trial in found if read_cell(trial.path, trial.identity) is None]
    work = {trial.name: (trial, prepare_run(trial.config, data)) for trial in todo}
    with ExitStack() as stack:
        for encoder in sorted({prepared.encoder for _, prepared in work.values()}):
            stack.enter_context(unpacked(encoder))
        display = stack.enter_context(progress(console))
        bar = display.add_task("trials", total=len(work))
        outcome = run_all(
            measure, work, num_processes=jobs, minutes=minutes,
            on_begin=lambda name: display.update(bar, description=name), on_end=lambda name: display.advance(bar),
        )  # fmt: skip
    outcome.write_failures(out / "failures")
    if outcome.failures or outcome.left:
        console.print(outcome.reasons(), markup=False)
    rows = rank(found, len(tasks))
    if rows:
        write_csv(out / "search.csv", [dict.fromkeys(_columns(rows)) | row for row in rows])
        write_bytes(out / "search.md", table(rows).encode())
    return rows


def _columns(rows: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the settings by grid, best NLL first, as Markdown."""
    header = ["variant", "settings", "accuracy %", "NLL", "ECE %", "AURC %", "no draws: accuracy %", "NLL", "chosen"]
    lines = [
        [
            row["variant"],
            row["settings"],
            *(f"{100 * row[name]:.1f}" if name != "nll" else f"{row[name]:.3f}" for name in MEASURES),
            f"{100 * row['mean accuracy']:.1f}",
            f"{row['mean nll']:.3f}",
            "*" if row["chosen"] else "",
        ]
        for row in rows
    ]
    return markdown(header, lines)


def main() -> None:
    """Run the grids and print their table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="rte,mrpc,cola")
    parser.add_argument("--variants", default=",".join(GRIDS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--only", action="append", default=[], metavar="NAME=VALUE", help="a part of the grids")
    given = parser.parse_args()
    rows = search(
        given.tasks.split(","), given.variants.split(","), num_seeds=given.seeds, data=given.data, out=given.out,
        console=Console(stderr=True), jobs=given.jobs, minutes=given.minutes, settings=given.settings, only=given.only,
    )  # fmt: skip
    print(table(rows))
    print(json.dumps({row["variant"]: row["settings"] for row in rows if row["chosen"]}, indent=2))


if __name__ == "__main__":
    main()
