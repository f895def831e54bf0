"""Ask a fine-tuned encoder for M predictions on its test sets, and measure them as GLUE and SQuAD do.

Methods: `mean` draws nothing, `attention` draws attention weights, `dropout` draws dropout masks (of a soft model, those on
its attention weights included), `attention+dropout` both, and `post-hoc` draws attention weights of a model trained
with soft attention, with the noise that suits its validation data best (`tune_noise`; nothing is trained).
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from bayesattn.config import AttentionConfig
from bayesattn.convert import tune_noise
from bayesattn.metrics import bootstrap_statistic
from bayesattn.nn import BayesianModule
from bayesattn.predict import predict
from bayesattn.recipes.language import metrics, squad
from bayesattn.recipes.language.features import Collator, bucketed
from bayesattn.recipes.language.prepare import Split, allows_none, make_split
from bayesattn.recipes.language.shifts import shifted_splits
from bayesattn.recipes.language.tasks import Task, find_task
from bayesattn.recipes.language.train import (
    ANSWERS_FILE,
    LanguageConfig,
    LoadedRun,
    load_run,
    make_collator,
    prepare_run,
)
from bayesattn.report.measure import measure_run as measure_classes
from bayesattn.runs import (
    METRICS_FILE,
    METRICS_SCHEMA,
    Predictions,
    SplitPredictions,
    command_line,
    environment,
    now,
    read_json,
    read_predictions,
    read_run,
    write_json,
)

ANSWERS_SCHEMA = "bayesattn.answers/1"
BATCH_SIZE = 64
# tokens per forward pass, draws included: bounds the memory of the activations
TOKENS_PER_PASS = {"cuda": 2**18, "cpu": 2**13}
# draws behind every candidate of `tune_noise`
TUNING_SAMPLES = 10

Answers = dict[str, dict[str, list[dict[str, Any]]]]


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
    """Predict the validation, test and shifted test sets of a run; of a span task, write the answers into its folder.

    Args:
        folder: The run.
        num_samples: M, at least 2.
        noise: Strengths of the noisy test sets (`shifts.py`); 0 leaves all shifted sets out.
        methods: See the module's text; None takes `mean` and the usual way to draw.
        seed: Of the draws.
        on_progress: Called with the number of splits and methods done and to do.
        data: The data folder; None takes the one the run was trained from, or where that is gone the one that the
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
    return predictions


def _data_folder(run: LoadedRun, given: Path | None) -> Path | None:
    """Return the folder that was asked for, else the run's own, else the one that the variable names.

    The command line cannot tell an option from the variable, so a folder that equals the variable's counts as the latter.
    """
    named = os.environ.get("BAYESATTN_DATA")
    if given is not None and str(given) != named:
        return given
    is_gone = run.data is None or not run.data.exists()
    return Path(named) if named and is_gone else run.data


def write_answers(folder: Path, answers: Answers) -> None:
    """Write the answers to the questions of every split and method."""
    write_json(folder / ANSWERS_FILE, {"schema": ANSWERS_SCHEMA, "splits": answers})


def available_methods(config: LanguageConfig, model: PreTrainedModel) -> list[str]:
    """Return how predictions can be drawn from a model, the usual way second."""
    has_dropout = any(isinstance(module, torch.nn.Dropout) and module.p > 0.0 for module in model.modules())
    if config.attention.is_stochastic:
        return ["mean", "attention", *(["attention+dropout"] if has_dropout else [])]
    is_classifier = find_task(config.task).kind == "classification"
    return ["mean", *(["dropout"] if has_dropout else []), *(["post-hoc"] if is_classifier else [])]


