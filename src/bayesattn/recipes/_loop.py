"""One training path for all recipes, on Hugging Face Accelerate: the same config runs on a CPU, a GPU or many processes.

A recipe says what is special to it by an `Experiment`: model, optimiser, how indices become a batch, the likelihood of a
batch, what to measure in between. The loop does the rest. The loss of one optimiser step is the negative ELBO per label,

    loss = (Σ NLL + λ_t Σ KL) / labels                                                              (Eq. 5)

with both sums over all examples of the step: every micro-batch and every process. So neither batch size, nor
accumulation, nor the number of processes changes the weight of the KL.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from accelerate import Accelerator
from jaxtyping import Float, Int
from torch import Tensor, nn

from bayesattn.objective import KLSchedule, elbo
from bayesattn.recipes._train import MetricLog
from bayesattn.recording import record_kl


@dataclass(frozen=True)
class TrainingConfig:
    """How long and how fast a recipe trains; the key `training` of its configs.

    Args:
        epochs: Passes over the training examples, at most.
        batch_size: Examples per optimiser step, over all processes and micro-batches.
        accumulation_steps: Micro-batches per optimiser step.
        clip_norm: Largest norm of the gradient; None does not clip.
        precision: `fp32`, or `bf16` autocast (noise, softmax and KL stay in float32).
        kl_schedule: λ_t by optimiser step.
        keep: `last`, or the metric of `Experiment.validate` whose best epoch gives the run its parameters.
        keep_mode: Whether the best value of `keep` is the smallest or the largest.
        patience: Epochs without a better value of `keep` after which training stops; None never stops early.
    """

    epochs: int = 10
    batch_size: int = 32
    accumulation_steps: int = 1
    clip_norm: float | None = None
    precision: Literal["fp32", "bf16"] = "fp32"
    kl_schedule: KLSchedule = field(default_factory=KLSchedule)
    keep: str = "last"
    keep_mode: Literal["min", "max"] = "min"
    patience: int | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "accumulation_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: an integer of at least 1")
        if self.clip_norm is not None and not (0.0 < self.clip_norm < math.inf):
            raise ValueError(f"clip_norm is {self.clip_norm!r}; allowed: a finite number above 0, or null")
        if self.patience is not None and (self.patience < 1 or self.keep == "last"):
            raise ValueError(f"patience is {self.patience!r}; allowed: at least 1, with `keep` naming a metric, or null")


class Experiment:
    """What a recipe gives to the loop. Subclasses set the attributes and write the methods that raise here.

    Attributes:
        model: With its parameters, on the CPU; the loop moves it.
        optimizer: Over the model's parameters.
        scheduler: Stepped once per optimiser step; optional.
        num_examples: Size of the training set.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
    num_examples: int

    def batches(self, config: TrainingConfig, generator: torch.Generator) -> Sequence[Int[Tensor, " b"]]:
        """Return the indices of each optimiser step of one epoch; shuffled, unless a recipe has a reason."""
        return torch.randperm(self.num_examples, generator=generator).split(config.batch_size)

    def collate(self, indices: Int[Tensor, " b"]) -> dict[str, Any]:
        """Return the batch of these examples, its tensors on the CPU; the loop moves them."""
        raise NotImplementedError

    def num_labels(self, batch: dict[str, Any]) -> int:
        """Return how many labels (answers, tokens, nodes) share the likelihood of a batch; by default one an example."""
        return len(next(iter(batch.values())))

    def nll(self, model: nn.Module, batch: dict[str, Any]) -> Float[Tensor, ""]:
        """Return the negative log-likelihood of a batch, summed over its labels. Call `model`, not `self.model`."""
        raise NotImplementedError

    def validate(self, model: nn.Module) -> dict[str, float]:
        """Return measures after an epoch, on validation data; the model is in eval mode, gradients are off."""
        return {}

    def is_better(self, row: dict[str, Any], best: dict[str, Any] | None, config: TrainingConfig) -> bool:
        """Whether the parameters after this epoch replace the best so far."""
        if best is None or config.keep == "last":
            return True
        if config.keep_mode == "min":
            return row[config.keep] < best[config.keep]
        return row[config.keep] > best[config.keep]

    def is_done(self, rows: list[dict[str, Any]], config: TrainingConfig) -> bool:
        """Whether to stop before the last epoch; `rows` are the log so far, each with `is_best`."""
        if config.patience is None:
            return False
        last_best = max(index for index, row in enumerate(rows) if row["is_best"])
        return len(rows) - 1 - last_best >= config.patience


