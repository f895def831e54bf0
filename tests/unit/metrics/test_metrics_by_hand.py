"""Numbers worked out by hand, chosen so that a wrong reduction, end point or constant gives another one."""

import math

import pytest
import torch

from bayesattn import metrics

LN2 = math.log(2.0)


def test_mutual_information_takes_the_mean_entropy_of_the_draws():
    # entropies of the draws: ln 2, 0, 0; the mean is (1/2, 1/2)
    draws = torch.tensor([[[0.5, 0.5]], [[1.0, 0.0]], [[0.0, 1.0]]], dtype=torch.float64)
    assert metrics.mutual_information(draws).item() == pytest.approx(LN2 - LN2 / 3.0)
    assert metrics.mutual_information(draws, task="multilabel").item() == pytest.approx(2.0 * (LN2 - LN2 / 3.0))


def test_certain_is_a_p_value_of_at_most_the_threshold():
    # constant differences have p = 0, none at all p = 1, so both ends of the interval are met exactly
    settled, tied = [0.9, 0.1], [0.5, 0.5]
    samples = torch.tensor([[settled, tied], [settled, tied], [settled, tied]], dtype=torch.float64)
    assert metrics.top_two_p_value(samples).tolist() == [0.0, 1.0]
    at_zero, at_one = metrics.pavpu_by_threshold(samples, torch.tensor([True, True]), [0.0, 1.0], num_resamples=3)
    assert (at_zero.certain_fraction, at_zero.value) == (0.5, 0.5)
    assert (at_one.certain_fraction, at_one.value) == (1.0, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_may_miss_one_by_a_ten_thousandth(dtype):
    labels = torch.tensor([0])
    metrics.negative_log_likelihood(torch.tensor([[0.5, 0.50009]], dtype=dtype), labels)
    with pytest.raises(ValueError, match=r"sum to one within 0.0001, got a row that is off by 0.00015"):
        metrics.negative_log_likelihood(torch.tensor([[0.5, 0.50015]], dtype=dtype), labels)


def test_shares_of_a_few_predictions_are_counted_and_not_rounded():
    confidence = torch.tensor([0.9, 0.8, 0.7, 0.6, 0.5], dtype=torch.float64)
    accuracy = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    # 0.8 of five are four; nothing asked for is still one
    assert metrics.selective_accuracy(confidence, accuracy).item() == pytest.approx(3 / 4)
    assert metrics.selective_accuracy(confidence, accuracy, coverage=0.0).item() == 1.0
    # 0.95 of 20 are 19, and a foreign score at the threshold is accepted
    own = torch.arange(20, dtype=torch.float64)
    foreign = torch.tensor([18.0, 18.5, 30.0], dtype=torch.float64)
    assert metrics.false_positive_rate(own, foreign).item() == pytest.approx(1 / 3)


def test_a_temperature_beyond_the_bounds_is_the_nearest_of_them():
    logits = torch.tensor([[2.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    assert metrics.fit_temperature(logits, torch.tensor([0, 1])) == 0.01
    assert metrics.fit_temperature(logits, torch.tensor([1, 0]), bounds=(0.5, 7.0)) == 7.0
    # three of four right: softmax(2 / T) = 3/4 at T = 2 / ln 3
    found = metrics.fit_temperature(logits[[0, 0, 0, 0]], torch.tensor([0, 0, 0, 1]))
    assert found == pytest.approx(2.0 / math.log(3.0), rel=1e-12)


def test_a_confidence_on_an_edge_belongs_to_the_bin_above_and_one_to_the_last():
    bins = metrics.reliability_bins(torch.tensor([0.2, 0.5, 1.0]), torch.tensor([0.0, 1.0, 1.0]), num_bins=2)
    assert bins.count.tolist() == [1.0, 2.0]
    assert bins.confidence.tolist() == pytest.approx([0.2, 0.75])
