"""Measure the predictions of a run as GLUE and SQuAD do, and with the usual metrics of classifiers."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from bayesattn.evaluation.measure import measure_run as measure_classes
from bayesattn.evaluation.runs import (
    METRICS_FILE,
    METRICS_SCHEMA,
    Predictions,
    SplitPredictions,
    command_line,
    environment,
    now,
    read_predictions,
    read_run,
)
from bayesattn.files import read_json, write_json
from bayesattn.metrics import aurc, auroc, bootstrap_statistic, expected_calibration_error
from bayesattn_recipes.language import metrics
from bayesattn_recipes.language.predictor import Answers
from bayesattn_recipes.language.prepare import allows_none
from bayesattn_recipes.language.tasks import Task, find_task
from bayesattn_recipes.language.train import ANSWERS_FILE
from bayesattn_recipes.language.trust import choose_rule

ANSWERS_SCHEMA = "bayesattn.answers/1"


def write_answers(folder: Path, answers: Answers) -> None:
    """Write the answers to the questions of every split and method."""
    write_json(folder / ANSWERS_FILE, {"schema": ANSWERS_SCHEMA, "splits": answers})


def read_answers(folder: Path) -> Answers:
    """Read them back."""
    return read_json(folder / ANSWERS_FILE, ANSWERS_SCHEMA)["splits"]


def measure_run(
    folder: Path, *, num_resamples: int = 1000, on_progress: Callable[[int, int], Any] = lambda done, total: None
) -> dict[str, Any]:
    """Measure the predictions of a run, write `metrics.json` and return its content.

    Classification gets every metric of `bayesattn.metrics` and the task's own; a regression its correlations, the error and
    the spread of the draws; a span task the classifier's metrics over its answers, exact match and F1, and calibration,
    selective prediction and detection of unanswerable questions by the answers that are given (`answer_…`). All but a
    regression get the rule by which `bayesattn predict` trusts an answer (`trust.py`).

    Args:
        folder: A run folder with predictions.
        num_resamples: Bootstrap resamples behind every interval; 0 leaves the intervals out.
        on_progress: Called with the number of splits and methods done and to do.
    """
    run, predictions = read_run(folder), read_predictions(folder)
    task = find_task(run["config"]["task"])
    if task.kind == "regression":
        result = _regression_result(run, predictions, num_resamples)
    else:
        result = measure_classes(folder, num_resamples=num_resamples, on_progress=on_progress)
    answers = read_answers(folder) if task.kind == "spans" else {}
    for method, measured in result["methods"].items():
        if task.kind != "regression":
            sure = sureness(answers["validation"][method]) if task.kind == "spans" else _certainty(predictions, method)
            measured["trust"] = choose_rule(*sure, measured["num_samples"]).to_dict()
        threshold = _null_threshold(answers["validation"][method]) if allows_none(task) else None
        for name, values in measured["splits"].items():
            split = predictions.splits[name]
            if split.labels is None:
                if task.kind == "spans":
                    values["metrics"] |= _detection(answers["test"][method], answers[name][method])
                continue
            if task.kind == "spans":
                values["metrics"] |= _answer_metrics(answers[name][method], threshold, num_resamples)
                values["metrics"] |= _answer_calibration(answers[name][method], num_resamples)
            else:
                values["metrics"] |= _task_metrics(task, split, method, num_resamples)
    write_json(folder / METRICS_FILE, result)
    return result


def _certainty(predictions: Predictions, method: str) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Return the probability of the most probable class of every validation text, and whether it is right."""
    split = predictions.splits["validation"]
    assert split.labels is not None
    confidence, predicted = split.samples[method].double().mean(dim=0).max(dim=1)
    return confidence, (predicted == split.labels).double()


def _task_metrics(task: Task, split: SplitPredictions, method: str, num_resamples: int) -> dict[str, dict[str, Any]]:
    assert split.labels is not None
    mean = split.samples[method].double().mean(dim=0)
    predicted = mean[:, 0] if task.kind == "regression" else mean.argmax(dim=1)
    labels = split.labels.double() if task.kind == "regression" else split.labels
    names = [name for name in task.metrics if name != "accuracy"]
    if task.kind == "regression":
        values = {"rmse": float((predicted - labels).square().mean().sqrt())}
        values["mean_deviation"] = float(split.samples[method].double().std(dim=0, correction=0).mean())
        extra = {name: {"value": value, "low": None, "high": None} for name, value in values.items()}
    else:
        extra = {}
    return extra | _with_intervals(names, predicted, labels, num_resamples)


