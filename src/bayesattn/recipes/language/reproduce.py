"""The paper's table on what is at hand: every task, variant and seed, soft and Bayesian attention from the same encoder.

One training run serves several rows: a model trained with soft attention is also predicted with MC dropout and with noise
tuned afterwards, and three of them make an ensemble. A cell (task, row, seed) that is finished is not repeated. Runs are
written without their parameters (an encoder's are 130 MB); what was predicted is kept, so `bayesattn report` works on them.
"""

import dataclasses
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from bayesattn.recipes._tables import read_cell, write_cell
from bayesattn.recipes._train import config_names, progress
from bayesattn.recipes.language.evaluate import Predictor, measure_run, write_answers
from bayesattn.recipes.language.prepare import make_split
from bayesattn.recipes.language.shifts import shifted_splits
from bayesattn.recipes.language.table import write_tables
from bayesattn.recipes.language.tasks import TASKS, find_task
from bayesattn.recipes.language.train import (
    CONFIGS,
    LanguageConfig,
    load_config,
    make_collator,
    prepare_run,
    train_model,
    write_record,
)
from bayesattn.runs import (
    RUN_FILE,
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

NUM_SAMPLES = 20
ENSEMBLE_SIZE = 3

# row of the table: variant it is trained with, how it is drawn (None: not at all)
ROWS: dict[str, tuple[str, str | None]] = {
    "soft": ("soft", None),
    "dropout": ("soft", "dropout"),
    "post-hoc": ("soft", "post-hoc"),
    "ensemble": ("soft", "ensemble"),
    "BAM-NOKL": ("BAM-NOKL", "attention"),
    "BAM-LF": ("BAM-LF", "attention"),
    "BAM-LC": ("BAM-LC", "attention"),
    "BAM-WF": ("BAM-WF", "attention"),
    "BAM-WC": ("BAM-WC", "attention"),
}
# rows that a kind of task cannot have: tuning needs class labels, and members of an ensemble differ in their candidates
_NOT_FOR = {"regression": ("post-hoc",), "spans": ("post-hoc", "ensemble")}


@dataclass(frozen=True)
class Job:
    """One training run and the rows it serves.

    Attributes:
        name: Of the config.
        config: With variant and seed set.
        methods: How it is drawn.
        data: The data folder.
        noise: Strengths of the shifted test sets.
        out: Folder of the table.
    """

    name: str
    config: LanguageConfig
    methods: tuple[str, ...]
    data: Path | None
    noise: tuple[float, ...]
    out: Path

    @property
    def folder(self) -> Path:
        """Where the run goes."""
        return self.out / "runs" / f"{self.name}-{self.config.attention.variant}-{self.config.seed}"

    @property
    def identity(self) -> dict[str, Any]:
        """What the numbers depend on."""
        return {"config": dataclasses.asdict(self.config), "noise": list(self.noise), "num_samples": NUM_SAMPLES}


def reproduce(
    names: Sequence[str] | None,
    variants: Sequence[str] | None,
    *,
    num_seeds: int,
    data: Path | None,
    out: Path,
    console: Console,
    jobs: int = 1,
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
        settings: `name=value`, on top of every config.
        noise: Strengths of the shifted test sets; none by default, because they multiply the time of evaluation.

    Returns:
        The Markdown file.
    """
    names, rows = _chosen(names, variants)
    bases = {name: load_config(name, [*_precision(settings), *settings]) for name in names}
    todo: list[Job] = []
    for name, base in bases.items():
        # reads the data now: a missing file must not show after hours
        prepare_run(base, data)
        todo += [
            job for job in _jobs(name, base, _rows_of(base, rows), num_seeds, data, noise, out) if not _is_finished(job)
        ]
    with progress(console) as display:
        _run_all(todo, jobs, display)
    cells = [
        _cell(name, base, row, seed, data, noise, out)
        for name, base in bases.items()
        for row in _rows_of(base, rows)
        for seed in range(num_seeds)
    ]
    return write_tables(out, cells, {name: base.task for name, base in bases.items()}, console)


def _rows_of(base: LanguageConfig, rows: Sequence[str]) -> list[str]:
    return [row for row in rows if row not in _NOT_FOR.get(find_task(base.task).kind, ())]


def _chosen(names: Sequence[str] | None, variants: Sequence[str] | None) -> tuple[list[str], list[str]]:
    known = config_names(CONFIGS)
    names = [name for name in known if name in TASKS and name != "own"] if names is None else list(dict.fromkeys(names))
    rows = list(ROWS) if variants is None else list(dict.fromkeys(variants))
    for kind, given, allowed in (("tasks", names, known), ("variants", rows, ROWS)):
        unknown = [name for name in given if name not in allowed]
        if unknown:
            raise ValueError(f"{kind} has {unknown}; allowed: {', '.join(allowed)}")
    return names, rows


def _precision(settings: Sequence[str]) -> list[str]:
    """Train in bf16 on a GPU unless something else was asked for."""
    is_set = any(setting.startswith("training.precision=") for setting in settings)
    return ["training.precision=bf16"] if torch.cuda.is_available() and not is_set else []


def _with(base: LanguageConfig, variant: str, seed: int) -> LanguageConfig:
    return dataclasses.replace(base, attention=dataclasses.replace(base.attention, variant=variant), seed=seed)


def _members(seed: int) -> list[int]:
    """Return the seeds of an ensemble's members: the seed itself, and others that no table of less than 1,000 seeds has."""
    return [seed, *(1000 * (seed + 1) + number for number in range(1, ENSEMBLE_SIZE))]


def _jobs(
    name: str,
    base: LanguageConfig,
    rows: Sequence[str],
    num_seeds: int,
    data: Path | None,
    noise: tuple[float, ...],
    out: Path,
) -> list[Job]:
    """Return the runs that the rows need; rows of one trained variant share its runs."""
    needed: dict[tuple[str, int], dict[str, None]] = {}
    for seed in range(num_seeds):
        for row in rows:
            variant, method = ROWS[row]
            for member in _members(seed) if method == "ensemble" else [seed]:
                found = needed.setdefault((variant, member), {"mean": None})
                if method not in (None, "ensemble"):
                    found[str(method)] = None
    return [
        Job(name, _with(base, variant, seed), tuple(methods), data, noise, out)
        for (variant, seed), methods in needed.items()
    ]


def _is_finished(job: Job) -> bool:
    """Whether the run of a job is there with all that its rows need.

    Raises:
        RunError: It is there with other settings.
    """
    cells = [_cell_path(job.out, job.name, job.config, method) for method in job.methods]
    return all(read_cell(path, job.identity) is not None for path in cells) and (job.folder / RUN_FILE).is_file()


def _cell_path(out: Path, name: str, config: LanguageConfig, method: str) -> Path:
    return out / "cells" / f"{name}-{config.attention.variant}-{method}-{config.seed}.json"


def _run_all(todo: list[Job], num_processes: int, display: Progress) -> None:
    """Run all jobs, several at a time if asked to; the first failure stops the rest."""
    bar = display.add_task("runs", total=len(todo))
    if num_processes == 1 or len(todo) < 2:
        for job in todo:
            display.update(bar, description=job.folder.name)
            run_job(job)
            display.advance(bar)
        return
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(_run_in_worker, job, num_processes) for job in todo]
        try:
            for future in as_completed(futures):
                future.result()
                display.advance(bar)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _run_in_worker(job: Job, num_processes: int) -> None:
    # processes that each start a thread per core would mostly wait for one another
    torch.set_num_threads(max(torch.get_num_threads() // num_processes, 1))
    run_job(job)


def run_job(job: Job) -> None:
    """Train, predict, measure; write the run without its parameters, then its cells."""
    start = time.perf_counter()
    fitted = train_model(job.config, job.data)
    trained = time.perf_counter()
    prepared = fitted.prepared
    entries = {name: prepared.sources[name] for name in ("validation", "test")}
    shifted = shifted_splits(prepared.task, entries["test"], job.noise, job.data)
    splits = {name: prepared.splits[name] for name in entries}
    splits |= {
        name: make_split(prepared.task, prepared.tokenizer, found, job.config.max_length) for name, found in shifted.items()
    }
    collator = make_collator(job.config, prepared.tokenizer)
    predictor = Predictor(fitted.model, prepared.task, job.config, collator, prepared.class_names)
    predictions, answers = predictor.predict(splits, methods=job.methods, num_samples=NUM_SAMPLES)
    make_run_folder(job.folder, overwrite=True)
    write_log(job.folder, fitted.log.rows)
    write_predictions(job.folder, predictions)
    if answers:
        write_answers(job.folder, answers)
    write_record(job.folder, job.config, fitted, job.data)
    measured = measure_run(job.folder, num_resamples=0)
    times = {"train_seconds": trained - start, "evaluate_seconds": time.perf_counter() - trained}
    for method in job.methods:
        values = {**_values(measured, method), "times": times, "last_row": fitted.log.rows[-1]}
        write_cell(_cell_path(job.out, job.name, job.config, method), job.identity, values)


def _values(measured: dict[str, Any], method: str) -> dict[str, Any]:
    splits = measured["methods"][method]["splits"]
    return {"splits": {name: {key: m["value"] for key, m in split["metrics"].items()} for name, split in splits.items()}}


def _cell(
    name: str, base: LanguageConfig, row: str, seed: int, data: Path | None, noise: tuple[float, ...], out: Path
) -> dict[str, Any]:
    """Return one cell of the table: its measures without draws, and with them where the row has any."""
    variant, method = ROWS[row]
    job = Job(name, _with(base, variant, seed), (), data, noise, out)
    plain = read_cell(_cell_path(out, name, job.config, "mean"), job.identity)
    if method is None:
        drawn = None
    elif method == "ensemble":
        drawn = _ensemble(name, base, seed, data, noise, out)
    else:
        drawn = read_cell(_cell_path(out, name, job.config, method), job.identity)
    assert plain is not None
    folder = job.folder if method != "ensemble" else out / "runs" / f"{name}-ensemble-{seed}"
    return {
        "name": name, "row": row, "seed": seed, "plain": plain, "drawn": drawn, "folder": folder, "method": method or "mean",
    }  # fmt: skip


def _ensemble(
    name: str, base: LanguageConfig, seed: int, data: Path | None, noise: tuple[float, ...], out: Path
) -> dict[str, Any]:
    """Average the predictions of the members: each counts as one draw."""
    members = [Job(name, _with(base, "soft", member), (), data, noise, out) for member in _members(seed)]
    identity = {**members[0].identity, "ensemble": _members(seed)}
    path = out / "cells" / f"{name}-ensemble-{seed}.json"
    found = read_cell(path, identity)
    if found is not None:
        return found
    parts = [read_predictions(member.folder) for member in members]
    if any(part.splits.keys() != parts[0].splits.keys() for part in parts):
        raise RunError(
            f"the members of ensemble {seed} of {name} have different splits; remove {out / 'runs'} and run again"
        )
    splits = {
        split: SplitPredictions(
            {"ensemble": torch.cat([part.splits[split].samples["mean"] for part in parts])}, parts[0].splits[split].labels
        )
        for split in parts[0].splits
    }
    folder = out / "runs" / f"{name}-ensemble-{seed}"
    make_run_folder(folder, overwrite=True)
    write_predictions(folder, Predictions(splits, parts[0].class_names, ["ensemble"], seed=0))
    run = read_run(members[0].folder)
    write_run(folder, recipe=run["recipe"], variant="ensemble", config=run["config"], seed=seed, members=_members(seed))
    values = _values(measure_run(folder, num_resamples=0), "ensemble")
    write_cell(path, identity, values)
    return values
