"""The interface between a recipe and the training loop, and the settings of the loop."""

from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bayesattn.objective import KLSchedule
from bayesattn_recipes.common.config import Count, NotNegative, Positive, config_class


@config_class
class TrainingConfig:
    """How long and how fast a recipe trains; the key `training` of its configs.

    Args:
        epochs: Passes over the training examples, at most.
        batch_size: Examples per optimizer step, over all processes and micro-batches.
        accumulation_steps: Micro-batches per optimizer step.
        clip_norm: Largest norm of the gradient; None does not clip.
        precision: `fp32`, or `bf16` autocast (noise, softmax and KL stay in float32).
        kl_schedule: λ_t by optimizer step.
        keep: `last`, or the metric of `Experiment.validate` whose best epoch gives the run its parameters.
        keep_mode: Whether the best value of `keep` is the smallest or the largest.
        patience: Epochs without a better value of `keep` after which training stops; None never stops early.
        noise: `generator` draws attention noise from torch's generator, a separate one in each process. `keyed` makes it a
            function of (seed, step, example, call): the same whatever the number of processes.
        on_nonfinite: What to do when the loss or a gradient is not finite: `stop`, name the place and save the state before
            the step; or `skip` the step and count it. The check costs one wait for the device per step.
        checkpoint_steps: Optimizer steps between two checkpoints; None does not count steps.
        checkpoint_seconds: Seconds between two checkpoints; None ignores the time.
    """

    epochs: Count = 10
    batch_size: Count = 32
    accumulation_steps: Count = 1
    clip_norm: Positive | None = None
    precision: Literal["fp32", "bf16"] = "fp32"
    kl_schedule: KLSchedule = field(default_factory=KLSchedule)
    keep: str = "last"
    keep_mode: Literal["min", "max"] = "min"
    patience: Count | None = None
    noise: Literal["generator", "keyed"] = "generator"
    on_nonfinite: Literal["stop", "skip"] = "stop"
    checkpoint_steps: Count | None = None
    checkpoint_seconds: NotNegative | None = 60.0

    def __post_init__(self) -> None:
        if self.patience is not None and self.keep == "last":
            raise ValueError(f"patience must be null with keep 'last', got {self.patience!r}")


class Experiment:
    """The interface between a recipe and the loop. Subclasses set the attributes and implement the methods that raise here.

    Attributes:
        model: With its parameters, on the CPU; the loop moves it.
        optimizer: Over the model's parameters.
        scheduler: Stepped once per optimizer step; optional.
        num_examples: Size of the training set.
        max_steps: Optimizer steps of the whole run, in place of the config's epochs; None counts epochs.
        is_recordable: Whether `nll` runs on the device alone: nothing in it waits for a result or depends on values of the
            batch. On a GPU the loop then records it, once per shape of batch (`replay.py`).
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
    num_examples: int
    max_steps: int | None = None
    is_recordable: bool = False

    def batches(self, config: TrainingConfig, generator: torch.Generator) -> Sequence[Int[Tensor, " b"]]:
        """Return the indices of each optimizer step of one epoch; shuffled, unless a recipe has a reason not to.

        Random choices come from `generator` alone: a resumed run calls this again for its current epoch.
        """
        return torch.randperm(self.num_examples, generator=generator).split(config.batch_size)

    def collate(self, indices: Int[Tensor, " b"]) -> dict[str, Any]:
        """Return the batch of these examples, its tensors on the CPU; the loop moves them."""
        raise NotImplementedError

    def pad(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a batch of the same likelihood, padded to one of a few shapes; called if steps are recorded per shape."""
        return batch

    def num_labels(self, batch: dict[str, Any]) -> int:
        """Return how many labels (answers, tokens, nodes) share the likelihood of a batch; by default one per example.

        The batch is the one that `collate` returned, still on the CPU.
        """
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

    def extra_state(self) -> dict[str, Any]:
        """Return a copy of the experiment's own training state; called before every step.

        Plain values and tensors, for checkpoints.
        """
        return {}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Restore what `extra_state` returned."""

    def write_files(self, folder: Path) -> None:
        """Write what a run needs besides its parameters, such as a vocabulary; called before the run counts as complete."""

    def facts(self) -> dict[str, Any]:
        """Return further entries of `run.json`, as JSON values."""
        return {}


def num_steps(experiment: Experiment, config: TrainingConfig) -> int:
    """Return the optimizer steps of the whole run, for learning-rate schedules and progress bars."""
    if experiment.max_steps is not None:
        return experiment.max_steps
    return config.epochs * len(experiment.batches(config, torch.Generator().manual_seed(0)))
