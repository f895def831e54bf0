"""The paper's table on the available data: every task, variant and seed, soft and Bayesian attention from the same encoder.

One training run serves several rows: a model trained with soft attention is also predicted with MC dropout and with noise
tuned afterwards, and three of them make an ensemble. Runs are written without their parameters (an encoder's are 130 MB);
the predictions are kept, so `bayesattn report` works on them. The tables and figures need less: the cells, and the
means over every run's draws, in its folder `means`.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from bayesattn.cli.registry import Request
from bayesattn.evaluation.runs import Predictions, SplitPredictions, read_predictions, read_run, write_predictions, write_run
from bayesattn.files import RunError
from bayesattn_recipes import LANGUAGE
from bayesattn_recipes.common.cells import FAILURES_FOLDER, cell_path, check_complete, read_cell, write_cell
from bayesattn_recipes.common.folders import make_run_folder, write_log
from bayesattn_recipes.common.reproduce import RUNS_FOLDER, Runs, run_plans
from bayesattn_recipes.common.tables import Cells, choose
from bayesattn_recipes.language import tuned
from bayesattn_recipes.language.measure import measure_run, write_answers
from bayesattn_recipes.language.model import unpacked
from bayesattn_recipes.language.predictor import Predictor
from bayesattn_recipes.language.prepare import Prepared, Split, make_split
from bayesattn_recipes.language.shifts import shifted_splits
from bayesattn_recipes.language.table import MEANS_FOLDER, Cell, write_tables
from bayesattn_recipes.language.tasks import TASKS, find_task
from bayesattn_recipes.language.train import (
    LanguageConfig,
    load_config,
    make_collator,
    prepare_run,
    train_model,
    write_record,
)

NUM_SAMPLES = 20
ENSEMBLE_SIZE = 3

# row of the table: variant it is trained with, what is drawn (None: nothing)
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
    "BAM-WC+dropout": ("BAM-WC", "attention+dropout"),
}
# rows that a kind of task cannot have: tuning needs class labels, and members of an ensemble differ in their candidates
_NOT_FOR = {"regression": ("post-hoc",), "spans": ("post-hoc", "ensemble")}


def reproduce(request: Request, *, noise: tuple[float, ...] = (), search: bool = False) -> Path:
    """Run what is missing, write the tables and return the Markdown file.

    Args:
        request: `names` are of configs: tasks with e5-small (`mrpc`, by default all), or with the paper's settings
            (`albert-mrpc`); `variants` are of `ROWS`. One run leaves a GPU mostly waiting for the host, so several `jobs`
            finish sooner.
        noise: Strengths of the shifted test sets; none by default, because they multiply the time of evaluation.
        search: Compare kinds of attention, each with the same number of settings to choose from (`tuned.py`).

    Raises:
        RunError: Some runs failed. The others are in the tables, and the tracebacks in the folder `failures`.
    """
    if search:
        if request.variants is not None or noise:
            raise ValueError("a search compares all its kinds on the dev sets alone. Leave variants and noise out")
        return tuned.compare(request)
    known = LANGUAGE.config_names
    names = choose("tasks", request.names, known, [name for name in known if name in TASKS and name != "own"])
    rows, num_seeds, out = choose("variants", request.variants, list(ROWS)), request.num_seeds, request.out
    settings = [*_precision(request.settings), *request.settings]
    works = {name: LanguageRuns(load_config(name, settings), request.data, noise) for name in names}
    plans = [plan_runs(work, name, rows, num_seeds) for name, work in works.items()]
    with ExitStack() as stack:

        def prepare(missing: Sequence[Runs[LanguageRuns]]) -> None:
            # read and tokenize the data now, once for all runs: a missing file must not show up after hours
            for encoder in sorted({plan.work.prepared[0].encoder for plan in missing}):
                stack.enter_context(unpacked(encoder))

        found, outcome = run_plans(request, plans, on_missing=prepare)
    cells = [cell for plan in plans for cell in finished_rows(plan, found[plan.dataset], rows, num_seeds, out)]
    if not cells:
        raise RunError(f"no run has finished: {outcome.reasons()} (tracebacks in {out / FAILURES_FOLDER})")
    table = write_tables(out, cells, {plan.dataset: plan.work.config.task for plan in plans}, request.console)
    check_complete(outcome, request, f"{table} is not complete")
    return table


def _precision(settings: Sequence[str]) -> list[str]:
    """Train in bf16 on a GPU unless another precision is set."""
    is_set = any(setting.startswith("training.precision=") for setting in settings)
    return ["training.precision=bf16"] if torch.cuda.is_available() and not is_set else []


def possible_rows(kind: str, rows: Sequence[str]) -> list[str]:
    """Return the rows that a kind of task can have."""
    return [row for row in rows if row not in _NOT_FOR.get(kind, ())]


def row_seeds(row: str, num_seeds: int) -> range:
    """Return the seeds of a row: five runs make three ensembles of three that follow one another."""
    return range(num_seeds if row != "ensemble" else max(num_seeds - ENSEMBLE_SIZE + 1, 1))


def members(seed: int) -> list[int]:
    """Return the seeds of an ensemble's members."""
    return list(range(seed, seed + ENSEMBLE_SIZE))


