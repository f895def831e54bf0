"""The evidence lower bound as a loss, and the schedules of its KL weight (Eq. 5 and Algorithm 1)."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from bayesattn.scalars import check_choice, check_count, check_not_negative, check_positive

ScheduleKind = Literal["constant", "sigmoid", "linear", "cyclic"]

# the largest of 0.001 to 0.3 that costs a pretrained encoder no more than the noise alone (docs/concepts/kl.md)
MAX_SHARE = 0.01
# the label that torch and transformers ignore
IGNORED_LABEL = -100


class ELBO(NamedTuple):
    """The loss to differentiate, and its parts for logging.

    Attributes:
        loss: The negative ELBO.
        nll: The NLL.
        kl: KL of one example, without its weight.
        kl_weight: The weight applied to the KL: λ_t, or less where the cap applied.
        weighted_kl: What was added to the NLL.

    Example:
        >>> parts = elbo(torch.tensor(2.0), torch.tensor(30.0), kl_weight=0.1, max_share=None)
        >>> parts.nll, parts.kl, parts.weighted_kl, parts.loss
        (tensor(2.), tensor(30.), tensor(3.), tensor(5.))
    """

    loss: Tensor
    nll: Tensor
    kl: Tensor
    kl_weight: Tensor
    weighted_kl: Tensor


def elbo(
    nll: Float[Tensor, ""],
    kl: Float[Tensor, ""],
    *,
    kl_weight: float = 1.0,
    labels_per_example: float = 1.0,
    accumulation_steps: int = 1,
    max_share: float | None = MAX_SHARE,
) -> ELBO:
    """Return the negative ELBO per label (Eq. 5), so the KL has the same weight at every batch size.

        loss = (NLL + λ · KL / labels_per_example) / accumulation_steps

    Both terms are averages: `nll` over the labels of the batch, `kl` over its examples, as `KLScope.total()` gives it.
    Neither grows with the batch, so no dataset size enters. Where an example carries many labels, one KL is shared
    among them, and `labels_per_example` says by how many: 140 for one graph with 140 labeled nodes, the mean target
    length where the NLL is a mean over tokens, 1 where each example has one label.

    The KL grows with depth and length: over a pretrained encoder it is thousands of times the NLL, and λ = 1 leaves a model
    that predicts the majority class. So λ is `kl_weight` or less, such that the weighted KL is at most `max_share` of |NLL|.
    The default was chosen with e5-small on SST-2, MRPC and RTE, three seeds (docs/concepts/kl.md). The cap is a number,
    not part of the graph, and is computed on the device, per call: with accumulation or DDP, per micro-batch.
    Where the NLL is 0, so is λ.

    Args:
        nll: Negative log-likelihood, averaged over labels.
        kl: KL of one example.
        kl_weight: λ_t, usually from a `KLSchedule`. At 0 the term stays in the graph, multiplied by 0, so every prior
            parameter still gets a gradient (DDP requires one).
        labels_per_example: Labels that share one example's KL.
        accumulation_steps: Micro-batches per optimizer step; each loss is divided by it.
        max_share: Largest weighted KL, as a share of |NLL|; None is the paper's objective, λ = `kl_weight`.

    Example:
        >>> nll, kl = torch.tensor(2.0), torch.tensor(30.0)
        >>> elbo(nll, kl, kl_weight=0.1).loss  # the weighted KL, 3.0, is cut to a hundredth of the NLL
        tensor(2.0200)
        >>> elbo(nll, kl, kl_weight=0.1, max_share=None).loss
        tensor(5.)
    """
    if nll.ndim or kl.ndim:
        raise ValueError(f"nll and kl must be scalars, got shapes {tuple(nll.shape)} and {tuple(kl.shape)}")
    check_not_negative(kl_weight=kl_weight)
    check_positive(labels_per_example=labels_per_example)
    check_count("accumulation_steps", accumulation_steps)
    check_max_share(max_share)
    # half precision has neither the range nor the digits for a small weight
    wide = torch.promote_types(torch.promote_types(nll.dtype, kl.dtype), torch.float32)
    weight = torch.full_like(kl.detach(), kl_weight / labels_per_example, dtype=wide)
    if max_share is not None:
        size = kl.detach().to(wide).abs().clamp(min=torch.finfo(wide).tiny)
        weight = torch.minimum(weight, max_share * nll.detach().to(kl.device, wide).abs() / size)
    weighted_kl = kl * weight
    loss = (nll + weighted_kl) / accumulation_steps
    return ELBO(loss, nll.detach(), kl.detach(), weight * labels_per_example, weighted_kl.detach())


def check_max_share(max_share: float | None) -> None:
    """Raise unless it is None or a number above 0.

    Example:
        >>> check_max_share(0.01)
        >>> check_max_share(-1.0)
        Traceback (most recent call last):
        ValueError: max_share must be a finite number above 0, or None for no cap, got -1.0
    """
    if max_share is not None and not (0.0 < max_share < math.inf):
        raise ValueError(f"max_share must be a finite number above 0, or None for no cap, got {max_share!r}")


@dataclass(frozen=True)
class KLSchedule:
    """KL weight λ_t as a function of the step: `schedule(step)`.

        constant  final                      sigmoid  final · σ(ρ t), the paper's; starts at final/2
        linear    final · min(t/period, 1)   cyclic   linear over the first half of each period, then `final`

    Args:
        kind: One of the four.
        anneal_rate: ρ of the sigmoid.
        anneal_unit: What t counts: optimizer steps (Algorithm 1) or epochs (the authors' code).
        steps_per_epoch: Needed when `anneal_unit` is `epoch`.
        period: Length of the ramp (linear) or of a cycle (cyclic), in units of t.
        final: Largest weight.

    Example:
        >>> schedule = KLSchedule("sigmoid", anneal_rate=0.2)
        >>> schedule(0), round(schedule(10), 4), schedule(10**6)
        (0.5, 0.8808, 1.0)
    """

    kind: ScheduleKind = "constant"
    anneal_rate: float = 1.0
    anneal_unit: Literal["step", "epoch"] = "step"
    steps_per_epoch: int | None = None
    period: float = 1.0
    final: float = 1.0

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, ("constant", "sigmoid", "linear", "cyclic"))
        check_choice("anneal_unit", self.anneal_unit, ("step", "epoch"))
        if self.anneal_unit == "epoch" and (self.steps_per_epoch is None or self.steps_per_epoch < 1):
            raise ValueError(f"steps_per_epoch must be at least 1 with anneal_unit='epoch', got {self.steps_per_epoch!r}")
        check_positive(anneal_rate=self.anneal_rate, period=self.period)
        check_not_negative(final=self.final)

    def __call__(self, step: int) -> float:
        """Return λ at optimizer step `step`, counted from 0."""
        if step < 0:
            raise ValueError(f"step must be at least 0, got {step!r}")
        t = step // self.steps_per_epoch if self.anneal_unit == "epoch" and self.steps_per_epoch else step
        if self.kind == "sigmoid":
            # exp of a negative number only: the textbook form overflows at ρt = 710
            return self.final / (1.0 + math.exp(-self.anneal_rate * t))
        if self.kind == "linear":
            return self.final * min(t / self.period, 1.0)
        if self.kind == "cyclic":
            return self.final * min(2.0 * (t % self.period) / self.period, 1.0)
        return self.final
