"""Checks during a run: numbers that are not finite, and attention or a posterior that collapses."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from bayesattn_recipes.common.position import Position

# shares at which to warn: far outside what any recipe shows when it trains well
KL_SHARE = 1e-3
ENTROPY_SHARE = 0.01


class Diverged(ValueError):
    """A loss or gradient was not finite."""


def gradient_norm(model: nn.Module) -> Tensor:
    """Return the norm of all gradients."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())


def diagnose(model: nn.Module, batches: Sequence[dict[str, Any]], forward: Callable[[dict[str, Any]], Any]) -> list[str]:
    """Describe where the first numbers that are not finite come from: inputs, parameters, or the output of a layer.

    Args:
        model: Its gradients are still those of the step that went wrong.
        batches: Batches of that step.
        forward: Runs one batch through the model again.
    """
    found = [
        f"input {name!r} of the batch"
        for name in dict.fromkeys(name for batch in batches for name in batch)
        if any(not _is_finite(batch.get(name)) for batch in batches)
    ]
    found += [f"parameter {name}" for name, value in model.named_parameters() if not _is_finite(value)]
    with torch.no_grad(), _first_bad_output(model) as outputs:
        for batch in batches:
            forward(batch)
    found += [f"output of layer {name}" for name in outputs[:1]]
    bad = [name for name, value in model.named_parameters() if value.grad is not None and not _is_finite(value.grad)]
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        found.append(f"gradient of {bad[0]}{more}")
    return found


def step_diverged(at: Position, indices: Int[Tensor, " b"], reasons: Sequence[str], loss: str) -> Diverged:
    """Return the error for a step that was not finite.

    Args:
        at: Position of the run.
        indices: The examples of the step.
        reasons: What `diagnose` found.
        loss: The loss, and what was saved, in words.
    """
    shown = f"{indices[:5].tolist()}"[:-1] + (", …]" if len(indices) > 5 else "]")
    return Diverged(
        f"not finite at step {at.step} (epoch {at.epoch}, batch {at.batch}, examples {shown}): "
        f"{'; '.join(reasons) or 'the loss alone'}; {loss}. A smaller learning rate, clip_norm or "
        "on_nonfinite: skip may help"
    )


def refuse_nonfinite(measured: Mapping[str, float], at: Position) -> None:
    """Raise if a validation measure is not finite.

    Args:
        measured: By name.
        at: Position of the run.
    """
    for name, value in measured.items():
        if not math.isfinite(value):
            raise Diverged(
                f"{name} is {value} after step {at.step} (epoch {at.epoch}): the last steps have ruined the parameters. A "
                "smaller learning rate or clip_norm may help"
            )


@contextmanager
def _first_bad_output(model: nn.Module) -> Iterator[list[str]]:
    """Collect the layers whose output is not finite although their inputs are, in the order of the calls."""
    outputs: list[str] = []

    def look(name: str, module: nn.Module) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not _is_finite(output) and _is_finite(args) and _is_finite(kwargs):
                outputs.append(f"{name or 'the model'} ({type(module).__name__})")

        return hook

    handles = [module.register_forward_hook(look(name, module), with_kwargs=True) for name, module in model.named_modules()]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _is_finite(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not (value.is_floating_point() or value.is_complex()) or bool(torch.isfinite(value).all())
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    return all(map(_is_finite, value)) if isinstance(value, list | tuple) else True


def detect_collapse(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return what has collapsed by the last row of a log, by name; empty if nothing has.

    - `train_kl`: the KL is below a thousandth of the largest so far. The posterior has become the prior, and the attention
      weights no longer depend on the input.
    - `attention_entropy`: the entropy of the mean attention weights, as a share of the largest possible, is below 0.01 and
      was above 0.1: every query attends to one key, and the noise hardly changes the weights.

    Args:
        rows: The log so far.
    """
    found = {}
    if len(rows) < 2:
        return found
    name = "train_kl"
    values = [row[name] for row in rows if name in row and math.isfinite(row[name])]
    if values and max(values) > 0.0 and values[-1] < KL_SHARE * max(values):
        found[name] = (
            f"the KL has collapsed from {max(values):.3g} to {values[-1]:.3g}: the posterior is the prior. A smaller KL "
            "weight (training.kl_schedule.final) or a longer ramp lets the attention learn first"
        )
    name = "attention_entropy"
    values = [row[name] for row in rows if name in row]
    if values and max(values) > 10 * ENTROPY_SHARE and values[-1] < ENTROPY_SHARE:
        found[name] = (
            f"the attention entropy has collapsed from {max(values):.3g} to {values[-1]:.3g} of the largest possible: "
            "every query looks at one key. A smaller learning rate or stronger noise (weibull_k, sigma_q) helps"
        )
    return found