@dataclasses.dataclass(frozen=True)
class LanguageRuns:
    """The runs of one config.

    Attributes:
        config: Its settings except variant and seed.
        data: The data folder.
        noise: Strengths of the shifted test sets.
    """

    config: LanguageConfig
    data: Path | None
    noise: tuple[float, ...]

    def config_of(self, variant: str, seed: int) -> LanguageConfig:
        """Return the config of a run."""
        attention = dataclasses.replace(self.config.attention, variant=variant)
        return dataclasses.replace(self.config, attention=attention, seed=seed)

    def methods(self, variant: str) -> list[str]:
        """Return the methods that predict the models of a variant: without draws, and every one that a row needs."""
        possible = possible_rows(find_task(self.config.task).kind, list(ROWS))
        drawn = [method for trained, method in map(ROWS.__getitem__, possible) if trained == variant]
        return ["mean", *(method for method in drawn if method not in (None, "ensemble"))]

    @cached_property
    def prepared(self) -> tuple[Prepared, dict[str, Split]]:
        """The data of all runs: validation, test and shifted test sets."""
        prepared = prepare_run(self.config, self.data)
        shifted = shifted_splits(prepared.task, prepared.sources["test"], self.noise, self.data)
        splits = {name: prepared.splits[name] for name in ("validation", "test")} | {
            name: make_split(prepared.task, prepared.tokenizer, found, self.config.max_length)
            for name, found in shifted.items()
        }
        return prepared, splits

    def identity(self, variant: str, seed: int) -> dict[str, Any]:
        """Return everything the numbers of a run depend on."""
        config = dataclasses.asdict(self.config_of(variant, seed))
        return {"config": config, "noise": list(self.noise), "num_samples": NUM_SAMPLES}

    def run(self, variant: str, seed: int, folder: Path, on_progress: Callable[[int, int], Any]) -> dict[str, Any]:
        """Train, predict, measure; write the run without its parameters and return its measures by method."""
        (prepared, splits), config, start = self.prepared, self.config_of(variant, seed), time.perf_counter()
        fitted = train_model(config, self.data, on_progress, prepared=prepared)
        trained = time.perf_counter()
        collator = make_collator(config, prepared.tokenizer)
        predictor = Predictor(fitted.model, prepared.task, config, collator, prepared.class_names)
        predictions, answers = predictor.predict(splits, methods=self.methods(variant), num_samples=NUM_SAMPLES)
        make_run_folder(folder, overwrite=True)
        write_log(folder, fitted.log.rows)
        _write_predictions(folder, predictions)
        if answers:
            write_answers(folder, answers)
        write_record(folder, config, fitted, self.data)
        times = {"train_seconds": trained - start, "evaluate_seconds": time.perf_counter() - trained}
        return {"methods": _values(folder), "times": times, "last_row": fitted.log.rows[-1]}


