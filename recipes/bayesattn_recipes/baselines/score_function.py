"""Gradients through choices: the score-function estimator (REINFORCE, Williams 1992) as a term that is zero in value.

Hard attention draws z ~ Categorical(softmax Φ), and the loss L(z) has no gradient in Φ. But

    ∇ E[L(z)] = E[∇ L(z) + (L(z) − b) ∇ ln p(z)]                      for every b that does not depend on z

so adding sg[L(z) − b] · (ln p(z) − sg[ln p(z)]) to the loss (sg: no gradient) leaves its value and gives it this
gradient. Choices at decoding step t cannot change the loss of earlier steps: if the loss is known step by step, L is
the loss from t on.

    nll = with_score_function(model, lambda: token_nll(model(batch)))        # any model; unchanged without hard attention
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from bayesattn_recipes.baselines.config import AttentionChoice
from bayesattn_recipes.baselines.module import RivalWeights


class Choice(NamedTuple):
    """The choices of one call, summed over heads: ln p(z) and the entropy of the choice, for every query."""

    log_prob: Float[Tensor, "b m"]
    entropy: Float[Tensor, "b m"]


def score_function(
    cost: Float[Tensor, "*b"], log_prob: Float[Tensor, "*b"], baseline: Float[Tensor, "*#b"] | float = 0.0
) -> Float[Tensor, "*b"]:
    """Return a term of value 0 whose gradient is (cost − baseline) ∇ log_prob."""
    advantage = cost.detach() - (baseline.detach() if isinstance(baseline, Tensor) else baseline)
    return advantage * (log_prob - log_prob.detach())


def cost_to_go(cost: Float[Tensor, "b t"]) -> Float[Tensor, "b t"]:
    """Return Σ_{s ≥ t} cost_s, all that a choice at step t can still change."""
    return cost.flip(-1).cumsum(dim=-1).flip(-1)


class ChoosingWeights(RivalWeights):
    """Weights that choose one key; `with_score_function` collects their choices and keeps their baseline.

    In training a call outside `with_score_function` is an error: its scores would get no gradient.
    """

    average_cost: Tensor
    num_averaged: Tensor

    def __init__(self, config: AttentionChoice, *variants: str) -> None:
        super().__init__(config, *variants)
        # exponential moving average of the loss per label; the bias from its start is removed when it is read
        self.register_buffer("average_cost", torch.zeros(()))
        self.register_buffer("num_averaged", torch.zeros(()))
        self.choices: list[Choice] | None = None
        self.takes_mean = False

    @property
    def is_sampling(self) -> bool:
        """Whether the next call chooses; the pass for the self-critical baseline takes the mean."""
        return super().is_sampling and not self.takes_mean

    def _choose(self, choice: Callable[[], Choice]) -> None:
        """Note a choice whose gradient is needed."""
        if self.choices is None:
            if not self.training or not torch.is_grad_enabled():
                return
            if torch._C._current_graph_task_id() != -1:
                # a checkpointed call is computed again: it must save the same tensors, but its choice is noted already
                choice()
                return
            raise RuntimeError(
                f"{self.config.variant} attention must be trained inside baselines.with_score_function(model, run), because "
                "its scores get no gradient otherwise"
            )
        if not torch.is_grad_enabled():
            raise RuntimeError(
                f"{self.config.variant} attention ran without gradients inside with_score_function, so its scores would get "
                "none. Use activation checkpointing with use_reentrant=False only"
            )
        self.choices.append(choice())


DECAY = 0.9


def with_score_function(
    model: nn.Module,
    run: Callable[[], Float[Tensor, "b *t"]],
    steps: Bool[Tensor, "b t"] | None = None,
    *,
    charge: Callable[[nn.Module, Tensor], Tensor] | None = None,
) -> Float[Tensor, "b *t"]:
    """Return what `run` returns, with the score-function gradient of every hard choice attached; the values do not change.

    A choice is charged with the loss of its example, all of it or from its own step on, whatever its head, layer and query.
    If a call has several entries per example (windows of an image), they are consecutive; the loss of a graph, or of a
    batch as a whole, counts as that of one example.

    Args:
        model: Holds the attention modules that `run` calls. Without hard attention in training mode this is `run()`.
        run: Computes the negative log-likelihood, of each example or of each decoding step (0 where there is no label).
            Called a second time, without gradients and with soft attention, for the self-critical baseline.
        steps: True where a step has a label; None: everywhere.
        charge: Use it if it is known which losses a choice cannot have changed. It computes, from a choosing module and the
            losses, the sum of those that each of its choices may have changed. The gradient is then that of the sum of the
            losses.

    Raises:
        ValueError: The losses are per step, and a module has chosen a different number of times; or the entries of a
            module's calls are not a multiple of the number of losses.
    """
    choosing = [module for module in model.modules() if isinstance(module, ChoosingWeights) and module.is_sampling]
    if not choosing or not torch.is_grad_enabled():
        return run()
    try:
        for module in choosing:
            module.choices = []
        nll = run()
        made = [module.choices for module in choosing]
    finally:
        for module in choosing:
            module.choices = None
    soft = _soft_pass(choosing, run) if any(module.config.baseline == "self-critical" for module in choosing) else None
    total = nll
    for module, choices in zip(choosing, made, strict=True):
        if choices:
            if charge is None:
                total = total + _attached(module, choices, nll.detach(), soft, steps)
            else:
                terms = _charged(module, choices, nll.detach(), soft, partial(charge, module))
                total = total + terms / nll.numel()
    return total


def _soft_pass(choosing: list[ChoosingWeights], run: Callable[[], Tensor]) -> Tensor:
    try:
        for module in choosing:
            module.takes_mean = True
        with torch.no_grad():
            return run()
    finally:
        for module in choosing:
            module.takes_mean = False


def _attached(
    module: ChoosingWeights, choices: list[Choice], nll: Tensor, soft: Tensor | None, steps: Tensor | None
) -> Float[Tensor, "b *t"]:
    """Return the terms of value 0 of one module, in the shape of the loss."""
    log_prob, entropy = (_by_example(torch.cat(parts, dim=1), nll) for parts in zip(*choices, strict=True))
    if nll.ndim == 2 and log_prob.shape[1] != nll.shape[1]:
        raise ValueError(
            "run() must return one loss per example, or one loss per choice of attention, got losses of shape "
            f"{tuple(nll.shape)} for {log_prob.shape[1]} choices per example"
        )
    by_step = nll.ndim == 2
    labels = torch.ones_like(nll) if steps is None else steps.to(nll.dtype)
    spread = cost_to_go if by_step else partial(torch.unsqueeze, dim=1)
    terms = score_function(spread(nll).expand_as(log_prob), log_prob, _baseline(module, nll, soft, labels, spread))
    bonus = module.config.entropy_bonus * (entropy - entropy.detach())
    if by_step:
        return terms - bonus * labels
    return (terms - bonus).sum(dim=1)


def _charged(
    module: ChoosingWeights, choices: list[Choice], nll: Tensor, soft: Tensor | None, charge: Callable[[Tensor], Tensor]
) -> Float[Tensor, ""]:
    """Return the sum of the terms of value 0 of one module, whose choices `charge` charges."""
    log_prob, entropy = (torch.cat(parts, dim=1) for parts in zip(*choices, strict=True))
    labels = torch.ones_like(nll)
    baseline = _baseline(module, nll, soft, labels, charge)
    terms = score_function(charge(nll).expand_as(log_prob), log_prob, baseline)
    bonus = module.config.entropy_bonus * (entropy - entropy.detach())
    return (terms - bonus * (charge(labels) > 0.0)).sum()


def _baseline(
    module: ChoosingWeights, nll: Tensor, soft: Tensor | None, labels: Tensor, spread: Callable[[Tensor], Tensor]
) -> Tensor | float:
    """Return the baseline of the cost of each choice, and note the cost for later."""
    kind = module.config.baseline
    if kind == "self-critical":
        assert soft is not None
        return spread(soft)
    if kind == "none":
        return 0.0
    # known before this draw: a baseline that saw it would bias the gradient
    known = module.average_cost / (1.0 - DECAY**module.num_averaged).clamp(min=1e-6)
    module.average_cost.lerp_((nll.sum() / labels.sum().clamp(min=1.0)).to(module.average_cost.dtype), 1.0 - DECAY)
    module.num_averaged.add_(1.0)
    return known * spread(labels)


def _by_example(x: Float[Tensor, "entries m"], nll: Tensor) -> Float[Tensor, "b m_all"]:
    """Put the consecutive entries of an example side by side."""
    if len(nll) == 0 or len(x) % len(nll):
        raise ValueError(
            "run() must return one loss per example, or one per group of examples (such as a graph; groups of equal size), "
            f"got losses of shape {tuple(nll.shape)} for {len(x)} examples"
        )
    return x if len(x) == len(nll) else x.unflatten(0, (len(nll), -1)).flatten(1)


def chosen_log_prob(log_probs: Float[Tensor, "*b n"], index: Int[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """Return ln p of the chosen keys."""
    return log_probs.gather(-1, index.unsqueeze(-1)).squeeze(-1)
