"""The paper's table on what is at hand: every task, variant and seed, soft and Bayesian attention from the same encoder.

One training run serves several rows: a model trained with soft attention is also predicted with MC dropout and with noise
tuned afterwards, and three of them make an ensemble. A cell (task, row, seed) that is finished is not repeated. Runs are
written without their parameters (an encoder's are 130 MB); what was predicted is kept, so `bayesattn report` works on them.
The tables and figures need less: the cells, and of every run the means over its draws, in its folder `means`.
"""

import dataclasses
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bayesattn.recipes._tables import read_cell, write_cell
from bayesattn.recipes._train import config_names, progress
from bayesattn.recipes.language.evaluate import Predictor, measure_run, write_answers
from bayesattn.recipes.language.prepare import Prepared, Split, make_split
from bayesattn.recipes.language.shifts import shifted_splits
from bayesattn.recipes.language.table import MEANS_FOLDER, Cell, write_tables
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
from bayesattn.recipes.language.work import run_all, unpacked, warm_up
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
FAILURES_FOLDER = "failures"

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

    def cell_path(self, method: str) -> Path:
        """Where the measures of one method go."""
        variant, seed = self.config.attention.variant, self.config.seed
        return self.out / "cells" / f"{self.name}-{variant}-{method}-{seed}.json"

    def read(self, method: str) -> dict[str, Any] | None:
        """Return the measures of one method, None where they are missing; of other settings they are an error."""
        return read_cell(self.cell_path(method), self.identity) if (self.folder / RUN_FILE).is_file() else None

    def is_finished(self) -> bool:
        """Whether the run is there with all that its rows need."""
        return all(self.read(method) is not None for method in self.methods)


