"""From a config to a run folder and back, the same for every recipe."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import nn

from bayesattn.config import AttentionConfig
from bayesattn.recipes._loop import Experiment, TrainingConfig, train
from bayesattn.recipes._train import MetricLog, build_config, seed_everything
from bayesattn.runs import (
    CHECKPOINT_FILE,
    LOG_FILE,
    RunError,
    make_run_folder,
    read_run,
    read_tensors,
    write_run,
    write_tensors,
)


@runtime_checkable
class RunConfig(Protocol):
    """What the config of every recipe has; recipes add their own fields. Always a frozen dataclass."""

    @property
    def attention(self) -> AttentionConfig:
        """Soft or Bayesian attention."""
        ...

    @property
    def training(self) -> TrainingConfig:
        """How long and how fast."""
        ...

    @property
    def seed(self) -> int:
        """Seed of initialisation, batch order, dropout and noise."""
        ...


Config = TypeVar("Config")


def train_run(
    recipe: str,
    config: RunConfig,
    build: Callable[[], Experiment],
    out: Path,
    on_progress: Callable[[int, int], Any] = lambda done, total: None,
    *,
    overwrite: bool = False,
) -> MetricLog:
    """Train and write a run folder: parameters, log, and last of all `run.json`, whose presence means "complete".

    Args:
        recipe: Its name.
        config: The run.
        build: Makes the experiment, after everything has been seeded; what it raises leaves no folder behind.
        out: The folder.
        on_progress: Called with the optimiser steps done and to do.
        overwrite: Replace a run that is in the folder.
    """
    seed_everything(config.seed)
    experiment = build()
    make_run_folder(out, overwrite=overwrite)
    start = time.perf_counter()
    log = train(experiment, config.training, seed=config.seed, on_progress=on_progress)
    write_tensors(out / CHECKPOINT_FILE, experiment.model.state_dict())
    log.write(out / LOG_FILE)
    write_run(
        out,
        recipe=recipe,
        variant=config.attention.variant,
        config=dataclasses.asdict(config),  # type: ignore[call-overload]
        seed=config.seed,
        num_parameters=sum(parameter.numel() for parameter in experiment.model.parameters()),
        train_seconds=round(time.perf_counter() - start, 3),
    )
    return log


def load_run_config(folder: Path, cls: type[Config], recipe: str) -> Config:
    """Read the config of a run of `recipe`."""
    run = read_run(folder)
    if run["recipe"] != recipe:
        raise RunError(f"{folder} is a run of recipe {run['recipe']!r}; allowed here: {recipe!r}")
    return build_config(cls, run["config"])


def load_parameters(folder: Path, model: nn.Module) -> None:
    """Load the parameters of a run into the model that its config describes, and put it into eval mode."""
    tensors, _ = read_tensors(folder / CHECKPOINT_FILE)
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{folder / CHECKPOINT_FILE} does not fit the config of its run: {reason}") from None
    model.eval()
