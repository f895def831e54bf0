"""Proper scores and accuracy, one number for each prediction; average them for the metric.

A proper score is lowest in expectation when the stated probabilities are the true ones, so it rewards calibration and
sharpness together.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bayesattn.metrics import validate


def negative_log_likelihood(probabilities: Float[Tensor, "b c"], labels: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
    """Return −ln p(label). A label with probability 0 costs infinity; `nll_from_logits` avoids underflow.

    Example:
        >>> negative_log_likelihood(torch.tensor([[0.2, 0.8], [0.6, 0.4]]), torch.tensor([1, 1]))
        tensor([0.2231, 0.9163], dtype=torch.float64)
    """
    _check(probabilities, labels)
    return -torch.log(probabilities.double().gather(1, labels.long()[:, None]).squeeze(1))


def nll_from_logits(logits: Float[Tensor, "s b c"], labels: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
    """Return −ln of the label's probability averaged over the draws, −ln (1/M) Σ_s softmax(logits_s), in log space.

    Example:
        >>> logits = torch.tensor([[[2.0, 0.0]], [[0.0, 0.0]]])  # two draws: p = 0.8808 and 0.5
        >>> nll_from_logits(logits, torch.tensor([0]))
        tensor([0.3705], dtype=torch.float64)
    """
    validate.samples(logits, "multiclass")
    validate.finite("logits", logits)
    validate.labels(labels, logits.shape[1], logits.shape[2])
    chosen = logits.gather(2, labels.long()[None, :, None].expand(len(logits), -1, -1)).squeeze(2).double()
    log_likelihood = chosen - torch.logsumexp(logits.double(), dim=-1)
    return math.log(len(logits)) - torch.logsumexp(log_likelihood, dim=0)


def brier_score(probabilities: Float[Tensor, "b c"], labels: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
    """Return Σ_c (p_c − 1[c = label])², from 0 to 2 (Brier's own form; some halve it for two classes).

    Example:
        >>> brier_score(torch.tensor([[0.2, 0.8], [0.6, 0.4]]), torch.tensor([1, 1]))
        tensor([0.0800, 0.7200], dtype=torch.float64)
    """
    _check(probabilities, labels)
    probabilities = probabilities.double()
    chosen = probabilities.gather(1, labels.long()[:, None]).squeeze(1)
    # (p − 1)² − p² = 1 − 2p for the labeled class
    return probabilities.square().sum(dim=1) + 1.0 - 2.0 * chosen


def correct(probabilities: Float[Tensor, "b c"], labels: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
    """Return 1 where the most probable class (the first of equal ones) is the label, else 0.

    Example:
        >>> correct(torch.tensor([[0.2, 0.8], [0.6, 0.4]]), torch.tensor([1, 1]))
        tensor([1., 0.], dtype=torch.float64)
    """
    _check(probabilities, labels)
    return (probabilities.argmax(dim=1) == labels).double()


def binary_cross_entropy(probabilities: Float[Tensor, "b c"], targets: Float[Tensor, "b c"]) -> Float[Tensor, " b"]:
    """Return the multi-label cross-entropy summed over the classes, for hard or fractional targets (VQA).

    Example:
        >>> binary_cross_entropy(torch.tensor([[0.9, 0.5]]), torch.tensor([[1.0, 0.0]]))
        tensor([0.7985], dtype=torch.float64)
    """
    _check_targets(probabilities, targets)
    p, target = probabilities.double(), targets.double()
    # xlogy: a probability of 0 costs nothing where the target gives it no weight
    return -(torch.xlogy(target, p) + torch.special.xlog1py(1.0 - target, -p)).sum(dim=1)


def multilabel_brier_score(probabilities: Float[Tensor, "b c"], targets: Float[Tensor, "b c"]) -> Float[Tensor, " b"]:
    """Return Σ_c (p_c − target_c)² for hard or fractional targets.

    Example:
        >>> multilabel_brier_score(torch.tensor([[0.9, 0.5]]), torch.tensor([[1.0, 0.0]]))
        tensor([0.2600], dtype=torch.float64)
    """
    _check_targets(probabilities, targets)
    return (probabilities.double() - targets.double()).square().sum(dim=1)


def _check(probabilities: Tensor, labels: Tensor) -> None:
    validate.floating("probabilities", probabilities, "b c")
    validate.probabilities("probabilities", probabilities)
    validate.labels(labels, *probabilities.shape)


def _check_targets(probabilities: Tensor, targets: Tensor) -> None:
    validate.floating("probabilities", probabilities, "b c")
    validate.floating("targets", targets, "b c")
    if targets.shape != probabilities.shape:
        raise ValueError(
            f"targets must have the shape of probabilities, {tuple(probabilities.shape)}, got {tuple(targets.shape)}"
        )
    validate.unit_interval("probabilities", probabilities)
    validate.unit_interval("targets", targets)
