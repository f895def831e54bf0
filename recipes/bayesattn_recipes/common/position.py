"""The position of a run between two optimizer steps, packed for a checkpoint and unpacked again."""

import warnings
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from bayesattn_recipes.common.config import seed_everything
from bayesattn_recipes.common.experiment import Experiment
from bayesattn_recipes.common.processes import Processes, process_seed
from bayesattn_recipes.common.state import Generators, like, load_model, load_optimizer

# sums over each process' own examples
SUMS = ("nll", "kl", "entropy", "observed")


@dataclass
class Position:
    """The position of a run between two optimizer steps.

    Attributes:
        step: Optimizer steps done.
        epoch: Epochs done.
        batch: Optimizer steps done in the epoch that has begun.
        sums: Sums of this epoch: NLL, KL and attention entropy of this process' examples; labels and examples of all.
        rows: The log.
        best: Parameters to keep, if they are not the last.
        skipped: Steps left out because a number was not finite.
        seconds: Spent so far.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    sums: dict[str, Any] = field(default_factory=lambda: dict.fromkeys(SUMS, 0.0) | {"labels": 0, "examples": 0})
    rows: list[dict[str, Any]] = field(default_factory=list)
    best: dict[str, Tensor] | None = None
    skipped: int = 0
    seconds: float = 0.0

    def pack(
        self, experiment: Experiment, processes: Processes, generators: Generators, extra: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the whole state of a run as plain values and tensors; every process has to call this.

        Args:
            experiment: What is trained.
            processes: The processes that train it.
            generators: Generators of this process, before the next step.
            extra: The experiment's own, before the next step.
        """
        scheduler = experiment.scheduler
        own = {"random": generators.pack(), "sums": {name: _to_cpu(value) for name, value in self.sums.items()}}
        return {
            **{field.name: getattr(self, field.name) for field in fields(Position) if field.name != "sums"},
            "processes": gather_object([own]) if processes.world > 1 else [own],
            "model": experiment.model.state_dict(),
            "optimizer": experiment.optimizer.state_dict(),
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "experiment": extra,
        }

    @classmethod
    def unpack(
        cls, state: dict[str, Any], experiment: Experiment, processes: Processes, seed: int
    ) -> tuple["Position", Generators | None]:
        """Undo `pack`: fill the experiment, and return the position of the run and this process' random generators.

        If the number of processes has changed, no generators are returned and they are seeded again.
        """
        each = state.pop("processes")
        parts = {name: state.pop(name) for name in ("model", "optimizer", "scheduler", "experiment")}
        at = cls(**state)
        load_model(experiment.model, parts["model"])
        load_optimizer(experiment.optimizer, parts["optimizer"])
        if experiment.scheduler is not None:
            experiment.scheduler.load_state_dict(parts["scheduler"])
        experiment.load_extra_state(parts["experiment"])
        device = processes.device
        if at.best is not None:
            targets = experiment.model.state_dict()
            at.best = {name: like(value, targets[name]).to(device) for name, value in at.best.items()}
        if len(each) == processes.world:
            own = each[processes.rank]
            at.sums = {name: move(value, device) for name, value in own["sums"].items()}
            return at, Generators.unpack(own["random"])
        warnings.warn(
            f"the run was started with {len(each)} processes and continues with {processes.world}: examples, attention "
            "noise keyed by example and the objective stay the same, dropout masks do not",
            UserWarning,
            stacklevel=4,
        )
        at.sums = {**each[0]["sums"]}
        for name in SUMS:
            total = sum(process["sums"][name] for process in each)
            at.sums[name] = move(total if processes.rank == 0 else total * 0.0, device)
        seed_everything(process_seed(seed, processes.rank, at.step))
        return at, None


def move(value: Any, device: torch.device) -> Any:
    """Return a tensor on the device, and anything else as it is."""
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value


def _to_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value