@dataclass(frozen=True)
class Plan:
    """The part of a table that belongs to one config: its rows and seeds, and the runs behind them."""

    name: str
    configs: dict[str, LanguageConfig]
    rows: tuple[str, ...]
    num_seeds: int
    data: Path | None
    noise: tuple[float, ...]
    out: Path

    @property
    def task(self) -> str:
        """Name of the task."""
        return next(iter(self.configs.values())).task

    def job(self, variant: str, seed: int, methods: Iterable[str] = ()) -> Job:
        """Return one run."""
        config = dataclasses.replace(self.configs[variant], seed=seed)
        return Job(self.name, config, tuple(methods), self.data, self.noise, self.out)

    def prepare(self) -> tuple[Prepared, dict[str, Split]]:
        """Return the data of all runs, and what their models are asked about: validation, test and shifted test sets."""
        config = next(iter(self.configs.values()))
        prepared = prepare_run(config, self.data)
        shifted = shifted_splits(prepared.task, prepared.sources["test"], self.noise, self.data)
        splits = {name: prepared.splits[name] for name in ("validation", "test")} | {
            name: make_split(prepared.task, prepared.tokenizer, found, config.max_length) for name, found in shifted.items()
        }
        return prepared, splits

    def jobs(self) -> list[Job]:
        """Return the runs that the rows need; rows of one trained variant share its runs."""
        needed: dict[tuple[str, int], dict[str, None]] = {}
        for row in self.rows:
            variant, method = ROWS[row]
            for seed in self.seeds(row):
                for member in _members(seed) if method == "ensemble" else [seed]:
                    found = needed.setdefault((variant, member), {"mean": None})
                    if method not in (None, "ensemble"):
                        found[str(method)] = None
        return [self.job(variant, seed, methods) for (variant, seed), methods in needed.items()]

    def seeds(self, row: str) -> range:
        """Return the seeds of a row: five runs make three ensembles of three that follow one another."""
        return range(self.num_seeds if row != "ensemble" else max(self.num_seeds - ENSEMBLE_SIZE + 1, 1))

    def cells(self) -> list[Cell]:
        """Return the cells whose runs are finished."""
        found = [self.cell(row, seed) for row in self.rows for seed in self.seeds(row)]
        return [cell for cell in found if cell is not None]

    def cell(self, row: str, seed: int) -> Cell | None:
        """Return one cell: its measures without draws, and with them where the row has any; None if something is missing."""
        variant, method = ROWS[row]
        job = self.job(variant, seed)
        folder = job.folder if method != "ensemble" else self.out / "runs" / f"{self.name}-ensemble-{seed}"
        plain = job.read("mean")
        drawn = None
        if method is not None:
            drawn = self._ensemble(seed, folder) if method == "ensemble" else job.read(method)
        if plain is None or (method is not None and drawn is None):
            return None
        return {
            "name": self.name, "row": row, "seed": seed, "plain": plain, "drawn": drawn, "folder": folder,
            "method": method or "mean",
        }  # fmt: skip

    def _ensemble(self, seed: int, folder: Path) -> dict[str, Any] | None:
        """Average the predictions of the members, each of which counts as one draw."""
        members = [self.job("soft", member) for member in _members(seed)]
        if any(member.read("mean") is None for member in members):
            return None
        identity = {**members[0].identity, "ensemble": _members(seed)}
        path = self.out / "cells" / f"{self.name}-ensemble-{seed}.json"
        found = read_cell(path, identity)
        if found is not None:
            return found
        parts = [read_predictions(member.folder / MEANS_FOLDER) for member in members]
        splits = {
            split: SplitPredictions(
                {"ensemble": torch.cat([part.splits[split].samples["mean"] for part in parts])},
                parts[0].splits[split].labels,
            )
            for split in parts[0].splits
        }
        make_run_folder(folder, overwrite=True)
        _write_predictions(folder, Predictions(splits, parts[0].class_names, ["ensemble"], seed=0))
        run = read_run(members[0].folder)
        write_run(folder, recipe=run["recipe"], variant="ensemble", config=run["config"], seed=seed, members=_members(seed))
        values = _values(measure_run(folder, num_resamples=0), "ensemble")
        write_cell(path, identity, values)
        return values


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
    plans = {name: _plan(name, rows, num_seeds, settings, data, noise, out) for name in names}
    # reads and tokenises the data now, once for all runs: a missing file must not show after hours
    todo = _in_order(plans.values())
    ready = {name: plans[name].prepare() for name in dict.fromkeys(job.name for job in todo)}
    work = {job.folder.name: (job, *ready[job.name]) for job in todo}
    with ExitStack() as stack:
        for encoder in sorted({prepared.encoder for _, prepared, _ in work.values()}):
            stack.enter_context(unpacked(encoder))
        display = stack.enter_context(progress(console))
        bar = display.add_task("runs", total=len(work))
        outcome = run_all(
            run_job, work, num_processes=jobs, minutes=minutes,
            on_begin=lambda name: display.update(bar, description=name), on_end=lambda name: display.advance(bar),
        )  # fmt: skip
    outcome.write_failures(out / FAILURES_FOLDER)
    cells = [cell for plan in plans.values() for cell in plan.cells()]
    if not cells:
        raise RunError(f"no run has finished: {outcome.reasons()} (tracebacks in {out / FAILURES_FOLDER})")
    table = write_tables(out, cells, {name: plan.task for name, plan in plans.items()}, console)
    if outcome.failures:
        raise RunError(f"{table} is not complete: {outcome.reasons()} (tracebacks in {out / FAILURES_FOLDER})")
    if outcome.left:
        console.print(f"{outcome.reasons()}: the time was over; the same command goes on with them")
    return table


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


def _plan(name: str, rows: Sequence[str], num_seeds: int, settings: Sequence[str], data, noise, out: Path) -> Plan:
    base = load_config(name, settings)
    possible = tuple(row for row in rows if row not in _NOT_FOR.get(find_task(base.task).kind, ()))
    variants = dict.fromkeys(ROWS[row][0] for row in possible)
    configs = {v: dataclasses.replace(base, attention=dataclasses.replace(base.attention, variant=v)) for v in variants}
    return Plan(name, configs, possible, num_seeds, data, noise, out)


def _in_order(plans: Iterable[Plan]) -> list[Job]:
    """Return the unfinished runs, seed by seed: where the time ends early, the tables still compare like with like."""
    todo = [job for plan in plans for job in plan.jobs() if not job.is_finished()]
    return sorted(todo, key=lambda job: job.config.seed)


def _members(seed: int) -> list[int]:
    """Return the seeds of an ensemble's members."""
    return list(range(seed, seed + ENSEMBLE_SIZE))


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
