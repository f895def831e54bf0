"""Training through the Hugging Face Trainer: the mixin's ELBO for Bayesian attention, the stock Trainer for soft.

The key `training` of a config is mapped onto `TrainingArguments`. The Trainer's own folder is a temporary one and it saves
nothing: runs are written by `train.py`, in files that cannot run code.
"""

import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

from bayesattn.hf import BayesianTrainer
from bayesattn.recipes._loop import TrainingConfig
from bayesattn.recipes._train import MetricLog
from bayesattn.recipes.language.features import Collator
from bayesattn.recipes.language.metrics import GLUE_METRICS
from bayesattn.recipes.language.prepare import Split
from bayesattn.recipes.language.tasks import Task

Progress = Callable[[int, int], Any]


@dataclass(frozen=True)
class LanguageTraining(TrainingConfig):
    """How an encoder is fine-tuned: AdamW with a linear warm-up and a linear decay to 0.

    Args:
        steps: Optimiser steps; replaces `epochs`.
        learning_rate: Its peak.
        warmup: Steps of the warm-up, or below 1 their share of all steps.
        weight_decay: AdamW's, not on biases and norms.
        group_by_length: Batches of similar lengths, for less padding.
    """

    clip_norm: float | None = 1.0
    steps: int | None = None
    learning_rate: float = 5e-5
    warmup: float = 0.1
    weight_decay: float = 0.01
    group_by_length: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("noise", "on_nonfinite", "checkpoint_steps", "checkpoint_seconds"):
            default = TrainingConfig.__dataclass_fields__[name].default
            if getattr(self, name) != default:
                raise ValueError(
                    f"training.{name} is {getattr(self, name)!r}; allowed where the Hugging Face Trainer trains: {default!r}"
                )
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps is {self.steps!r}; allowed: an integer of at least 1, or null")
        if not 0.0 < self.learning_rate < float("inf"):
            raise ValueError(f"learning_rate is {self.learning_rate!r}; allowed: a finite number above 0")
        for name in ("warmup", "weight_decay"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: a finite number of at least 0")


class TextTrainer(BayesianTrainer):
    """A text or pair has one label. To count labels would mean to wait for the GPU in every step; their number is known."""

    def count_labels(self, inputs: dict[str, Any]) -> int:
        """Return one per text."""
        return len(inputs["input_ids"])


class SpanTrainer(BayesianTrainer):
    """An answer has two labels, its first and its last token; the model's loss is a mean over both."""

    def count_labels(self, inputs: dict[str, Any]) -> int:
        """Return two per window."""
        return 2 * len(inputs["input_ids"])


class LogCallback(TrainerCallback):
    """Keeps one row an epoch, the best parameters, and says when to stop.

    Args:
        config: How to train.
        on_progress: Called after every optimiser step.
        on_row: Called with every row.
    """

    def __init__(
        self, config: LanguageTraining, on_progress: Progress, on_row: Callable[[dict[str, Any]], Any] = lambda row: None
    ) -> None:
        self.config, self.on_progress, self.on_row = config, on_progress, on_row
        self.log = MetricLog()
        self.best: dict[str, Tensor] | None = None
        self._best_row: dict[str, Any] | None = None
        self._trained: dict[str, float] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report progress."""
        self.on_progress(state.global_step, state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Remember what training logged; the evaluation that follows completes the row."""
        if logs and "loss" in logs:
            self._trained = {"train_nll": logs.get("nll", logs["loss"]), "train_kl": logs.get("kl", 0.0)}

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: dict[str, float], model: nn.Module, **kwargs: Any
    ) -> None:
        """Complete the row of an epoch."""
        row: dict[str, Any] = {
            "epoch": len(self.log.rows),
            "step": state.global_step,
            "kl_weight": self.config.kl_schedule(max(state.global_step - 1, 0)),
            **self._trained,
        }
        timings = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "epoch")
        row |= {name.replace("eval_", "validation_"): value for name, value in metrics.items() if name not in timings}
        if not math.isfinite(row.get("train_nll", 0.0) + row.get("validation_loss", 0.0)):
            raise ValueError(
                f"the loss is not finite after step {row['step']}; allowed: settings under which it is (a lower "
                "training.learning_rate, or training.precision=fp32)"
            )
        row["is_best"] = self._is_better(row)
        self.log.add(**row)
        self.on_row(row)
        if row["is_best"]:
            self._best_row = row
            if self.config.keep != "last":
                self.best = {name: value.detach().clone() for name, value in model.state_dict().items()}
        last_best = max(index for index, seen in enumerate(self.log.rows) if seen["is_best"])
        if self.config.patience is not None and len(self.log.rows) - 1 - last_best >= self.config.patience:
            control.should_training_stop = True

    def _is_better(self, row: dict[str, Any]) -> bool:
        name = self.config.keep
        if name == "last" or self._best_row is None:
            return True
        if self.config.keep_mode == "min":
            return row[name] < self._best_row[name]
        return row[name] > self._best_row[name]


