"""`bayesattn reproduce doubt`: fine-tune encoders with ordinary attention, measure how sure each is, and make the tables.

A run is one task and seed. Its answers are kept in `found/TASK-SEED.safetensors`; finished ones are not repeated.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

import bayesattn as ba
from bayesattn.cli.registry import Request
from bayesattn.files import RunError, write_bytes
from bayesattn_recipes.common.cells import check_complete, run_cells
from bayesattn_recipes.common.tables import choose
from bayesattn_recipes.doubt import table
from bayesattn_recipes.doubt.examine import Found, examine
from bayesattn_recipes.doubt.rankings import OPTIONAL
from bayesattn_recipes.language import data as text_data
from bayesattn_recipes.language.model import unpacked
from bayesattn_recipes.language.prepare import Prepared, Split, make_split
from bayesattn_recipes.language.train import LanguageConfig, load_config, make_collator, prepare_run, train_model

TASKS = ("rte", "mrpc", "cola", "sst2", "qqp", "mnli", "qnli")
# texts of another task, for which the model was not trained
OUTSIDE = {"rte": "qqp", "mrpc": "qnli", "cola": "sst2", "sst2": "cola", "qqp": "rte", "mnli": "qqp", "qnli": "mrpc"}
OUTSIDE_SIZE = 500
FOUND_FOLDER = "found"


def reproduce(request: Request) -> Path:
    """Run what is missing, write tables and the plot, and return the Markdown file with the tables.

    Args:
        request: `names` are of `TASKS`. Every model has ordinary attention; `variants` are measurements of
            `rankings.OPTIONAL`, beside own confidence, closed form and ensembles. Draws take most of the time.
    """
    data, out = request.data, request.out
    optional = choose("variants", request.variants, tuple(OPTIONAL))
    tasks = choose("tasks", request.names, TASKS)
    precision = ["training.precision=bf16"] if torch.cuda.is_available() else []
    base = {task: load_config(task, ["attention.variant=soft", *precision, *request.settings]) for task in tasks}
    with ExitStack() as stack:

        def arguments(missing: list[tuple[str, int]]) -> list[tuple[Any, ...]]:
            prepared = {task: prepare_run(base[task], data) for task in dict.fromkeys(task for task, _ in missing)}
            outside = {task: _outside(base[task], prepared[task], data) for task in prepared}
            stack.enter_context(unpacked(next(iter(prepared.values())).encoder))
            return [
                (dataclasses.replace(base[task], seed=seed), prepared[task], outside[task], data, optional)
                for task, seed in missing
            ]

        _, outcome = run_cells(
            request,
            {f"{task}-{seed}": (task, seed) for seed, task in itertools.product(range(request.num_seeds), tasks)},
            lambda key: {},
            run_one,
            arguments,
            path=_path,
            read=lambda path, identity: path if path.is_file() else None,
            write=_write_found,
        )
    check_complete(outcome, request, "the study is not complete")
    found = {task: [read_found(_path(out, f"{task}-{seed}")) for seed in range(request.num_seeds)] for task in tasks}
    return table.write(out, table.measure_all(found), request.console)


def _path(out: Path, name: str) -> Path:
    return out / FOUND_FOLDER / f"{name}.safetensors"


def read_found(path: Path) -> Found:
    """Read the answers of one model."""
    if not path.is_file():
        raise RunError(f"{path} is missing: its model has not been trained yet. Run the same command with more minutes")
    return safetensors.torch.load_file(path)


def _outside(config: LanguageConfig, prepared: Prepared, data: Path | None) -> Split:
    """Return texts of another task, tokenized like this task's."""
    texts = text_data.load(OUTSIDE[config.task], data, config.source).splits["test"][:OUTSIDE_SIZE]
    unlabeled = [dataclasses.replace(example, label=None) for example in texts]
    return make_split(prepared.task, prepared.tokenizer, unlabeled, config.max_length)


def run_one(config: LanguageConfig, prepared: Prepared, outside: Split, data: Path | None, optional: Sequence[str]) -> Found:
    """Train one model, ask it, and return its answers."""
    fitted = train_model(config, data, prepared=prepared)
    model = ba.restore(fitted.model).eval()
    collator = make_collator(config, prepared.tokenizer)
    found = examine(model, {**prepared.splits, "outside": outside}, collator, seed=config.seed, optional=optional)
    # pictures show the first seed's test texts
    return {name: v for name, v in found.items() if v.dtype != torch.half or (config.seed == 0 and name.startswith("test"))}


def _write_found(path: Path, identity: dict[str, Any], found: Found) -> None:
    write_bytes(path, safetensors.torch.save({name: _small(value) for name, value in found.items()}))


def _small(value: torch.Tensor) -> torch.Tensor:
    """Return an array for a file: half the digits of a double are noise of the draws."""
    return (value.float() if value.dtype == torch.double else value).contiguous()
