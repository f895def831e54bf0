"""Does the model prefer its first class to its second, or is the difference noise (App. C.2.1 of the paper)?

M sampled predictions give M values for each of the two most probable classes; a two-sided test of equal means gives the
p-value of a prediction. Small p: certain. The p-value depends on M: any fixed difference becomes significant as M grows.
"""

from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bayesattn.metrics import validate
from bayesattn.scalars import check_choice

Test = Literal["paired", "welch", "pooled", "wilcoxon"]
Space = Literal["probability", "logit"]
ClassTask = Literal["multiclass", "multilabel"]
TESTS, SPACES = get_args(Test), get_args(Space)

# values of `samples` processed together: 64 MiB of float32, with temporaries below 0.5 GiB
VALUES_PER_CHUNK = 2**24


def top_two_p_value(
    samples: Float[Tensor, "s b c"],
    *,
    test: Test = "paired",
    space: Space = "probability",
    task: ClassTask = "multiclass",
) -> Float[Tensor, " b"]:
    """Return the p-value of the difference between the two most probable classes, for every prediction.

    The two classes are the top two of the mean probability over the draws. All differences zero gives p = 1; no variance
    but different means gives p = 0. The result is never NaN.

    Args:
        samples: Probabilities of M ≥ 2 draws, or logits if `space` is `logit`; draws first.
        test: `paired` t-test of the M differences (the paper's graph code), `welch` (its VQA code) or `pooled` two-sample
            t-test, or the `wilcoxon` signed-rank test.
        space: What `samples` holds, and so what is tested. Logits also rank the classes by their mean probability.
        task: `multiclass`: rows are distributions (softmax of logits); `multilabel`: one probability per class (sigmoid).

    Returns:
        float64 p-values.

    Raises:
        ValueError: Fewer than two draws or classes, NaN, or values that are not probabilities.

    Example:
        >>> top_two_p_value(torch.tensor([[[0.7, 0.3]], [[0.6, 0.4]], [[0.65, 0.35]]])) < 0.05  # three draws agree
        tensor([True])
    """
    check_choice("test", test, TESTS)
    check_choice("space", space, SPACES)
    validate.samples(samples, task, least_draws=2)
    draws, predictions, classes = samples.shape
    chunk_size = max(1, VALUES_PER_CHUNK // (draws * classes))
    p_value = torch.empty(predictions, dtype=torch.float64, device=samples.device)
    for start in range(0, predictions, chunk_size):
        chunk = samples[:, start : start + chunk_size].detach()
        classes_of_chunk = top_two_classes(_mean_probability(chunk, space, task))
        pair = chunk.gather(2, classes_of_chunk.expand(draws, -1, -1)).double()
        p_value[start : start + chunk_size] = two_sample_p_value(pair[..., 0], pair[..., 1], test=test)
    return p_value


def two_sample_p_value(first: Float[Tensor, "s b"], second: Float[Tensor, "s b"], *, test: Test) -> Float[Tensor, " b"]:
    """Return the two-sided p-value of a test that two sets of M values have the same mean, column by column.

    Example:
        >>> first, second = torch.tensor([[0.7], [0.6], [0.65]]), torch.tensor([[0.3], [0.4], [0.35]])
        >>> two_sample_p_value(first, second, test="paired")
        tensor([0.0351], dtype=torch.float64)
        >>> two_sample_p_value(first, second, test="welch")
        tensor([0.0018], dtype=torch.float64)
    """
    check_choice("test", test, TESTS)
    if first.shape[0] < 2:
        raise ValueError(f"first must have at least 2 draws on its first axis, got {first.shape[0]}")
    first, second = first.double(), second.double()
    if test == "wilcoxon":
        return _wilcoxon(first - second)
    draws = first.shape[0]
    if test == "paired":
        mean, variance = _mean_and_variance(first - second)
        df = torch.full_like(mean, draws - 1.0)
    else:
        (mean_1, variance_1), (mean_2, variance_2) = _mean_and_variance(first), _mean_and_variance(second)
        # with M values on both sides the pooled and the Welch statistic are equal, only their degrees of freedom differ
        mean, variance = mean_1 - mean_2, variance_1 + variance_2
        share = torch.where(variance > 0, variance_1 / variance, 0.5)
        df = (draws - 1.0) / (share.square() + (1.0 - share).square())
        df = torch.full_like(df, 2.0 * (draws - 1.0)) if test == "pooled" else df
    constant = variance == 0
    t = mean / torch.where(constant, torch.ones_like(variance), variance / draws).sqrt()
    return torch.where(constant, (mean == 0).double(), student_t_two_sided(t, df))


def student_t_two_sided(t: Float[Tensor, " b"], df: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
    """Return P(|T| ≥ |t|) for Student's t with `df` > 0 degrees of freedom, in float64."""
    from scipy.special import stdtr

    tail = stdtr(df.double().cpu().numpy(), -t.double().abs().cpu().numpy())
    return 2.0 * torch.as_tensor(tail, device=t.device)


def _wilcoxon(differences: Float[Tensor, "s b"]) -> Float[Tensor, " b"]:
    # scipy.stats takes a second to import
    from scipy.stats import wilcoxon

    values = differences.cpu()
    ordered = values.abs().sort(dim=0).values
    # scipy chooses exact or approximate for all columns at once; columns with zeros or ties must not decide for the others
    untidy = (ordered[0] == 0) | (ordered.diff(dim=0) == 0).any(dim=0)
    p_value = torch.ones(values.shape[1], dtype=torch.float64)
    for columns in (~untidy, untidy & (ordered[-1] > 0)):
        if bool(columns.any()):
            # statistic and p-value
            _, found = wilcoxon(values[:, columns].numpy(), axis=0)
            p_value[columns] = torch.as_tensor(found, dtype=torch.float64)
    return p_value.to(differences.device)


def top_two_classes(mean: Float[Tensor, "b c"]) -> Int[Tensor, "b 2"]:
    """Return the two classes with the largest mean probability; of equal ones the lowest index, on every device.

    Example:
        >>> top_two_classes(torch.tensor([[0.1, 0.6, 0.3], [0.4, 0.2, 0.4]]))
        tensor([[1, 2],
                [0, 2]])
    """
    # argmax documents that it returns the first maximum; topk promises nothing about ties
    first = mean.argmax(dim=-1, keepdim=True)
    second = mean.scatter(-1, first, -torch.inf).argmax(dim=-1, keepdim=True)
    return torch.cat([first, second], dim=-1)


def _mean_probability(chunk: Tensor, space: Space, task: ClassTask) -> Tensor:
    if space == "logit":
        validate.finite("samples", chunk)
        chunk = chunk.to(torch.promote_types(chunk.dtype, torch.float32))
        chunk = torch.softmax(chunk, dim=-1) if task == "multiclass" else torch.sigmoid(chunk)
    else:
        validate.task_probabilities("samples", chunk, task)
    return chunk.mean(dim=0, dtype=torch.float64)


def _mean_and_variance(values: Tensor) -> tuple[Tensor, Tensor]:
    # the mean of equal values may differ from them by a rounding, which would make their variance 1e-34 instead of zero
    constant = values.amax(dim=0) == values.amin(dim=0)
    mean = values.mean(dim=0)
    variance = (values - mean).square().sum(dim=0) / (values.shape[0] - 1.0)
    return torch.where(constant, values[0], mean), torch.where(constant, 0.0, variance)
