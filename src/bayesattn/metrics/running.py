"""The metrics as `torchmetrics.Metric`s: fed batch by batch, and the same number on one process or many (DDP).

Averages keep a sum and a count, which add up over processes. Metrics that rank all predictions keep one or two numbers for
each of them and gather these. Every `update` takes the sampled probabilities (draws, predictions, classes) and the labels,
so they go together in a `torchmetrics.MetricCollection`. A deterministic model has one draw, `probabilities[None]`.

    doubt = ba.uncertainty(model, batch)
    aurc = AURC()
    aurc.update(doubt.probabilities[None], labels, confidence=-doubt.score)  # ranked by doubt, not by the probability
"""

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bayesattn.metrics import calibration, detection, disagreement, scoring, selective
from bayesattn.metrics.pavpu import THRESHOLDS, pavpu_terms
from bayesattn.metrics.significance import ClassTask, Space, Test, top_two_p_value
from bayesattn.optional import needs_extra

with needs_extra("bayesattn.metrics.running", "metrics"):
    from torchmetrics import Metric
    from torchmetrics.classification import MulticlassAUROC, MulticlassCalibrationError
    from torchmetrics.utilities import dim_zero_cat

Samples = Float[Tensor, "s b c"]
Labels = Int[Tensor, " b"]


