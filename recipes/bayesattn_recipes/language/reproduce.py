"""The paper's table on what is at hand: every task, variant and seed, soft and Bayesian attention from the same encoder.

What is to be run is in `plan.py`. A cell (task, row, seed) that is finished is not repeated. Runs are
written without their parameters (an encoder's are 130 MB); what was predicted is kept, so `bayesattn report` works on them.
The tables and figures need less: the cells, and of every run the means over its draws, in its folder `means`.
"""

import dataclasses
import itertools
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bayesattn.cli.progress import show_runs
from bayesattn.evaluation.runs import (
    Predictions,
    RunError,
    SplitPredictions,
    make_run_folder,
    read_predictions,
    read_run,
    write_log,
    write_predictions,
    write_run,
)
from bayesattn_recipes import LANGUAGE
from bayesattn_recipes.common.tables import choose, read_cell, write_cell
from bayesattn_recipes.language.measure import measure_run, write_answers
from bayesattn_recipes.language.plan import NUM_SAMPLES, ROWS, Job, Plan, in_order, make_plan, members
from bayesattn_recipes.language.predictor import Predictor
from bayesattn_recipes.language.prepare import Prepared, Split
from bayesattn_recipes.language.table import MEANS_FOLDER, Cell, write_tables
from bayesattn_recipes.language.tasks import TASKS
from bayesattn_recipes.language.train import make_collator, train_model, write_record
from bayesattn_recipes.language.work import run_all, unpacked, warm_up

FAILURES_FOLDER = "failures"


def reproduce(
    names: Sequence[str] | None,
    variants: Sequence[str] | None,
    *,
    num_seeds: int,
    data: Path | None,
    out: Path,
    console: Console,
    jobs: int = 1,
    minutes: float | None = None,
    settings: Sequence[str] = (),
    noise: tuple[float, ...] = (),
) -> Path:
    """Run what is missing and write the tables.

    Args:
        names: Configs: tasks with e5-small (`mrpc`), or with the paper's settings (`albert-mrpc`). None takes every task
            of e5-small.
        variants: Rows of the table; None takes all.
        num_seeds: Runs per row.
        data: The data folder.
        out: Where runs, cells and tables go.
        console: For progress.
        jobs: Runs at the same time, each in a process of its own. One run leaves a GPU mostly waiting for the host.
        minutes: No run begins later than this; the tables are of what is finished, and the same call goes on later.
        settings: `name=value`, on top of every config.
        noise: Strengths of the shifted test sets; none by default, because they multiply the time of evaluation.

    Returns:
        The Markdown file.

    Raises:
        RunError: Some runs failed. The others are in the tables, and the tracebacks in the folder `failures`.
    """
    names, rows = _chosen(names, variants)
    settings = [*_precision(settings), *settings]
    if jobs > 1:
        warm_up()
    plans = {name: make_plan(name, rows, num_seeds, settings, data, noise, out) for name in names}
    # reads and tokenises the data now, once for all runs: a missing file must not show after hours
    todo = in_order(plans.values())
    ready = {name: plans[name].prepare() for name in dict.fromkeys(job.name for job in todo)}
    work = {job.folder.name: (job, *ready[job.name]) for job in todo}
    with ExitStack() as stack:
        for encoder in sorted({prepared.encoder for _, prepared, _ in work.values()}):
            stack.enter_context(unpacked(encoder))
        display = stack.enter_context(show_runs(console, len(work)))
        begun, ended = itertools.count(), itertools.count(1)
        outcome = run_all(
            run_job, work, num_processes=jobs, minutes=minutes,
            on_begin=lambda name: display.begin(name, next(begun)), on_end=lambda name: display.advance(next(ended)),
        )  # fmt: skip
    outcome.write_failures(out / FAILURES_FOLDER)
    cells = [cell for plan in plans.values() for cell in finished_cells(plan)]
    if not cells:
        raise RunError(f"no run has finished: {outcome.reasons()} (tracebacks in {out / FAILURES_FOLDER})")
    table = write_tables(out, cells, {name: plan.task for name, plan in plans.items()}, console)
    if outcome.failures:
        raise RunError(f"{table} is not complete: {outcome.reasons()} (tracebacks in {out / FAILURES_FOLDER})")
    if outcome.left:
        console.print(f"{outcome.reasons()}: the time was over; the same command goes on with them")
    return table


def _chosen(names: Sequence[str] | None, variants: Sequence[str] | None) -> tuple[list[str], list[str]]:
    known = LANGUAGE.config_names
    names = choose("tasks", names, known, [name for name in known if name in TASKS and name != "own"])
    return names, choose("variants", variants, list(ROWS))


