"""How settings are chosen: every one of a grid on a few tasks, ranked on validation texts. No test text is read.

    python -m bayesattn_recipes.language.search --tasks rte,mrpc,cola --jobs 8 --data DIR --out runs/search
    python -m bayesattn_recipes.language.search --tasks stsb --variants BAM-WC --grid attention.weibull_k=1,5,20 …

Validation texts are held out of the training file (`data.py`); GLUE's dev set, which is the test set here, is not predicted.
Each trained variant has a grid of its own with equally many settings, so the baseline gets the settings that suit it best.
One setting is chosen for all tasks: of those whose validation accuracy, averaged over tasks and seeds, is within
`TOLERANCE` of the grid's best, the one with the lowest validation NLL; exact match stands for accuracy where answers are
sought, Pearson's correlation and the RMSE for both where scores are. Soft attention counts without draws, Bayesian
attention with 20. Finished measurements are kept, so the same command goes on where it stopped.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from jaxtyping import Float
from rich.console import Console
from torch import Tensor

from bayesattn.cli.progress import progress
from bayesattn.evaluation.runs import write_bytes
from bayesattn.metrics import evaluate_predictions
from bayesattn_recipes.common.tables import markdown, read_cell, write_cell, write_csv
from bayesattn_recipes.language.grids import GRIDS, NUM_SAMPLES, Trial, trials
from bayesattn_recipes.language.measure import answer_losses
from bayesattn_recipes.language.metrics import GLUE_METRICS, pearson
from bayesattn_recipes.language.predictor import Predictor, available_methods
from bayesattn_recipes.language.prepare import Prepared
from bayesattn_recipes.language.tasks import Kind, Task, find_task
from bayesattn_recipes.language.train import make_collator, prepare_run, train_model
from bayesattn_recipes.language.work import run_all, unpacked, warm_up

# of accuracy, exact match or correlation: what the seeds of one setting differ by
TOLERANCE = 0.01
# what is measured; the rule reads the first two
MEASURES: dict[Kind, tuple[str, ...]] = {
    "classification": ("accuracy", "nll", "ece", "aurc", "main"),
    "spans": ("exact_match", "answer_nll", "f1"),
    "regression": ("pearson", "rmse"),
}
# measure: heading, factor, digits
_FORMS = {
    "accuracy": ("accuracy %", 100.0, 1), "exact_match": ("EM %", 100.0, 1), "pearson": ("Pearson %", 100.0, 1),
    "nll": ("NLL", 1.0, 3), "answer_nll": ("NLL", 1.0, 3), "rmse": ("RMSE", 1.0, 3),
    "ece": ("ECE %", 100.0, 1), "aurc": ("AURC %", 100.0, 1), "f1": ("F1 %", 100.0, 1),
}  # fmt: skip


def measure(trial: Trial, prepared: Prepared) -> None:
    """Train one model, measure all its ways to predict on the validation texts, and write the numbers."""
    fitted = train_model(trial.config, None, prepared=prepared)
    task, split = prepared.task, prepared.splits["validation"]
    collator = make_collator(trial.config, prepared.tokenizer)
    predictor = Predictor(fitted.model, task, trial.config, collator, prepared.class_names)
    methods = [method for method in available_methods(trial.config, fitted.model) if method != "post-hoc"]
    predictions, answers = predictor.predict({"validation": split}, methods=methods, num_samples=NUM_SAMPLES)
    labels = predictions.splits["validation"].labels
    assert labels is not None
    found = {
        method: _measures(task, samples, labels, answers["validation"][method] if answers else [])
        for method, samples in predictions.splits["validation"].samples.items()
    }
    values = {"methods": found, "last_row": fitted.log.rows[-1], "train_seconds": fitted.log.seconds}
    write_cell(trial.path, trial.identity, values)


def _measures(
    task: Task, samples: Float[Tensor, "s n c"], labels: Tensor, records: Sequence[dict[str, Any]]
) -> dict[str, float]:
    """Return what `MEASURES` names; the records are those of a span task's answers."""
    mean = samples.mean(dim=0)
    if task.kind == "regression":
        scores = mean[:, 0]
        return {"pearson": pearson(scores, labels), "rmse": float((scores - labels).square().mean().sqrt())}
    if task.kind == "spans":
        found = {name: sum(record[name] for record in records) / len(records) for name in ("exact_match", "f1")}
        return {**found, "answer_nll": float(answer_losses(records).mean())}
    known = {name: estimate.value for name, estimate in evaluate_predictions(samples, labels, num_resamples=0).items()}
    known["main"] = GLUE_METRICS[task.metrics[0]](mean.argmax(dim=1), labels)
    return {name: known[name] for name in MEASURES[task.kind]}


