"""How uncertain is a prediction, and how much of that do the draws disagree about? One number for each prediction.

entropy of the mean   =   mean entropy   +   mutual information
total                     noise in the data  posterior uncertainty
"""

import torch
from jaxtyping import Float
from torch import Tensor

from bayesattn.metrics import validate
from bayesattn.metrics.significance import ClassTask
from bayesattn.scalars import check_choice


def entropy(probabilities: Float[Tensor, "*b c"], *, task: ClassTask = "multiclass") -> Float[Tensor, "*b"]:
    """Return −Σ_c p_c ln p_c in nats; for `multilabel` the sum of the classes' binary entropies.

    Example:
        >>> entropy(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
        tensor([0.6931, 0.0000])
    """
    check_choice("task", task, ("multiclass", "multilabel"))
    if probabilities.numel() == 0:
        raise ValueError(f"probabilities must have no empty axis, got shape {tuple(probabilities.shape)}")
    validate.task_probabilities("probabilities", probabilities, task)
    return _entropy(probabilities, task)


def mutual_information(samples: Float[Tensor, "s b c"], *, task: ClassTask = "multiclass") -> Float[Tensor, " b"]:
    """Return the entropy of the mean minus the mean entropy, at least 0: what the draws disagree about, in nats.

    Example:
        >>> mutual_information(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))  # two draws that contradict each other
        tensor([0.6931], dtype=torch.float64)
    """
    validate.samples(samples, task)
    validate.task_probabilities("samples", samples, task)
    return information_of_draws(samples.double(), task=task)


def information_of_draws(samples: Float[Tensor, "s *b c"], *, task: ClassTask) -> Float[Tensor, "*b"]:
    """Return the mutual information in the samples' own dtype, for any number of axes and without checks."""
    return (_entropy(samples.mean(dim=0), task) - _entropy(samples, task).mean(dim=0)).clamp(min=0.0)


def pairwise_agreement(samples: Float[Tensor, "s b c"], *, task: ClassTask = "multiclass") -> Float[Tensor, " b"]:
    """Return the probability that two different draws predict the same class, Σ_c n_c (n_c − 1) / (M (M − 1)).

    Example:
        >>> samples = torch.tensor([[[0.9, 0.1]], [[0.7, 0.3]], [[0.4, 0.6]]])  # three draws for one example
        >>> pairwise_agreement(samples)  # one of three pairs agrees
        tensor([0.3333], dtype=torch.float64)
    """
    validate.samples(samples, task, least_draws=2)
    validate.task_probabilities("samples", samples, task)
    draws, predictions, classes = samples.shape
    predicted = samples.argmax(dim=-1).transpose(0, 1)
    votes = torch.zeros(predictions, classes, dtype=torch.float64, device=samples.device)
    votes.scatter_add_(1, predicted, torch.ones_like(predicted, dtype=torch.float64))
    return (votes * (votes - 1.0)).sum(dim=1) / (draws * (draws - 1.0))


def _entropy(probabilities: Tensor, task: ClassTask) -> Tensor:
    total = torch.special.entr(probabilities).sum(dim=-1)
    return total if task == "multiclass" else total + torch.special.entr(1.0 - probabilities).sum(dim=-1)