def _precision(settings: Sequence[str]) -> list[str]:
    """Train in bf16 on a GPU unless something else was asked for."""
    is_set = any(setting.startswith("training.precision=") for setting in settings)
    return ["training.precision=bf16"] if torch.cuda.is_available() and not is_set else []


def finished_cells(plan: Plan) -> list[Cell]:
    """Return the cells whose runs are finished."""
    found = [read_row(plan, row, seed) for row in plan.rows for seed in plan.seeds(row)]
    return [cell for cell in found if cell is not None]


def read_row(plan: Plan, row: str, seed: int) -> Cell | None:
    """Return one cell: its measures without draws, and with them where the row has any; None if something is missing."""
    variant, method = ROWS[row]
    job = plan.job(variant, seed)
    folder = job.folder if method != "ensemble" else plan.out / "runs" / f"{plan.name}-ensemble-{seed}"
    plain = job.read("mean")
    drawn = None
    if method is not None:
        drawn = _ensemble(plan, seed, folder) if method == "ensemble" else job.read(method)
    if plain is None or (method is not None and drawn is None):
        return None
    return {
        "name": plan.name, "row": row, "seed": seed, "plain": plain, "drawn": drawn, "folder": folder,
        "method": method or "mean", "run": read_run(job.folder),
    }  # fmt: skip


def _ensemble(plan: Plan, seed: int, folder: Path) -> dict[str, Any] | None:
    """Average the predictions of the members, each of which counts as one draw."""
    jobs = [plan.job("soft", member) for member in members(seed)]
    if any(job.read("mean") is None for job in jobs):
        return None
    identity = {**jobs[0].identity, "ensemble": members(seed)}
    path = plan.out / "cells" / f"{plan.name}-ensemble-{seed}.json"
    found = read_cell(path, identity)
    if found is not None:
        return found
    parts = [read_predictions(job.folder / MEANS_FOLDER) for job in jobs]
    splits = {
        split: SplitPredictions(
            {"ensemble": torch.cat([part.splits[split].samples["mean"] for part in parts])},
            parts[0].splits[split].labels,
        )
        for split in parts[0].splits
    }
    make_run_folder(folder, overwrite=True)
    _write_predictions(folder, Predictions(splits, parts[0].class_names, ["ensemble"], seed=0))
    run = read_run(jobs[0].folder)
    write_run(folder, recipe=run["recipe"], variant="ensemble", config=run["config"], seed=seed, members=members(seed))
    values = _values(measure_run(folder, num_resamples=0), "ensemble")
    write_cell(path, identity, values)
    return values


def run_job(job: Job, prepared: Prepared, splits: dict[str, Split]) -> None:
    """Train, predict, measure; write the run without its parameters, then its cells."""
    start = time.perf_counter()
    fitted = train_model(job.config, job.data, prepared=prepared)
    trained = time.perf_counter()
    collator = make_collator(job.config, prepared.tokenizer)
    predictor = Predictor(fitted.model, prepared.task, job.config, collator, prepared.class_names)
    predictions, answers = predictor.predict(splits, methods=job.methods, num_samples=NUM_SAMPLES)
    make_run_folder(job.folder, overwrite=True)
    write_log(job.folder, fitted.log.rows)
    _write_predictions(job.folder, predictions)
    if answers:
        write_answers(job.folder, answers)
    write_record(job.folder, job.config, fitted, job.data)
    measured = measure_run(job.folder, num_resamples=0)
    times = {"train_seconds": trained - start, "evaluate_seconds": time.perf_counter() - trained}
    for method in job.methods:
        values = {**_values(measured, method), "times": times, "last_row": fitted.log.rows[-1]}
        write_cell(job.cell_path(method), job.identity, values)


def _write_predictions(folder: Path, predictions: Predictions) -> None:
    """Write all draws, and beside them their means: a twentieth of the size, and all that tables and figures need."""
    write_predictions(folder, predictions)
    splits = {
        name: SplitPredictions({m: draws.mean(dim=0, keepdim=True) for m, draws in split.samples.items()}, split.labels)
        for name, split in predictions.splits.items()
    }
    write_predictions(folder / MEANS_FOLDER, dataclasses.replace(predictions, splits=splits))


def _values(measured: dict[str, Any], method: str) -> dict[str, Any]:
    splits = measured["methods"][method]["splits"]
    return {"splits": {name: {key: m["value"] for key, m in split["metrics"].items()} for name, split in splits.items()}}
