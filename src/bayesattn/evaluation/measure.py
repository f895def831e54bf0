"""metrics.json: every metric of every split and method of a run, with its interval and what it depends on."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from bayesattn import metrics
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
from bayesattn.files import RunError, write_json

# the split on which temperatures are fitted, and the one that out-of-distribution data is compared with
VALIDATION = "validation"
IN_DISTRIBUTION = "test"
SCORES = ("entropy", "mutual_information")


def measure_run(
    folder: Path, *, num_resamples: int = 1000, on_progress: Callable[[int, int], Any] = lambda done, total: None
) -> dict[str, Any]:
    """Measure the predictions of a run, write `metrics.json` and return its content.

    Args:
        folder: A run folder with predictions.
        num_resamples: Bootstrap resamples behind every interval; 0 leaves the intervals out.
        on_progress: Called with the number of splits and methods done and to do, for a progress bar.
    """
    run, predictions = read_run(folder), read_predictions(folder)
    done, total = itertools.count(1), len(predictions.methods) * len(predictions.splits)

    def advance() -> None:
        on_progress(next(done), total)

    result = {
        "schema": METRICS_SCHEMA,
        **{key: run[key] for key in ("recipe", "variant", "seed")},
        "draw_seed": predictions.seed,
        "methods": {method: measure(predictions, method, num_resamples, advance) for method in predictions.methods},
        "command": command_line(),
        "finished": now(),
        "environment": environment(),
    }
    write_json(folder / METRICS_FILE, result)
    return result


def measure(
    predictions: Predictions, method: str, num_resamples: int = 1000, on_split: Callable[[], Any] = lambda: None
) -> dict[str, Any]:
    """Return the metrics of one method: `num_samples`, the fitted `temperature`, and `splits` by name."""
    temperature = _fit_temperature(predictions, method)
    splits = {}
    for name, split in predictions.splits.items():
        try:
            if split.labels is None:
                values = _out_of_distribution(predictions, split, method)
            else:
                options = {"task": predictions.task, "test": predictions.test, "num_resamples": num_resamples}
                estimates = metrics.evaluate_predictions(split.samples[method], split.labels, **options)
                values = {key: estimate.to_dict() for key, estimate in estimates.items()}
                if temperature is not None:
                    values |= _after_scaling(split, method, temperature)
        except ValueError as error:
            raise RunError(f"split {name!r}, method {method!r}: {error}") from None
        splits[name] = {"num_examples": split.samples[method].shape[1], "metrics": values}
        on_split()
    num_samples = next(iter(predictions.splits.values())).samples[method].shape[0]
    return {"num_samples": num_samples, "temperature": temperature, "splits": splits}


def mean_logits(samples: Tensor) -> Tensor:
    """Return ln of the mean probability, finite, for temperature scaling."""
    mean = samples.double().mean(dim=0)
    return mean.clamp(min=torch.finfo(torch.float64).tiny).log()


def _fit_temperature(predictions: Predictions, method: str) -> float | None:
    split = predictions.splits.get(VALIDATION)
    # a temperature rescales a softmax; probabilities of separate classes have none
    if split is None or split.labels is None or predictions.task != "multiclass":
        return None
    return metrics.fit_temperature(mean_logits(split.samples[method]), split.labels)


def _after_scaling(split: SplitPredictions, method: str, temperature: float) -> dict[str, dict[str, Any]]:
    """Return NLL and ECE with the temperature that was fitted on the validation split."""
    assert split.labels is not None
    # as logits: at the low temperature that suits a faultless validation split, the probability of a rare error rounds to 0
    scaled = mean_logits(split.samples[method]) / temperature
    estimates = metrics.evaluate_predictions(scaled.unsqueeze(0), split.labels, space="logit", num_resamples=0)
    settings = {"low": None, "high": None, "temperature": temperature}
    return {f"scaled_{name}": {"value": estimates[name].value, **settings} for name in ("nll", "ece")}


def _out_of_distribution(predictions: Predictions, split: SplitPredictions, method: str) -> dict[str, dict[str, Any]]:
    """Return how well entropy and mutual information tell a split without labels from the test split."""
    inside = predictions.splits.get(IN_DISTRIBUTION)
    if inside is None:
        return {}
    values = {}
    for score in SCORES if split.samples[method].shape[0] > 1 else SCORES[:1]:
        inner, outer = (_score(score, part.samples[method], predictions.task) for part in (inside, split))
        detection = metrics.ood_detection(inner, outer)
        for name, value in detection.to_dict().items():
            settings = {"low": None, "high": None, "score": score, "against": IN_DISTRIBUTION}
            values[f"ood_{name}_{score}"] = {"value": value, **settings}
    return values


def _score(name: str, samples: Tensor, task: Literal["multiclass", "multilabel"]) -> Tensor:
    samples = samples.double()
    if name == "entropy":
        return metrics.entropy(samples.mean(dim=0), task=task)
    return metrics.mutual_information(samples, task=task)