def _with_intervals(names: list[str], predicted: Tensor, labels: Tensor, num_resamples: int) -> dict[str, dict[str, Any]]:
    if not names:
        return {}

    def statistic(p: Tensor, y: Tensor) -> Tensor:
        return torch.tensor([metrics.GLUE_METRICS[name](p, y) for name in names])

    ends: list[Any] = [(None, None)] * len(names)
    if num_resamples:
        ends = bootstrap_statistic(statistic, predicted, labels, num_resamples=num_resamples).tolist()
    values = statistic(predicted, labels).tolist()
    return {name: {"value": value, "low": low, "high": high} for name, value, (low, high) in zip(names, values, ends)}


def _null_threshold(records: list[dict[str, Any]]) -> float:
    """Choose on validation data when to leave a question unanswered; −∞ is written as a finite number."""
    threshold, _ = metrics.best_null_threshold(
        [r["null_score"] for r in records], [r["exact_match"] for r in records], [r["has_answer"] for r in records]
    )
    return max(threshold, -1e9)


def _answer_metrics(records: list[dict[str, Any]], threshold: float | None, num_resamples: int) -> dict[str, dict[str, Any]]:
    columns = torch.tensor([[_score(record, name, threshold) for name in ("exact_match", "f1")] for record in records])
    ends: list[Any] = [(None, None)] * 2
    if num_resamples:
        ends = bootstrap_statistic(lambda c: c.mean(dim=0), columns, num_resamples=num_resamples).tolist()
    settings = {} if threshold is None else {"null_threshold": threshold}
    return {
        name: {"value": float(columns[:, i].mean()), "low": ends[i][0], "high": ends[i][1], **settings}
        for i, name in enumerate(("exact_match", "f1"))
    }


def answer_losses(records: Sequence[dict[str, Any]]) -> Float[Tensor, " n"]:
    """Return −ln p(a right answer) of every question; one that the model cannot give (too long) counts 1e-9."""
    right = torch.tensor([record["right_probability"] for record in records], dtype=torch.float64)
    return -right.clamp(min=1e-9).log()


def sureness(records: Sequence[dict[str, Any]]) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Return the probability of the most probable answer to every question, and whether it is right."""
    confidence = torch.tensor([record["confidence"] for record in records], dtype=torch.float64)
    return confidence, torch.tensor([float(record["is_right"]) for record in records], dtype=torch.float64)


def _answer_calibration(records: list[dict[str, Any]], num_resamples: int) -> dict[str, dict[str, Any]]:
    """Measure how well the probability of an answer predicts that it is right."""
    confidence, is_right = sureness(records)

    def statistic(c: Tensor, a: Tensor) -> Tensor:
        return torch.stack([expected_calibration_error(c, a), aurc(c, a)])

    ends: list[Any] = [(None, None)] * 2
    if num_resamples:
        ends = bootstrap_statistic(statistic, confidence, is_right, num_resamples=num_resamples).tolist()
    values = statistic(confidence, is_right).tolist()
    names = ("answer_ece", "answer_aurc")
    found = {name: {"value": value, "low": low, "high": high} for name, value, (low, high) in zip(names, values, ends)}
    return {"answer_nll": {"value": float(answer_losses(records).mean()), "low": None, "high": None}, **found}


def _detection(inside: list[dict[str, Any]], outside: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Measure how well answers and the score of "no answer" separate questions without an answer from the test split."""
    scores = {
        "answer": [1.0 - sureness(records)[0] for records in (inside, outside)],
        "null_score": [torch.tensor([record["null_score"] for record in records]) for records in (inside, outside)],
    }
    return {
        f"ood_auroc_{name}": {"value": float(auroc(*found)), "low": None, "high": None, "score": name, "against": "test"}
        for name, found in scores.items()
    }


def _score(record: dict[str, Any], name: str, threshold: float | None) -> float:
    if threshold is not None and record["null_score"] > threshold:
        return float(not record["has_answer"])
    return record[name]


def _regression_result(run: dict[str, Any], predictions: Predictions, num_resamples: int) -> dict[str, Any]:
    methods = {}
    for method in predictions.methods:
        splits = {
            name: {"num_examples": split.samples[method].shape[1], "metrics": {}}
            for name, split in predictions.splits.items()
        }
        num_samples = next(iter(predictions.splits.values())).samples[method].shape[0]
        methods[method] = {"num_samples": num_samples, "temperature": None, "splits": splits}
    return {
        "schema": METRICS_SCHEMA,
        **{key: run[key] for key in ("recipe", "variant", "seed")},
        "draw_seed": predictions.seed,
        "methods": methods,
        "command": command_line(),
        "finished": now(),
        "environment": environment(),
    }