def plan_runs(work: LanguageRuns, name: str, rows: Sequence[str], num_seeds: int) -> Runs[LanguageRuns]:
    """Return the runs that the rows of a config need; rows of one trained variant share its runs."""
    counts: dict[str, int] = {}
    for row in possible_rows(find_task(work.config.task).kind, rows):
        variant = ROWS[row][0]
        last = members(row_seeds(row, num_seeds)[-1])[-1] + 1 if row == "ensemble" else num_seeds
        counts[variant] = max(counts.get(variant, 0), last)
    return Runs(name, work, counts)


def finished_rows(plan: Runs[LanguageRuns], found: Cells, rows: Sequence[str], num_seeds: int, out: Path) -> list[Cell]:
    """Return the table entries of every row and seed whose runs are finished."""
    cells = []
    for row in possible_rows(find_task(plan.work.config.task).kind, rows):
        variant, method = ROWS[row]
        for seed in row_seeds(row, num_seeds):
            if seed not in found.get(variant, {}):
                continue
            run, measured = out / RUNS_FOLDER / f"{plan.dataset}-{variant}-{seed}", found[variant][seed]["methods"]
            if method == "ensemble":
                folder, drawn = out / RUNS_FOLDER / f"{plan.dataset}-ensemble-{seed}", _ensemble(plan, found, seed, out)
                if drawn is None:
                    continue
            else:
                folder, drawn = run, None if method is None else measured[method]
            cells.append({
                "name": plan.dataset, "row": row, "seed": seed, "plain": measured["mean"], "drawn": drawn,
                "folder": folder, "method": method or "mean", "run": read_run(run),
            })  # fmt: skip
    return cells


def _ensemble(plan: Runs[LanguageRuns], found: Cells, seed: int, out: Path) -> dict[str, Any] | None:
    """Average the predictions of the members, each counting as one draw; return None if one is missing."""
    if any(member not in found["soft"] for member in members(seed)):
        return None
    identity = {**plan.work.identity("soft", seed), "ensemble": members(seed)}
    path = cell_path(out, f"{plan.dataset}-ensemble-{seed}")
    known = read_cell(path, identity)
    if known is not None:
        return known
    runs = [out / RUNS_FOLDER / f"{plan.dataset}-soft-{member}" for member in members(seed)]
    parts = [read_predictions(run / MEANS_FOLDER) for run in runs]
    splits = {
        split: SplitPredictions(
            {"ensemble": torch.cat([part.splits[split].samples["mean"] for part in parts])},
            parts[0].splits[split].labels,
        )
        for split in parts[0].splits
    }
    folder = out / RUNS_FOLDER / f"{plan.dataset}-ensemble-{seed}"
    make_run_folder(folder, overwrite=True)
    _write_predictions(folder, Predictions(splits, parts[0].class_names, ["ensemble"], seed=0))
    run = read_run(runs[0])
    write_run(folder, recipe=run["recipe"], variant="ensemble", config=run["config"], seed=seed, members=members(seed))
    values = _values(folder)["ensemble"]
    write_cell(path, identity, values)
    return values


def _write_predictions(folder: Path, predictions: Predictions) -> None:
    """Write all draws and, beside them, their means: a twentieth of the size, and all the tables and figures need."""
    write_predictions(folder, predictions)
    splits = {
        name: SplitPredictions({m: draws.mean(dim=0, keepdim=True) for m, draws in split.samples.items()}, split.labels)
        for name, split in predictions.splits.items()
    }
    write_predictions(folder / MEANS_FOLDER, dataclasses.replace(predictions, splits=splits))


def _values(folder: Path) -> dict[str, dict[str, Any]]:
    """Measure a run and return its numbers, by method and split."""
    measured = measure_run(folder, num_resamples=0)["methods"]
    return {
        method: {
            "splits": {
                name: {key: metric["value"] for key, metric in split["metrics"].items()}
                for name, split in found["splits"].items()
            }
        }
        for method, found in measured.items()
    }
