"""How an encoder is fine-tuned: AdamW, a linear schedule, batches of similar lengths, the task's own metrics."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel, get_linear_schedule_with_warmup
from transformers.trainer_pt_utils import get_length_grouped_indices
from transformers.utils import logging

from bayesattn_recipes.baselines import HardWeights, with_score_function
from bayesattn_recipes.common.config import Count, NotNegative, Positive, config_class
from bayesattn_recipes.common.loop import Experiment, TrainingConfig, num_steps
from bayesattn_recipes.common.position import move
from bayesattn_recipes.common.replay import is_recordable
from bayesattn_recipes.language.features import Collator, bucketed
from bayesattn_recipes.language.metrics import GLUE_METRICS
from bayesattn_recipes.language.prepare import Split
from bayesattn_recipes.language.tasks import Task

VALIDATION_BATCH = 128


@config_class
class LanguageTraining(TrainingConfig):
    """How an encoder is fine-tuned: AdamW with a linear warm-up and a linear decay to 0.

    Args:
        steps: Optimizer steps; replaces `epochs`.
        learning_rate: Peak learning rate.
        warmup: Steps of the warm-up, or below 1 their share of all steps.
        weight_decay: AdamW's, not on biases and norms.
        group_by_length: Batches of similar lengths, for less padding.
    """

    clip_norm: Positive | None = 1.0
    steps: Count | None = None
    learning_rate: Positive = 5e-5
    warmup: NotNegative = 0.1
    weight_decay: NotNegative = 0.01
    group_by_length: bool = False


class FineTuning(Experiment):
    """An encoder with a head on tokenized texts.

    Args:
        model: From `model.load_pretrained`.
        task: The task it learns.
        splits: `train` and `validation`.
        collator: Makes batches.
        config: How to train.
    """

    model: PreTrainedModel

    def __init__(
        self, model: PreTrainedModel, task: Task, splits: dict[str, Split], collator: Collator, config: LanguageTraining
    ) -> None:
        self.model, self.task, self.collator = model, task, collator
        self.train, self.validation = splits["train"].rows, splits["validation"].rows
        self.num_examples, self.max_steps = len(self.train), config.steps
        # hard choices are charged with the loss of their own example, which the model does not return
        self.is_hard = any(isinstance(module, HardWeights) for module in model.modules())
        self.is_recordable = is_recordable(model)
        # weight decay for matrices only, not for biases and the scales of norms
        parameters = list(model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, fused=True)
        total = num_steps(self, config)
        warmup = config.warmup * total if config.warmup < 1.0 else config.warmup
        self.scheduler = get_linear_schedule_with_warmup(self.optimizer, math.ceil(warmup), total)

    def batches(self, config: TrainingConfig, generator: torch.Generator) -> Sequence[Int[Tensor, " b"]]:
        """Return shuffled batches, of similar lengths if the config asks for it."""
        assert isinstance(config, LanguageTraining)
        if not config.group_by_length:
            return super().batches(config, generator)
        lengths = [len(row["input_ids"]) for row in self.train]
        order = get_length_grouped_indices(lengths, config.batch_size, generator=generator)
        return torch.tensor(order).split(config.batch_size)

    def collate(self, indices: Int[Tensor, " b"]) -> dict[str, Tensor]:
        """Return padded ids, types, mask and labels."""
        return self.collator([self.train[i] for i in indices.tolist()])

    def num_labels(self, batch: dict[str, Any]) -> int:
        """Return one label per example, but two for an answer: its first and its last token."""
        return len(batch["input_ids"]) * (2 if self.task.kind == "spans" else 1)

    def nll(self, model: nn.Module, batch: dict[str, Any]) -> Float[Tensor, ""]:
        """Return the model's loss, which is a mean over the labels, as a sum; for a score it is the squared error.

        During CUDA-graph capture a mask cannot be checked for equal rows, so it is passed as one row.
        """
        if self.is_hard:
            return with_score_function(model, lambda: example_losses(self.task, model(**batch), batch)).sum()
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            batch = {**batch, "attention_mask": batch["attention_mask"].bool()[:, None, None, :]}
        return model(**batch).loss * self.num_labels(batch)

    def validate(self, model: nn.Module) -> dict[str, float]:
        """Return the loss of the posterior mean and, but for answers in texts, the metrics of the task."""
        device = next(model.parameters()).device
        total, outputs, labels = torch.zeros((), dtype=torch.float64, device=device), [], []
        for chosen in bucketed(self.validation, VALIDATION_BATCH):
            batch = self.collator([self.validation[i] for i in chosen])
            found = model(**{name: move(value, device) for name, value in batch.items()})
            total += found.loss * len(chosen)
            if self.task.kind != "spans":
                outputs.append(found.logits.float())
                labels.append(batch["labels"])
        measured = {"validation_loss": float(total) / len(self.validation)}
        if self.task.kind == "spans":
            return measured
        logits, right = torch.cat(outputs).cpu(), torch.cat(labels)
        predicted = logits.reshape(len(right)) if self.task.kind == "regression" else logits.argmax(dim=-1)
        return measured | {f"validation_{name}": GLUE_METRICS[name](predicted, right) for name in self.task.metrics}


def example_losses(task: Task, output: Any, batch: dict[str, Any]) -> Float[Tensor, " b"]:
    """Return the loss of each example, which hard choices are charged with; the model's own is its mean over labels."""
    if task.kind == "spans":
        first, last = output.start_logits.float(), output.end_logits.float()
        length = first.shape[1]
        # an answer outside its window has no label, as in transformers
        options = {"ignore_index": length, "reduction": "none"}
        losses = F.cross_entropy(first, batch["start_positions"].clamp(0, length), **options)
        return losses + F.cross_entropy(last, batch["end_positions"].clamp(0, length), **options)
    logits, labels = output.logits.float(), batch["labels"]
    if task.kind == "regression":
        return (logits.reshape(len(labels)) - labels).square()
    return F.cross_entropy(logits, labels, reduction="none")


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
