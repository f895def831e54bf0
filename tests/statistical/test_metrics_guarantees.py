"""What the metrics promise about repeated experiments, checked by repeating them."""

import pytest
import scipy.stats
import torch

from bayesattn.metrics import SelectivePredictor, bootstrap_mean, clopper_pearson, two_sample_p_value
from helpers import FAILURE_RATE

REPEATS = 100


def _not_above(failures: int, promised: float) -> bool:
    """Would a failure rate of exactly `promised` show this many failures with more than the suite's failure rate?"""
    return scipy.stats.binom.sf(failures - 1, REPEATS, promised) > FAILURE_RATE


@pytest.mark.parametrize("test", ["paired", "welch", "pooled"])
def test_p_values_are_uniform_when_the_classes_do_not_differ(test):
    first, second = torch.randn(2, 8, 20_011, dtype=torch.float64)
    p_value = two_sample_p_value(first, second, test=test)
    distance = scipy.stats.kstest(p_value.numpy(), "uniform")
    # Welch's test is approximate: its size at 8 draws is within half a per cent of nominal, which KS would see at this n
    assert distance.statistic < 0.02 if test == "welch" else distance.pvalue > FAILURE_RATE


def test_wilcoxon_is_conservative_when_the_classes_do_not_differ():
    difference = torch.randn(9, 20_011, dtype=torch.float64)
    p_value = two_sample_p_value(difference, torch.zeros_like(difference), test="wilcoxon")
    for size in (0.01, 0.05, 0.2):
        rejected = int((p_value <= size).sum())
        assert scipy.stats.binom.sf(rejected - 1, len(p_value), size) > FAILURE_RATE


def _world(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Confidence u ~ U(0, 1), wrong with probability 0.4 (1 − u): above t the error rate is 0.2 (1 − t)."""
    confidence = torch.rand(n, dtype=torch.float64)
    return confidence, torch.rand(n) > 0.4 * (1.0 - confidence)


def test_error_target_holds_for_new_data_as_often_as_promised():
    failures = answered = 0
    for _ in range(REPEATS):
        chosen = SelectivePredictor.for_error(*_world(1009), 0.15, level=0.8)
        true_error = 0.2 * (1.0 - max(chosen.threshold, 0.0))
        failures += true_error > 0.15
        answered += chosen.calibration.coverage
    assert _not_above(failures, 0.2)
    # and the promise is not kept by answering next to nothing: 0.75 of the data could be answered at this target
    assert answered / REPEATS > 0.4


def test_coverage_target_holds_for_new_data_as_often_as_promised():
    failures = 0
    for _ in range(REPEATS):
        chosen = SelectivePredictor.for_coverage(*_world(97), 0.7, level=0.8)
        failures += 1.0 - chosen.threshold < 0.7
    assert _not_above(failures, 0.2)
    # the rule is the sharpest there is, so failures are not much rarer than allowed either
    assert failures > 0.05 * REPEATS


def test_clopper_pearson_covers_as_often_as_promised():
    failures = 0
    for successes in torch.distributions.Binomial(29, torch.tensor(0.3)).sample((REPEATS,)).int().tolist():
        low, high = clopper_pearson(successes, 29, level=0.8)
        failures += not low <= 0.3 <= high
    assert _not_above(failures, 0.2)


def test_bootstrap_interval_covers_the_true_mean_about_as_often_as_it_says():
    misses = 0
    for seed in range(REPEATS):
        low, high = bootstrap_mean(torch.rand(101), num_resamples=200, confidence=0.9, seed=seed).tolist()
        misses += not low <= 0.5 <= high
    # percentile intervals undercover a little: with 101 values and 200 resamples by at most three points
    assert _not_above(misses, 0.13)
    assert misses > 0.05 * REPEATS
