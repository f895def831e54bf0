"""Warnings about training that goes wrong silently: a KL that dwarfs the NLL, and priors that are not trained."""

import warnings
from collections.abc import Iterable
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

# names of the modules that a conversion adds to an attention module
PRIOR_NAME, WEIGHTS_NAME = "bayes_prior", "bayes_weights"

# warn if the weighted KL exceeds the NLL by this factor, on average over this many micro-batches
DWARFS, BATCHES = 10.0, 100
# warn after this many optimizer steps that left the priors unchanged (several optimizers may take turns)
IDLE_STEPS = 3


class KLWatch:
    """Warns once if the weighted KL was more than `DWARFS` times the NLL over `BATCHES` micro-batches.

    This can happen only without the cap of `elbo`. The check waits for the device once per `BATCHES` micro-batches.
    """

    def __init__(self) -> None:
        self._sums: Tensor | None = None
        self._count = 0
        self._has_warned = False

    def add(self, nll: Tensor, kl: Tensor, weighted_kl: Tensor) -> None:
        """Add the three values of a micro-batch's `ELBO`."""
        if self._has_warned:
            return
        row = torch.stack([value.detach().to(nll.device, torch.float32).abs() for value in (nll, kl, weighted_kl)])
        self._sums = row if self._sums is None else self._sums + row
        self._count += 1
        if self._count < BATCHES:
            return
        mean_nll, mean_kl, weighted = (self._sums / self._count).tolist()
        self._sums, self._count = None, 0
        if weighted > DWARFS * mean_nll:
            self._has_warned = True
            warnings.warn(
                f"over the last {BATCHES} batches the weighted KL was {weighted:.3g} (the KL itself {mean_kl:.3g}) and "
                f"the NLL {mean_nll:.3g}: the model learns its prior and not the data. Leave max_share at its default, or "
                "lower `final` of the KLSchedule",
                UserWarning,
                stacklevel=3,
            )


def added_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters of all priors and custom weights, by name."""
    added = {PRIOR_NAME, WEIGHTS_NAME}
    return {name: p for name, p in model.named_parameters() if p.requires_grad and not added.isdisjoint(name.split("."))}


def check_optimizers(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Warn if parameters of priors are in none of the optimizers."""
    held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    # FSDP and DeepSpeed optimize their own tensors, which cannot be matched to the priors
    if not any(id(p) in held for p in model.parameters()):
        return
    missing = {name: p for name, p in added_parameters(model).items() if id(p) not in held}
    if missing:
        warnings.warn(
            f"{sum(p.numel() for p in missing.values()):,} parameters of priors are in no optimizer (the first is "
            f"{next(iter(missing))!r}) and will not be trained: build the optimizer after bayesianize",
            UserWarning,
            stacklevel=3,
        )


class _Seen(NamedTuple):
    added: int
    others: int
    idle_steps: int


_seen: WeakKeyDictionary[nn.Module, _Seen] = WeakKeyDictionary()


def check_changes(model: nn.Module) -> None:
    """Warn if the priors of `model` do not change while its other parameters do; call this once per step.

    Optimizers write in place, which increments the version of a tensor, so no value is read.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return
    added = added_parameters(model)
    if not added:
        return
    mine = {id(p) for p in added.values()}
    others = sum(p._version for p in model.parameters() if p.requires_grad and id(p) not in mine)
    now = _Seen(sum(p._version for p in added.values()), others, 0)
    before = _seen.get(model, now)
    if now.added == before.added:
        now = now._replace(idle_steps=before.idle_steps + int(now.others != before.others))
    _seen[model] = now
    if now.idle_steps == IDLE_STEPS != before.idle_steps:
        warnings.warn(
            f"{sum(p.numel() for p in added.values()):,} parameters of priors (the first is {next(iter(added))!r}) did not "
            f"change in {IDLE_STEPS} steps in which others did: they are in no optimizer, or got no gradient. Build the "
            "optimizer after bayesianize, and add the KL to the loss",
            UserWarning,
            stacklevel=4,
        )