def num_steps(experiment: Experiment, config: TrainingConfig) -> int:
    """Return the optimiser steps of the whole run, for learning-rate schedules and progress bars."""
    return config.epochs * len(experiment.batches(config, torch.Generator().manual_seed(0)))


def train(
    experiment: Experiment,
    config: TrainingConfig,
    *,
    seed: int,
    on_progress: Callable[[int, int], Any] = lambda done, total: None,
) -> MetricLog:
    """Train `experiment.model` in place and return the log, one row an epoch.

    Args:
        experiment: What to train.
        config: How.
        seed: Of the batch order; model, dropout and noise are seeded by the caller (`seed_everything`).
        on_progress: Called after every optimiser step with the steps done and the steps of the whole run.
    """
    accelerator = Accelerator(mixed_precision="bf16" if config.precision == "bf16" else "no")
    model, optimizer = accelerator.prepare(experiment.model, experiment.optimizer)
    log, step, best_row, best = MetricLog(), 0, None, None
    total = num_steps(experiment, config)
    for epoch in range(config.epochs):
        model.train()
        sums = {"nll": 0.0, "kl": 0.0, "labels": 0, "examples": 0}
        # a generator an epoch: the order of epoch 7 does not depend on how the first six went
        order = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        for indices in experiment.batches(config, order):
            _step(accelerator, experiment, model, optimizer, indices, config, step, sums)
            step += 1
            on_progress(step, total)
        model.eval()
        with torch.no_grad(), accelerator.autocast():
            measured = experiment.validate(model)
        row: dict[str, Any] = {
            "epoch": epoch,
            "step": step,
            "kl_weight": config.kl_schedule(step - 1),
            "train_nll": float(sums["nll"]) / sums["labels"],
            "train_kl": float(sums["kl"]) / sums["examples"],
            **measured,
        }
        row["is_best"] = experiment.is_better(row, best_row, config)
        log.add(**row)
        if row["is_best"]:
            best_row = row
            if config.keep != "last":
                best = {name: value.detach().clone() for name, value in experiment.model.state_dict().items()}
        if experiment.is_done(log.rows, config):
            break
    if best is not None:
        experiment.model.load_state_dict(best)
    experiment.model.eval()
    return log


def _step(
    accelerator: Accelerator,
    experiment: Experiment,
    model: nn.Module,
    optimizer: Any,
    indices: Int[Tensor, " b"],
    config: TrainingConfig,
    step: int,
    sums: dict[str, Any],
) -> None:
    """Make one optimiser step on the examples `indices`, of which this process takes its share."""
    rank, world = accelerator.process_index, accelerator.num_processes
    parts = [part for part in indices[rank::world].chunk(config.accumulation_steps) if len(part)]
    batches = [experiment.collate(part) for part in parts]
    labels = sum(experiment.num_labels(batch) for batch in batches)
    if world > 1:
        shared = accelerator.reduce(torch.tensor(labels, device=accelerator.device), reduction="sum")
        assert isinstance(shared, Tensor)
        labels = int(shared)
    for index, (part, batch) in enumerate(zip(parts, batches)):
        is_last = index == len(parts) - 1
        batch = {name: _move(value, accelerator.device) for name, value in batch.items()}
        with accelerator.autocast(), record_kl() as scope:
            nll = experiment.nll(model, batch)
        kl = scope.total() if len(scope) else nll.new_zeros(())
        # DDP averages over processes: times their number, the average is the sum
        parts_of_loss = elbo(
            nll * (world / labels),
            kl * (len(part) * world / len(indices)),
            kl_weight=config.kl_schedule(step),
            labels_per_example=labels / len(indices),
        )
        with accelerator.no_sync(model) if not is_last else nullcontext():
            accelerator.backward(parts_of_loss.loss)
        sums["nll"] = sums["nll"] + nll.detach()
        sums["kl"] = sums["kl"] + kl.detach() * len(part)
    sums["labels"] += labels
    sums["examples"] += len(indices)
    if config.clip_norm is not None:
        accelerator.clip_grad_norm_(experiment.model.parameters(), config.clip_norm)
    optimizer.step()
    optimizer.zero_grad()
    if experiment.scheduler is not None:
        experiment.scheduler.step()


def _move(value: Any, device: torch.device) -> Any:
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