def own_method(variant: str) -> str:
    """Return the way to predict that a grid is ranked by."""
    return "mean" if variant == "soft" else "attention"


def rank(found: Iterable[Trial], num_tasks: int, kind: Kind = "classification") -> list[dict[str, Any]]:
    """Return a row for every setting that was tried on all tasks, by grid; the chosen one of each grid is marked."""
    cells: dict[tuple[str, tuple[str, ...]], list[tuple[str, dict[str, Any]]]] = {}
    for trial in found:
        values = read_cell(trial.path, trial.identity)
        if values is not None:
            cells.setdefault((trial.variant, trial.settings), []).append((trial.config.task, values["methods"]))
    rows: list[dict[str, Any]] = []
    measures = MEASURES[kind]
    quality, loss = measures[:2]
    for (variant, settings), values in cells.items():
        if len({task for task, _ in values}) < num_tasks:
            continue
        row: dict[str, Any] = {"variant": variant, "settings": " ".join(settings), "trials": len(values)}
        for method in values[0][1]:
            for name in measures:
                row[f"{method} {name}"] = _over_tasks([(task, methods[method][name]) for task, methods in values])
        method = own_method(variant)
        row |= {name: row[f"{method} {name}"] for name in measures if name != "main"}
        rows.append(row)
    for variant in dict.fromkeys(row["variant"] for row in rows):
        mine = [row for row in rows if row["variant"] == variant]
        best = max(row[quality] for row in mine)
        chosen = min((row for row in mine if row[quality] >= best - TOLERANCE), key=lambda row: row[loss])
        for row in mine:
            row["chosen"] = row is chosen
    return sorted(rows, key=lambda row: (row["variant"], row[loss]))


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
    grid: dict[str, list[Any]] | None = None,
) -> list[dict[str, Any]]:
    """Run the trials that are missing and return the table, which is also written as `search.md` and `search.csv`.

    Args:
        tasks: Tasks of one kind.
        variants: Of `GRIDS`; any where `grid` is given.
        num_seeds: Trials per setting and task.
        data: The data folder.
        out: Where trials and table go.
        console: For progress.
        jobs: Trials at the same time.
        minutes: No trial begins later than this.
        settings: On top of every config, below the grid's.
        only: `name=value` of the grids: settings without them are left out.
        grid: Takes the place of the variants' own grids: values by name.
    """
    unknown = [name for name in variants if grid is None and name not in GRIDS]
    if unknown:
        raise ValueError(f"variants has {unknown}; allowed: {', '.join(GRIDS)}")
    kinds: list[Kind] = list(dict.fromkeys(find_task(name).kind for name in tasks))
    if len(kinds) != 1:
        raise ValueError(
            f"tasks has {list(tasks)} of the kinds {kinds}; allowed: tasks of one kind, which are measured alike"
        )
    if jobs > 1:
        warm_up()
    found = trials(tasks, variants, num_seeds, settings, out, only, grid)
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
    rows = rank(found, len(tasks), kinds[0])
    if rows:
        write_csv(out / "search.csv", [dict.fromkeys(_columns(rows)) | row for row in rows])
        write_bytes(out / "search.md", table(rows, kinds[0]).encode())
    return rows


def _columns(rows: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def table(rows: Sequence[dict[str, Any]], kind: Kind = "classification") -> str:
    """Return the settings by grid, best first, as Markdown."""
    measures = [name for name in MEASURES[kind] if name in _FORMS]
    plain = measures[:2]
    heads = {name: _FORMS[name][0] for name in measures}
    header = ["variant", "settings", *heads.values(), f"no draws: {heads[plain[0]]}", heads[plain[1]], "chosen"]

    def shown(row: dict[str, Any], name: str, prefix: str = "") -> str:
        _, factor, digits = _FORMS[name]
        return f"{factor * row[prefix + name]:.{digits}f}"

    lines = [
        [
            row["variant"],
            row["settings"],
            *(shown(row, name) for name in measures),
            *(shown(row, name, "mean ") for name in plain),
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
    parser.add_argument("--grid", action="append", default=[], metavar="NAME=V1,V2", help="instead of the variants' own")
    given = parser.parse_args()
    tasks = given.tasks.split(",")
    grid = {name: values.split(",") for name, _, values in (entry.partition("=") for entry in given.grid)}
    rows = search(
        tasks, given.variants.split(","), num_seeds=given.seeds, data=given.data, out=given.out,
        console=Console(stderr=True), jobs=given.jobs, minutes=given.minutes, settings=given.settings, only=given.only,
        grid=grid or None,
    )  # fmt: skip
    print(table(rows, find_task(tasks[0]).kind))
    print(json.dumps({row["variant"]: row["settings"] for row in rows if row["chosen"]}, indent=2))


if __name__ == "__main__":
    main()