def fit(
    model: PreTrainedModel,
    task: Task,
    splits: dict[str, Split],
    collator: Collator,
    config: LanguageTraining,
    *,
    seed: int,
    on_progress: Progress = lambda done, total: None,
    on_row: Callable[[dict[str, Any]], Any] = lambda row: None,
) -> MetricLog:
    """Train a converted model in place, on a GPU if there is one, and return its log.

    Args:
        model: From `model.load_pretrained`.
        task: What it learns.
        splits: `train` and `validation`.
        collator: Makes batches.
        config: How.
        seed: Of batch order, dropout and noise.
        on_progress: Called with the steps done and to do.
        on_row: Called with the row of every epoch.
    """
    is_stochastic = any(getattr(part, "is_sampling", False) for part in model.train().modules())
    trainer_class: Any = Trainer if not is_stochastic else SpanTrainer if task.kind == "spans" else TextTrainer
    options = {"kl_schedule": config.kl_schedule} if is_stochastic else {}
    callback = LogCallback(config, on_progress, on_row)
    with quiet(), tempfile.TemporaryDirectory() as folder:
        trainer = trainer_class(
            model,
            training_arguments(config, task, folder, seed),
            train_dataset=splits["train"].rows,
            eval_dataset=splits["validation"].rows,
            data_collator=collator,
            compute_metrics=None if task.kind == "spans" else lambda found: validation_metrics(task, found),
            callbacks=[callback],
            **options,
        )
        trainer.remove_callback(PrinterCallback)
        start = time.perf_counter()
        trainer.train()
        callback.log.seconds = time.perf_counter() - start
    if callback.best is not None:
        model.load_state_dict(callback.best)
    model.eval()
    return callback.log


def training_arguments(config: LanguageTraining, task: Task, folder: str, seed: int) -> TrainingArguments:
    """Return the Trainer's arguments for a config; `folder` stays empty."""
    has_gpu = torch.cuda.is_available()
    parts = config.accumulation_steps * int(os.environ.get("WORLD_SIZE", "1"))
    if config.batch_size % parts:
        raise ValueError(
            f"training.batch_size is {config.batch_size}; allowed: a multiple of {parts}, the micro-batches of all processes"
        )
    return TrainingArguments(
        folder,
        num_train_epochs=config.epochs,
        max_steps=config.steps or -1,
        per_device_train_batch_size=config.batch_size // parts,
        gradient_accumulation_steps=config.accumulation_steps,
        per_device_eval_batch_size=128,
        learning_rate=config.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=config.warmup,
        weight_decay=config.weight_decay,
        max_grad_norm=config.clip_norm or 0.0,
        bf16=config.precision == "bf16",
        train_sampling_strategy="group_by_length" if config.group_by_length else "random",
        seed=seed,
        prediction_loss_only=task.kind == "spans",
        logging_strategy="epoch",
        logging_nan_inf_filter=False,
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=has_gpu,
        use_cpu=not has_gpu,
    )


def validation_metrics(task: Task, found: Any) -> dict[str, float]:
    """Return the task's metrics of the posterior mean, from the Trainer's arrays."""
    outputs, labels = torch.as_tensor(found.predictions), torch.as_tensor(found.label_ids)
    predicted = outputs.reshape(len(labels)) if task.kind == "regression" else outputs.argmax(dim=-1)
    return {name: GLUE_METRICS[name](predicted, labels) for name in task.metrics}


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' notices (a fresh head, progress of loading) off the screen; errors still show."""
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
