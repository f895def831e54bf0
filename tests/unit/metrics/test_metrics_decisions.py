"""Selective prediction: exact intervals, thresholds by hand, targets that cannot be met."""

import json

import pytest
import scipy.stats
import torch

from bayesattn.metrics import SelectivePredictor, clopper_pearson
from helpers import no_type_checks


def _case(n: int = 401):
    confidence = torch.rand(n)
    return confidence, torch.rand(n) < confidence


@pytest.mark.parametrize(("successes", "trials"), [(0, 7), (3, 11), (7, 7), (13, 997)])
@pytest.mark.parametrize("level", [0.9, 0.99])
def test_clopper_pearson_equals_scipy(successes, trials, level):
    expected = scipy.stats.binomtest(successes, trials).proportion_ci(level, method="exact")
    assert clopper_pearson(successes, trials, level=level) == pytest.approx((expected.low, expected.high), abs=1e-10)


def test_no_trials_say_nothing():
    assert clopper_pearson(0, 0) == (0.0, 1.0)


def test_error_bound_is_the_binomial_one_and_the_next_coverage_would_break_the_target():
    confidence, correct = _case()
    chosen = SelectivePredictor.for_error(confidence, correct, 0.3, level=0.9, num_thresholds=10)
    answered = chosen.answers(confidence)
    wrong = int((answered & ~correct).sum())

    def upper(errors: int, kept: int) -> float:
        return scipy.stats.beta.ppf(1 - 0.1 / 10, errors + 1, kept - errors)

    assert chosen.bound == pytest.approx(upper(wrong, int(answered.sum())), abs=1e-10)
    assert chosen.bound <= 0.3
    rank = round(401 * (round(chosen.calibration.coverage * 10) + 1) / 10)
    larger = confidence > confidence.sort(descending=True).values[rank]
    assert upper(int((larger & ~correct).sum()), int(larger.sum())) > 0.3


def test_everything_is_answered_when_everything_is_right():
    confidence = torch.rand(211)
    chosen = SelectivePredictor.for_error(confidence, torch.ones(211), 0.05)
    assert chosen.calibration.coverage == 1.0
    assert bool(chosen.answers(torch.tensor([-1e30, 0.0])).all())
    json.dumps(chosen.to_dict(), allow_nan=False)


def test_equal_confidences_are_answered_or_withheld_together():
    confidence = torch.tensor([0.9] * 150 + [0.5] * 150)
    correct = torch.tensor([True] * 150 + [False] * 150)
    chosen = SelectivePredictor.for_error(confidence, correct, 0.1)
    assert chosen.calibration.num_answered == 150
    assert chosen.answers(torch.tensor([0.5, 0.9])).tolist() == [False, True]


def test_coverage_target_uses_the_smallest_rank_that_promises_it():
    confidence, correct = _case(211)
    chosen = SelectivePredictor.for_coverage(confidence, correct, 0.7, level=0.9)
    rank = chosen.calibration.num_answered
    assert scipy.stats.beta.cdf(0.7, rank, 212 - rank) <= 0.1 < scipy.stats.beta.cdf(0.7, rank - 1, 213 - rank)
    assert chosen.bound == pytest.approx(scipy.stats.beta.ppf(0.1, rank, 212 - rank), abs=1e-10)
    assert chosen.bound >= 0.7


def test_report_on_new_data_counts_and_brackets():
    confidence, correct = torch.tensor([0.9, 0.8, 0.2, 0.95]), torch.tensor([True, False, True, True])
    chosen = SelectivePredictor.for_coverage(*_case(), 0.5)
    chosen = type(chosen)(0.5, "coverage", 0.5, 0.5, 0.95, chosen.calibration)
    report = chosen.report(confidence, correct)
    assert (report.num_answered, report.coverage, report.error) == (3, 0.75, pytest.approx(1 / 3))
    expected = scipy.stats.binomtest(1, 3).proportion_ci(0.95, method="exact")
    assert report.error_interval == pytest.approx((expected.low, expected.high), abs=1e-10)
    nothing = chosen.report(torch.zeros(3), torch.ones(3))
    assert (nothing.error, nothing.error_interval) == (None, (0.0, 1.0))


def test_targets_out_of_reach_are_errors_that_say_what_would_do():
    confidence, correct = _case(53)
    with pytest.raises(ValueError, match=r"an error of 0\.001 is asked for, but .* can promise none below 0\.\d+"):
        SelectivePredictor.for_error(confidence, correct, 0.001)
    # with n draws even the lowest threshold promises no more than level-quantile of their minimum: 0.05^(1/53)
    with pytest.raises(ValueError, match=r"target_coverage is 0.99, but .* can promise at most 0\.945"):
        SelectivePredictor.for_coverage(confidence, correct, 0.99)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.tensor([0.5, torch.nan]), torch.tensor([1, 0]), 0.1), "NaN"),
        ((torch.tensor([0.5, 0.4]), torch.tensor([0.5, 0.0]), 0.1), "booleans or 0/1"),
        ((torch.tensor([0.5]), torch.tensor([1, 0]), 0.1), "one common length of at least 1, got confidence"),
        ((torch.zeros(0), torch.zeros(0), 0.1), "at least 1"),
        ((torch.tensor([0.5, 0.4]), torch.tensor([1, 0]), 1.5), "target_"),
    ],
)
@pytest.mark.parametrize("kind", ["for_error", "for_coverage"])
def test_bad_calibration_data_are_refused(kind, arguments, message, monkeypatch):
    no_type_checks(monkeypatch)
    with pytest.raises(ValueError, match=message):
        getattr(SelectivePredictor, kind)(*arguments)


def test_impossible_counts_are_refused():
    with pytest.raises(ValueError, match="successes must be from 0 to the number of trials, got 5 of 3"):
        clopper_pearson(5, 3)
