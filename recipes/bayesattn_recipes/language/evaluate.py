"""Predict the test sets and the shifted test sets of a run; `measure.py` measures the predictions."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bayesattn.evaluation.runs import Predictions
from bayesattn_recipes.language.measure import measure_run, write_answers
from bayesattn_recipes.language.predictor import Predictor
from bayesattn_recipes.language.prepare import make_split
from bayesattn_recipes.language.shifts import shifted_splits
from bayesattn_recipes.language.train import LoadedRun, load_run, make_collator, prepare_run

# read by `bayesattn evaluate`
__all__ = ["measure_run", "predict_run"]


def predict_run(
    folder: Path,
    *,
    num_samples: int = 20,
    noise: tuple[float, ...] = (0.5, 1.0),
    methods: Sequence[str] | None = None,
    seed: int = 0,
    on_progress: Callable[[int, int], Any] = lambda done, total: None,
    data: Path | None = None,
) -> Predictions:
    """Predict the validation, test and shifted test sets of a run; for a span task, write the answers into its folder.

    Args:
        folder: The run.
        num_samples: M, at least 2.
        noise: Strengths of the noisy test sets (`shifts.py`); 0 leaves all shifted sets out.
        methods: See `predictor.py`; None takes `mean` and the usual way to draw.
        seed: Seed of the draws.
        on_progress: Called with the number of splits and methods done and to do.
        data: The data folder; None takes the one the run was trained from or, if that is gone, the one that the
            variable BAYESATTN_DATA names.
    """
    run = load_run(folder)
    data = _data_folder(run, data)
    prepared = prepare_run(run.config, data)
    # the run's own tokenizer: that of `tiny` is made from the texts, and the encoder's folder may have changed
    entries = {name: prepared.sources[name] for name in ("validation", "test")}
    entries |= shifted_splits(run.task, entries["test"], noise, data)
    splits = {name: make_split(run.task, run.tokenizer, found, run.config.max_length) for name, found in entries.items()}
    predictor = Predictor(run.model, run.task, run.config, make_collator(run.config, run.tokenizer), run.class_names)
    predictions, answers = predictor.predict(
        splits, methods=methods, num_samples=num_samples, seed=seed, on_progress=on_progress
    )
    if run.task.kind == "spans":
        write_answers(folder, answers)
    test = replace(predictions.splits["test"], doubtful=predictor.doubtful_examples(splits["test"], run.tokenizer))
    return replace(predictions, splits={**predictions.splits, "test": test})


def _data_folder(run: LoadedRun, given: Path | None) -> Path | None:
    """Return the requested folder, else the run's own, else the one that the variable names.

    The command line cannot tell an option from the variable, so a folder that equals the variable's counts as the latter.
    """
    named = os.environ.get("BAYESATTN_DATA")
    if given is not None and str(given) != named:
        return given
    is_gone = run.data is None or not run.data.exists()
    return Path(named) if named and is_gone else run.data
