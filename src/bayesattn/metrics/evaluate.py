"""All standard metrics of one set of predictions, under the names used in files, tables and reports.

The samples are read once, in chunks, into a table with a few numbers for each prediction; every metric is a function of
that table, and so is its bootstrap interval.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from bayesattn.metrics import disagreement, scoring, validate
from bayesattn.metrics.bootstrap import bootstrap_mean, bootstrap_statistic
from bayesattn.metrics.calibration import expected_calibration_error
from bayesattn.metrics.pavpu import THRESHOLDS, pavpu_terms
from bayesattn.metrics.selective import aurc, excess_aurc, selective_accuracy
from bayesattn.metrics.significance import SPACES, TESTS, ClassTask, Space, Test, top_two_p_value
from bayesattn.scalars import check_choice, check_count

# values of `samples` turned into float64 at a time: with the temporaries of the entropies below 0.5 GiB
VALUES_PER_CHUNK = 2**22


@dataclass(frozen=True)
class Estimate:
    """A metric with its bootstrap interval and what it depends on.

    Attributes:
        value: The metric.
        low: Lower end of the interval; None without resampling.
        high: Upper end.
        settings: The choices behind the number, such as test, space, num_samples and threshold.

    Example:
        >>> Estimate(0.8, 0.7, 0.9, {"num_samples": 20}).to_dict()
        {'value': 0.8, 'low': 0.7, 'high': 0.9, 'num_samples': 20}
    """

    value: float
    low: float | None = None
    high: float | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"value": self.value, "low": self.low, "high": self.high, **self.settings}


@dataclass(frozen=True)
class PredictionTable:
    """The numbers per prediction that the metrics need.

    Attributes:
        predicted: Most probable class of the mean over the draws.
        confidence: Its mean probability.
        accuracy: 1 if it is the label, else 0; its target for `multilabel` (fractions in VQA).
        nll: Negative log-likelihood of the mean.
        brier: Brier score of the mean.
        entropy: Entropy of the mean, in nats.
        mutual_information: What the draws disagree about, in nats.
        agreement: Probability that two draws predict the same class; None for one draw.
        p_value: p-value of the difference between the top two classes; None for one draw.
        num_samples: M.
        test: Test behind the p-values.
        space: Whether the p-values test probabilities or logits.
        task: How outputs become probabilities.

    Example:
        >>> samples = torch.tensor([[[0.9, 0.1], [0.4, 0.6]], [[0.8, 0.2], [0.6, 0.4]]])  # two draws, two examples
        >>> table = tabulate_predictions(samples, torch.tensor([0, 0]))
        >>> table.num_samples, table.agreement
        (2, tensor([1., 0.], dtype=torch.float64))
    """

    predicted: Int[Tensor, " b"]
    confidence: Float[Tensor, " b"]
    accuracy: Float[Tensor, " b"]
    nll: Float[Tensor, " b"]
    brier: Float[Tensor, " b"]
    entropy: Float[Tensor, " b"]
    mutual_information: Float[Tensor, " b"]
    agreement: Float[Tensor, " b"] | None
    p_value: Float[Tensor, " b"] | None
    num_samples: int
    test: Test
    space: Space
    task: ClassTask


def tabulate_predictions(
    samples: Float[Tensor, "s b c"],
    labels: Shaped[Tensor, "b *c"],
    *,
    task: ClassTask = "multiclass",
    space: Space = "probability",
    test: Test = "paired",
) -> PredictionTable:
    """Reduce sampled predictions to one row of numbers each.

    Args:
        samples: Probabilities of the draws, or logits if `space` is `logit`; draws first, one draw is allowed.
        labels: Class indices (b,) for `multiclass`; targets (b, c) in [0, 1] for `multilabel`, where the accuracy of an
            answer is its target.
        task: How outputs become probabilities.
        space: What `samples` holds, and what the p-values test.
        test: See `top_two_p_value`.

    Example:
        >>> samples = torch.tensor([[[0.9, 0.1], [0.3, 0.7]], [[0.8, 0.2], [0.4, 0.6]]])  # two draws, two examples
        >>> table = tabulate_predictions(samples, torch.tensor([0, 0]))
        >>> table.predicted, table.accuracy
        (tensor([0, 1]), tensor([1., 0.], dtype=torch.float64))
    """
    validate.samples(samples, task)
    check_choice("space", space, SPACES)
    check_choice("test", test, TESTS)
    draws, predictions, classes = samples.shape
    if task == "multiclass":
        validate.labels(labels, predictions, classes)
    elif tuple(labels.shape) != (predictions, classes):
        raise ValueError(
            f"labels must be targets of shape ({predictions}, {classes}) for multilabel, got {tuple(labels.shape)}"
        )
    chunk_size = max(1, VALUES_PER_CHUNK // (draws * classes))
    # the columns are allocated before the first chunk: small results left between large temporaries would fragment the heap
    names = ["confidence", "accuracy", "nll", "brier", "entropy", "mutual_information"]
    names += ["agreement", "p_value"] if draws > 1 else []
    columns = {name: torch.empty(predictions, dtype=torch.float64, device=samples.device) for name in names}
    predicted = torch.empty(predictions, dtype=torch.int64, device=samples.device)
    for start in range(0, predictions, chunk_size):
        part = slice(start, start + chunk_size)
        row = _tabulate_chunk(samples[:, part].detach(), labels[part], task, space, test)
        predicted[part] = row["predicted"]
        for name, column in columns.items():
            column[part] = row[name]
    p_value, agreement = columns.pop("p_value", None), columns.pop("agreement", None)
    return PredictionTable(
        **columns,
        predicted=predicted,
        p_value=p_value,
        agreement=agreement,
        num_samples=draws,
        test=test,
        space=space,
        task=task,
    )


def evaluate_predictions(
    samples: Float[Tensor, "s b c"],
    labels: Shaped[Tensor, "b *c"],
    *,
    task: ClassTask = "multiclass",
    space: Space = "probability",
    test: Test = "paired",
    **options: Any,
) -> dict[str, Estimate]:
    """Return every standard metric by name, with bootstrap intervals over the predictions.

    Names: accuracy, nll, brier, ece, adaptive_ece, aurc, e_aurc, selective_accuracy_80 (percent covered), pavpu_05 (percent
    of the threshold), mean_entropy, mean_mutual_information, mean_pairwise_agreement. The metrics that compare draws (pavpu,
    agreement) are left out for one draw.

    Args:
        samples: See `tabulate_predictions`.
        labels: See `tabulate_predictions`.
        task: How outputs become probabilities.
        space: What `samples` holds, and what the p-values test.
        test: See `top_two_p_value`.
        **options: Those of `evaluate_table`.

    Example:
        >>> samples = torch.tensor([[[0.9, 0.1], [0.3, 0.7]], [[0.8, 0.2], [0.4, 0.6]]])  # two draws, two examples
        >>> found = evaluate_predictions(samples, torch.tensor([0, 0]), num_resamples=100)
        >>> found["accuracy"]
        Estimate(value=0.5, low=0.0, high=1.0, settings={'num_samples': 2})
    """
    return evaluate_table(tabulate_predictions(samples, labels, task=task, space=space, test=test), **options)


def evaluate_table(
    table: PredictionTable,
    *,
    thresholds: Sequence[float] = THRESHOLDS,
    coverages: Sequence[float] = (0.8,),
    num_bins: int = 15,
    num_resamples: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
) -> dict[str, Estimate]:
    """Return the metrics of `evaluate_predictions` from an existing table.

    Args:
        table: From `tabulate_predictions`.
        thresholds: Thresholds of PAvPU.
        coverages: Coverages of the selective accuracy.
        num_bins: Number of bins of both calibration errors.
        num_resamples: Bootstrap resamples; 0 leaves the intervals out.
        confidence: Level of the intervals.
        seed: Seed of the resampling.

    Example:
        >>> samples = torch.tensor([[[0.9, 0.1], [0.3, 0.7]], [[0.8, 0.2], [0.4, 0.6]]])  # two draws, two examples
        >>> table = tabulate_predictions(samples, torch.tensor([0, 0]))
        >>> found = evaluate_table(table, num_resamples=0)
        >>> found["accuracy"].value, round(found["nll"].value, 4)
        (0.5, 0.6062)
    """
    check_count("num_resamples", num_resamples, least=0)
    common = {"num_samples": table.num_samples}
    means: dict[str, tuple[Tensor, dict[str, Any]]] = {
        "accuracy": (table.accuracy, common),
        "nll": (table.nll, common),
        "brier": (table.brier, common),
        "mean_entropy": (table.entropy, common),
        "mean_mutual_information": (table.mutual_information, common),
    }
    if table.agreement is not None and table.p_value is not None:
        means["mean_pairwise_agreement"] = (table.agreement, common)
        terms = pavpu_terms(table.accuracy, table.p_value, thresholds)
        for threshold, agreement in zip(thresholds, terms.unbind(dim=1), strict=True):
            settings = {**common, "test": table.test, "space": table.space, "threshold": threshold}
            means[f"pavpu_{_percent(threshold)}"] = (agreement, settings)
    curves: dict[str, dict[str, Any]] = {
        "ece": {**common, "num_bins": num_bins},
        "adaptive_ece": {**common, "num_bins": num_bins},
        "aurc": common,
        "e_aurc": common,
        **{f"selective_accuracy_{_percent(coverage)}": {**common, "coverage": coverage} for coverage in coverages},
    }

    def curve_values(sure: Tensor, accuracy: Tensor) -> Tensor:
        values = [expected_calibration_error(sure, accuracy, num_bins=num_bins, scheme="equal_width")]
        values += [expected_calibration_error(sure, accuracy, num_bins=num_bins, scheme="equal_count")]
        values += [aurc(sure, accuracy), excess_aurc(sure, accuracy)]
        return torch.stack(values + [selective_accuracy(sure, accuracy, coverage=coverage) for coverage in coverages])

    columns = torch.stack([column for column, _ in means.values()], dim=1)
    values = torch.cat([columns.mean(dim=0), curve_values(table.confidence, table.accuracy)])
    ends = torch.full((len(values), 2), torch.nan)
    if num_resamples:
        options = {"num_resamples": num_resamples, "confidence": confidence, "seed": seed}
        of_curves = bootstrap_statistic(curve_values, table.confidence, table.accuracy, **options)
        ends = torch.cat([bootstrap_mean(columns, **options).cpu(), of_curves.cpu()])
    settings = {name: choices for name, (_, choices) in means.items()} | curves
    return {
        name: Estimate(float(value), *((float(low), float(high)) if num_resamples else (None, None)), settings[name])
        for name, value, (low, high) in zip(settings, values, ends, strict=True)
    }


def _tabulate_chunk(chunk: Tensor, labels: Tensor, task: ClassTask, space: Space, test: Test) -> dict[str, Tensor]:
    several = chunk.shape[0] > 1
    # also checks the chunk before it is used
    p_value = top_two_p_value(chunk, test=test, space=space, task=task) if several else None
    samples = chunk.double()
    if space == "logit":
        validate.finite("samples", chunk)
        samples = torch.softmax(samples, dim=-1) if task == "multiclass" else torch.sigmoid(samples)
    elif task == "multiclass" and torch.finfo(chunk.dtype).bits < 32:
        validate.probabilities("samples", chunk)
        # in half precision row sums are off by up to a percent, which would go straight into the scores
        samples = samples / samples.sum(dim=-1, keepdim=True)
    mean = samples.mean(dim=0)
    confidence, predicted = mean.max(dim=1).values, mean.argmax(dim=1)
    if task == "multiclass":
        nll = scoring.nll_from_logits(chunk, labels) if space == "logit" else scoring.negative_log_likelihood(mean, labels)
        brier, accuracy = scoring.brier_score(mean, labels), scoring.correct(mean, labels)
    else:
        nll, brier = scoring.binary_cross_entropy(mean, labels), scoring.multilabel_brier_score(mean, labels)
        accuracy = labels.double().gather(1, predicted[:, None]).squeeze(1)
    row = {
        "predicted": predicted,
        "confidence": confidence,
        "accuracy": accuracy,
        "nll": nll,
        "brier": brier,
        "entropy": disagreement.entropy(mean, task=task),
        "mutual_information": disagreement.mutual_information(samples, task=task),
    }
    if p_value is not None:
        row |= {"p_value": p_value, "agreement": disagreement.pairwise_agreement(samples, task=task)}
    return row


def _percent(fraction: float) -> str:
    # 0.05 → "05", 0.8 → "80", 0.025 → "2.5"
    percent = round(100.0 * fraction, 6)
    return f"{int(percent):02d}" if percent == int(percent) else f"{percent:g}"
