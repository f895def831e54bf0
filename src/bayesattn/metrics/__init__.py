"""Uncertainty as numbers: p-values and PAvPU, calibration, proper scores, selective prediction, detection, decisions.

Pure functions need only torch. The running `torchmetrics` classes (correct under DDP) are in `bayesattn.metrics.running`.
"""

from typing import TYPE_CHECKING

from bayesattn.metrics.bootstrap import bootstrap_mean, bootstrap_statistic
from bayesattn.metrics.calibration import (
    ReliabilityBins,
    apply_temperature,
    expected_calibration_error,
    fit_temperature,
    reliability_bins,
)
from bayesattn.metrics.decisions import SelectivePredictor, SelectiveReport, clopper_pearson
from bayesattn.metrics.detection import Detection, auroc, average_precision, false_positive_rate, ood_detection
from bayesattn.metrics.disagreement import entropy, mutual_information, pairwise_agreement
from bayesattn.metrics.evaluate import (
    Estimate,
    PredictionTable,
    evaluate_predictions,
    evaluate_table,
    tabulate_predictions,
)
from bayesattn.metrics.pavpu import PAvPU, pavpu, pavpu_by_num_samples, pavpu_by_threshold
from bayesattn.metrics.scoring import (
    binary_cross_entropy,
    brier_score,
    correct,
    multilabel_brier_score,
    negative_log_likelihood,
    nll_from_logits,
)
from bayesattn.metrics.selective import RiskCoverage, aurc, excess_aurc, risk_coverage, selective_accuracy
from bayesattn.metrics.significance import top_two_classes, top_two_p_value, two_sample_p_value
from bayesattn.optional import lazy_names

if TYPE_CHECKING:
    from bayesattn.metrics import running as running

__all__ = [
    "Detection",
    "Estimate",
    "PAvPU",
    "PredictionTable",
    "ReliabilityBins",
    "RiskCoverage",
    "SelectivePredictor",
    "SelectiveReport",
    "apply_temperature",
    "aurc",
    "auroc",
    "average_precision",
    "binary_cross_entropy",
    "bootstrap_mean",
    "bootstrap_statistic",
    "brier_score",
    "clopper_pearson",
    "correct",
    "entropy",
    "evaluate_predictions",
    "evaluate_table",
    "excess_aurc",
    "expected_calibration_error",
    "false_positive_rate",
    "fit_temperature",
    "multilabel_brier_score",
    "mutual_information",
    "negative_log_likelihood",
    "nll_from_logits",
    "ood_detection",
    "pairwise_agreement",
    "pavpu",
    "pavpu_by_num_samples",
    "pavpu_by_threshold",
    "reliability_bins",
    "risk_coverage",
    "selective_accuracy",
    "tabulate_predictions",
    "top_two_classes",
    "top_two_p_value",
    "two_sample_p_value",
]

if not TYPE_CHECKING:
    # it needs torchmetrics, so it is not in __all__ either
    __getattr__, __dir__ = lazy_names(__name__, [*__all__, "running"], {"running": "bayesattn.metrics.running"})