class _Mean(Metric):
    """The average of one number (or vector) for each prediction."""

    full_state_update = False
    count: Tensor

    def __init__(self, shape: tuple[int, ...] = (), settings: tuple[Any, ...] = (), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # a unique name: a MetricCollection lets metrics share states that have equal names and, after the first batch, equal
        # values; two different averages may well be equal there
        self._total = f"total_{type(self).__name__}_{zlib.crc32(repr(settings).encode()):08x}"
        self.add_state(self._total, torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def _add(self, values: Tensor) -> None:
        setattr(self, self._total, getattr(self, self._total) + values.double().sum(dim=0))
        self.count += len(values)

    def compute(self) -> Tensor:
        """Return the mean over all predictions seen."""
        if int(self.count) == 0:
            raise ValueError("no predictions to compute from. Call update first")
        return getattr(self, self._total) / self.count


class Accuracy(_Mean):
    """Share of predictions whose most probable class, by the mean over draws, is the label.

    Example:
        >>> metric = Accuracy()
        >>> metric.update(torch.tensor([[[0.9, 0.1], [0.3, 0.7]]]), torch.tensor([0, 0]))  # one draw, two predictions
        >>> metric.update(torch.tensor([[[0.2, 0.8], [0.4, 0.6]]]), torch.tensor([1, 1]))
        >>> metric.compute()
        tensor(0.7500, dtype=torch.float64)
    """

    def update(self, samples: Samples, labels: Labels) -> None:
        """Add a batch."""
        self._add(scoring.correct(_mean(samples), labels))


class NegativeLogLikelihood(_Mean):
    """Mean −ln p(label) of the mean over draws.

    Example:
        >>> metric = NegativeLogLikelihood()
        >>> metric.update(torch.tensor([[[0.9, 0.1]], [[0.7, 0.3]]]), torch.tensor([0]))  # two draws, one prediction
        >>> metric.compute()
        tensor(0.2231, dtype=torch.float64)
    """

    def update(self, samples: Samples, labels: Labels) -> None:
        """Add a batch."""
        self._add(scoring.negative_log_likelihood(_mean(samples), labels))


class BrierScore(_Mean):
    """Mean Σ_c (p_c − 1[c = label])² of the mean over draws.

    Example:
        >>> metric = BrierScore()
        >>> metric.update(torch.tensor([[[0.9, 0.1]], [[0.7, 0.3]]]), torch.tensor([0]))  # two draws, one prediction
        >>> metric.compute()
        tensor(0.0800, dtype=torch.float64)
    """

    def update(self, samples: Samples, labels: Labels) -> None:
        """Add a batch."""
        self._add(scoring.brier_score(_mean(samples), labels))


class PredictiveEntropy(_Mean):
    """Mean entropy of the mean over draws, in nats.

    Example:
        >>> metric = PredictiveEntropy()
        >>> metric.update(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))  # two draws that contradict each other
        >>> metric.compute()
        tensor(0.6931, dtype=torch.float64)
    """

    def update(self, samples: Samples, labels: Labels | None = None) -> None:
        """Add a batch; labels are ignored."""
        self._add(disagreement.entropy(_mean(samples)))


class MutualInformation(_Mean):
    """Mean mutual information between prediction and posterior draw, in nats.

    Example:
        >>> metric = MutualInformation()
        >>> metric.update(torch.tensor([[[0.5, 0.5]], [[0.5, 0.5]]]))  # two draws that are unsure alike
        >>> metric.compute()
        tensor(0., dtype=torch.float64)
    """

    def update(self, samples: Samples, labels: Labels | None = None) -> None:
        """Add a batch; labels are ignored."""
        self._add(disagreement.mutual_information(samples))


class PairwiseAgreement(_Mean):
    """Mean probability that two draws predict the same class.

    Example:
        >>> metric = PairwiseAgreement()
        >>> metric.update(torch.tensor([[[0.9, 0.1]], [[0.7, 0.3]], [[0.4, 0.6]]]))  # one of three pairs agrees
        >>> metric.compute()
        tensor(0.3333, dtype=torch.float64)
    """

    def update(self, samples: Samples, labels: Labels | None = None) -> None:
        """Add a batch; labels are ignored."""
        self._add(disagreement.pairwise_agreement(samples))


class PatchAccuracyVsUncertainty(_Mean):
    """PAvPU at each of several thresholds.

    Args:
        thresholds: A prediction is certain if its p-value is at most this.
        test: See `top_two_p_value`.
        space: See `top_two_p_value`.
        task: See `top_two_p_value`.
        **kwargs: Arguments of `torchmetrics.Metric`.

    Example:
        >>> metric = PatchAccuracyVsUncertainty(thresholds=[0.01, 0.05])
        >>> metric.update(torch.tensor([[[0.7, 0.3]], [[0.6, 0.4]], [[0.65, 0.35]]]), torch.tensor([0]))  # p = 0.035
        >>> metric.compute()
        tensor([0., 1.], dtype=torch.float64)
    """

    def __init__(
        self,
        thresholds: Sequence[float] = THRESHOLDS,
        *,
        test: Test = "paired",
        space: Space = "probability",
        task: ClassTask = "multiclass",
        **kwargs: Any,
    ) -> None:
        super().__init__((len(thresholds),), (tuple(thresholds), test, space, task), **kwargs)
        self.thresholds = tuple(thresholds)
        self.test: Test = test
        self.space: Space = space
        self.task: ClassTask = task

    def update(self, samples: Samples, labels: Labels | None = None, *, accuracy: Tensor | None = None) -> None:
        """Add a batch, with its labels or, where answers may be partly right, the `accuracy` of the predicted ones."""
        if accuracy is None:
            if labels is None or labels.is_floating_point():
                raise ValueError("labels must be integers. Otherwise give accuracy=, how right each answer is")
            accuracy = scoring.correct(_mean(samples), labels)
        p_value = top_two_p_value(samples, test=self.test, space=self.space, task=self.task)
        self._add(pavpu_terms(accuracy, p_value, self.thresholds))


class _Ranked(Metric):
    """A function of all confidences and accuracies together."""

    full_state_update = False
    confidence: list[Tensor]
    accuracy: list[Tensor]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("confidence", [], dist_reduce_fx="cat")
        self.add_state("accuracy", [], dist_reduce_fx="cat")

    def update(self, samples: Samples, labels: Labels, confidence: Float[Tensor, " b"] | None = None) -> None:
        """Add a batch; `confidence` (larger: more certain) ranks it instead of the largest mean probability."""
        mean = _mean(samples)
        self.accuracy.append(scoring.correct(mean, labels))
        self.confidence.append(mean.amax(dim=1) if confidence is None else confidence.double())

    def compute(self) -> Tensor:
        """Return the statistic of all predictions seen."""
        if len(self.confidence) == 0:
            raise ValueError("no predictions to compute from. Call update first")
        return self._statistic(dim_zero_cat(self.confidence), dim_zero_cat(self.accuracy))

    def _statistic(self, confidence: Tensor, accuracy: Tensor) -> Tensor:
        raise NotImplementedError


class AURC(_Ranked):
    """Area under the risk-coverage curve.

    Example:
        >>> metric = AURC()
        >>> samples, labels = torch.tensor([[[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]]]), torch.tensor([0, 1, 1])
        >>> metric.update(samples, labels)  # the error is the least confident
        >>> metric.compute()
        tensor(0.1111, dtype=torch.float64)
    """

    def _statistic(self, confidence: Tensor, accuracy: Tensor) -> Tensor:
        return selective.aurc(confidence, accuracy)


class ExcessAURC(_Ranked):
    """AURC minus that of the best ranking of the same predictions.

    Example:
        >>> metric = ExcessAURC()
        >>> samples, labels = torch.tensor([[[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]]]), torch.tensor([0, 1, 1])
        >>> metric.update(samples, labels)  # the error is the least confident: no ranking is better
        >>> metric.compute()
        tensor(0., dtype=torch.float64)
    """

    def _statistic(self, confidence: Tensor, accuracy: Tensor) -> Tensor:
        return selective.excess_aurc(confidence, accuracy)


class SelectiveAccuracy(_Ranked):
    """Accuracy of the most confident share `coverage` of the predictions.

    Example:
        >>> metric = SelectiveAccuracy(coverage=0.6)
        >>> samples, labels = torch.tensor([[[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]]]), torch.tensor([0, 1, 1])
        >>> metric.update(samples, labels)  # the error is the least confident, and left out
        >>> metric.compute()
        tensor(1., dtype=torch.float64)
    """

    def __init__(self, coverage: float = 0.8, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.coverage = coverage

    def _statistic(self, confidence: Tensor, accuracy: Tensor) -> Tensor:
        return selective.selective_accuracy(confidence, accuracy, coverage=self.coverage)


class AdaptiveCalibrationError(_Ranked):
    """Calibration error over `num_bins` bins with equally many predictions.

    Example:
        >>> metric = AdaptiveCalibrationError(num_bins=1)
        >>> metric.update(torch.tensor([[[0.9, 0.1], [0.9, 0.1]]]), torch.tensor([0, 1]))  # 90 % sure, 50 % right
        >>> metric.compute()
        tensor(0.4000, dtype=torch.float64)
    """

    def __init__(self, num_bins: int = 15, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_bins = num_bins

    def update(self, samples: Samples, labels: Labels) -> None:
        """Add a batch; only a probability can be calibrated, so no other confidence is accepted."""
        super().update(samples, labels)

    def _statistic(self, confidence: Tensor, accuracy: Tensor) -> Tensor:
        return calibration.expected_calibration_error(confidence, accuracy, num_bins=self.num_bins, scheme="equal_count")


class CalibrationError(MulticlassCalibrationError):
    """torchmetrics' expected calibration error (`n_bins`, `norm` as there), of the mean over draws.

    Example:
        >>> metric = CalibrationError(num_classes=2)
        >>> metric.update(torch.tensor([[[0.9, 0.1], [0.9, 0.1]]]), torch.tensor([0, 1]))  # 90 % sure, 50 % right
        >>> round(float(metric.compute()), 4)
        0.4
    """

    def update(self, samples: Samples, labels: Labels) -> None:
        """Add a batch."""
        super().update(_mean(samples), labels)


class AUROC(MulticlassAUROC):
    """torchmetrics' one-against-rest AUROC of the class probabilities, of the mean over draws.

    Example:
        >>> metric = AUROC(num_classes=2)
        >>> metric.update(torch.tensor([[[0.9, 0.1], [0.6, 0.4], [0.3, 0.7]]]), torch.tensor([0, 0, 1]))
        >>> metric.compute()
        tensor(1.)
    """

    def update(self, samples: Samples, labels: Labels) -> None:
        """Add a batch."""
        super().update(_mean(samples), labels)


class OODDetection(Metric):
    """AUROC, AUPR and FPR95 of an uncertainty score for out-of-distribution inputs; see `metrics.ood_detection`.

    Example:
        >>> metric = OODDetection()
        >>> metric.update(torch.tensor([0.1, 0.2, 0.9]), torch.tensor([False, False, True]))
        >>> metric.compute()["auroc"]
        tensor(1., dtype=torch.float64)
    """

    full_state_update = False
    score: list[Tensor]
    is_out: list[Tensor]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("score", [], dist_reduce_fx="cat")
        self.add_state("is_out", [], dist_reduce_fx="cat")

    def update(self, score: Float[Tensor, " b"], is_out: Tensor) -> None:
        """Add scores (larger: more likely from elsewhere) and whether each input is from elsewhere (boolean or 0/1)."""
        self.score.append(score.double())
        self.is_out.append(is_out.to(torch.int64))

    def compute(self) -> dict[str, Tensor]:
        """Return the three numbers by name."""
        score, is_out = dim_zero_cat(self.score), dim_zero_cat(self.is_out)
        found = detection.ood_detection(score[is_out == 0], score[is_out == 1])
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in found.to_dict().items()}


def _mean(samples: Tensor) -> Tensor:
    return samples.mean(dim=0, dtype=torch.float64)