@dataclass(frozen=True)
class Predictor:
    """A model with all that is needed to predict splits with it.

    Attributes:
        model: In eval mode.
        task: Its task.
        config: Of its run.
        collator: Makes batches.
        class_names: One per class.
    """

    model: PreTrainedModel
    task: Task
    config: LanguageConfig
    collator: Collator
    class_names: tuple[str, ...]

    def predict(
        self,
        splits: dict[str, Split],
        *,
        methods: Sequence[str] | None = None,
        num_samples: int = 20,
        seed: int = 0,
        on_progress: Callable[[int, int], Any] = lambda done, total: None,
    ) -> tuple[Predictions, Answers]:
        """Predict every split with every method; the answers are those of a span task, empty for the others."""
        allowed = available_methods(self.config, self.model)
        methods = allowed[:2] if methods is None else list(dict.fromkeys(methods))
        for method in methods:
            if method not in allowed:
                raise ValueError(f"method is {method!r}; allowed for this run: {', '.join(allowed)}")
        if num_samples < 2:
            raise ValueError(f"num_samples is {num_samples!r}; allowed: an integer of at least 2")
        samples: dict[str, dict[str, Tensor]] = {name: {} for name in splits}
        labels: dict[str, Tensor | None] = {}
        answers: Answers = {name: {} for name in splits} if self.task.kind == "spans" else {}
        done = 0
        for method in methods:
            with self._noise_for(method, splits["validation"], seed):
                for name, split in splits.items():
                    if self.task.kind == "spans":
                        found = self.answers(split, method, num_samples, seed)
                        samples[name][method] = torch.stack([a.probabilities for a in found], dim=1)
                        answers[name][method] = [_record(q, a) for q, a in zip(split.questions, found)]
                        if method == methods[0]:
                            labels[name] = self._right_classes(name, split, found)
                    else:
                        samples[name][method] = self.draw(split, method, num_samples, seed)
                        labels[name] = None if split.labels is None else torch.tensor(split.labels)
                    done += 1
                    on_progress(done, len(splits) * len(methods))
        found_splits = {name: SplitPredictions(samples[name], labels[name]) for name in splits}
        return Predictions(found_splits, list(self.class_names), methods, seed), answers

    @contextmanager
    def _noise_for(self, method: str, validation: Split, seed: int) -> Iterator[None]:
        """Give a soft model the noise that suits its validation data, for the method `post-hoc`."""
        if method != "post-hoc":
            yield
            return
        parts = [module for module in self.model.modules() if isinstance(module, BayesianModule)]
        before = [part.config for part in parts]
        try:
            for part in parts:
                part.config = AttentionConfig("BAM-NOKL")
            batches = [batch for _, batch in self._batches(validation, with_labels=True)]
            longest = max(batch["input_ids"].numel() for batch in batches)
            with self._autocast():
                tune_noise(
                    self.model, batches, num_samples=TUNING_SAMPLES, seed=seed,
                    chunk_size=min(self._draws_per_pass(longest), TUNING_SAMPLES),
                )  # fmt: skip
            yield
        finally:
            for part, config in zip(parts, before):
                part.config = config

    def _batches(self, split: Split, *, with_labels: bool = False) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        device = self.model.device
        for indices in bucketed(split.rows, BATCH_SIZE):
            batch = self.collator([split.rows[i] for i in indices])
            wanted = ("input_ids", "token_type_ids", "attention_mask", *(("labels",) if with_labels else ()))
            yield indices, {name: batch[name].to(device) for name in wanted if name in batch}

    def _outputs(self, batch: dict[str, Tensor], method: str, num_samples: int, seed: int) -> Float[Tensor, "s b *o"]:
        """Return the head's outputs: logits, or start and end scores; one draw for `mean`."""
        get = _span_scores if self.task.kind == "spans" else _logits
        with torch.no_grad(), self._autocast():
            if method == "mean":
                return get(self.model(**batch)).float().unsqueeze(0)
            chunk = min(self._draws_per_pass(batch["input_ids"].numel()), num_samples)
            drawn = predict(
                self.model, batch, num_samples, seed, chunk,
                task="regression", dropout=method.endswith("dropout"), output=get,
            )  # fmt: skip
            return drawn.logits

    def draw(self, split: Split, method: str, num_samples: int, seed: int) -> Float[Tensor, "s n c"]:
        """Return class probabilities, or scores, of every example in its order."""
        draws = 1 if method == "mean" else num_samples
        samples = torch.empty(draws, len(split.rows), len(self.class_names))
        for number, (indices, batch) in enumerate(self._batches(split)):
            outputs = self._outputs(batch, method, num_samples, seed + number)
            values = outputs if self.task.kind == "regression" else torch.softmax(outputs, dim=-1)
            samples[:, indices] = values.cpu()
        return samples

    def answers(self, split: Split, method: str, num_samples: int, seed: int) -> list[squad.Answer]:
        """Return the distribution over answers of every question."""
        pieces: list[list[tuple[squad.Window, squad.WindowScores]]] = [[] for _ in split.questions]
        for number, (indices, batch) in enumerate(self._batches(split)):
            start, end = self._outputs(batch, method, num_samples, seed + number).unbind(dim=2)
            windows = [split.windows[i] for i in indices]
            length = start.shape[-1]
            allowed = torch.tensor(
                [[span is not None for span in w.offsets] + [False] * (length - len(w.offsets)) for w in windows]
            )
            for window, scores in zip(windows, squad.score_windows(start, end, allowed.to(start.device))):
                pieces[window.owner].append((window, scores))
        return [squad.answer(q, found, allows_none=allows_none(self.task)) for q, found in zip(split.questions, pieces)]

    def _right_classes(self, name: str, split: Split, found: list[squad.Answer]) -> Tensor | None:
        if name == "unanswerable":
            return None
        known = allows_none(self.task)
        return torch.tensor([squad.right_class(q, a, allows_none=known) for q, a in zip(split.questions, found)])

    def _draws_per_pass(self, tokens: int) -> int:
        return max(1, TOKENS_PER_PASS[self.model.device.type] // max(tokens, 1))

    def _autocast(self) -> torch.autocast:
        is_half = self.config.training.precision == "bf16"
        return torch.autocast(self.model.device.type, torch.bfloat16, enabled=is_half)


def _logits(result: Any) -> Tensor:
    return result.logits


def _span_scores(result: Any) -> Tensor:
    return torch.stack([result.start_logits, result.end_logits], dim=1)


def _record(question: squad.Question, found: squad.Answer) -> dict[str, Any]:
    """Return what EM and F1 need to know of an answer, and what a reader wants to see of it."""
    text = found.texts[0]
    return {
        "id": question.id,
        "answer": text,
        "probability": round(float(found.probabilities[:, 0].mean()), 6),
        "null_score": found.null_score,
        "has_answer": bool(question.answers),
        "exact_match": metrics.exact_match(text, question.golds),
        "f1": metrics.token_f1(text, question.golds),
    }


def measure_run(
    folder: Path, *, num_resamples: int = 1000, on_progress: Callable[[int, int], Any] = lambda done, total: None
) -> dict[str, Any]:
    """Measure the predictions of a run, write `metrics.json` and return what it holds.

    Classification gets every metric of `bayesattn.metrics` and the task's own; a regression its correlations, the error and
    the spread of the draws; a span task the classifier's metrics over its answers, exact match and F1.

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
    answers = read_json(folder / ANSWERS_FILE, ANSWERS_SCHEMA)["splits"] if task.kind == "spans" else {}
    for method, measured in result["methods"].items():
        threshold = _null_threshold(answers["validation"][method]) if allows_none(task) else None
        for name, values in measured["splits"].items():
            split = predictions.splits[name]
            if split.labels is None:
                continue
            if task.kind == "spans":
                values["metrics"] |= _answer_metrics(answers[name][method], threshold, num_resamples)
            else:
                values["metrics"] |= _task_metrics(task, split, method, num_resamples)
    write_json(folder / METRICS_FILE, result)
    return result


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
