"""PAvPU by hand, as curves, with intervals; and the bootstrap itself."""

import numpy as np
import pytest
import scipy.stats
import torch

from bayesattn.metrics import (
    bootstrap_mean,
    bootstrap_statistic,
    pavpu,
    pavpu_by_num_samples,
    pavpu_by_threshold,
    top_two_p_value,
)
from helpers import no_type_checks


def _predictions(draws: int = 11, b: int = 53, c: int = 5):
    samples = torch.softmax(torch.randn(draws, b, c) + torch.randn(b, c), dim=-1)
    labels = torch.where(torch.rand(b) < 0.6, samples.mean(0).argmax(-1), torch.randint(c, (b,)))
    return samples, (samples.mean(0).argmax(-1) == labels).double()


def test_pavpu_counts_accurate_certain_and_inaccurate_uncertain():
    # n_ac = 2, n_iu = 1, n_au = 1, n_ic = 1
    accuracy = torch.tensor([True, True, False, True, False])
    p_value = torch.tensor([0.01, 0.05, 0.3, 0.2, 0.001])
    assert pavpu(accuracy, p_value, 0.05).item() == pytest.approx(3 / 5)


def test_pavpu_with_fractional_accuracies_is_the_papers_generalization():
    accuracy, p_value = torch.tensor([0.3, 0.6, 1.0, 0.0]), torch.tensor([0.01, 0.2, 0.04, 0.9])
    # certain: 0.3 and 1.0; uncertain: 1 − 0.6 and 1 − 0.0
    assert pavpu(accuracy, p_value, 0.05).item() == pytest.approx((0.3 + 0.4 + 1.0 + 1.0) / 4)


def test_pavpu_at_the_ends_is_accuracy_and_its_complement():
    accuracy, p_value = torch.rand(31), torch.rand(31)
    low, high = pavpu(accuracy, p_value, [0.0, 1.0]).tolist()
    assert high == pytest.approx(accuracy.double().mean().item())
    assert low == pytest.approx(1 - accuracy.double().mean().item())


def test_curve_over_thresholds_carries_everything_behind_each_number():
    samples, accuracy = _predictions()
    curve = pavpu_by_threshold(samples, accuracy, [0.01, 0.05, 0.1], test="welch", num_resamples=200)
    p_value = top_two_p_value(samples, test="welch")
    for point, threshold in zip(curve, (0.01, 0.05, 0.1), strict=True):
        record = point.to_dict()
        assert (record["test"], record["space"], record["num_samples"], record["threshold"]) == (
            "welch",
            "probability",
            11,
            threshold,
        )
        assert point.value == pytest.approx(pavpu(accuracy, p_value, threshold).item())
        assert point.certain_fraction == pytest.approx((p_value <= threshold).double().mean().item())
        assert point.low <= point.value <= point.high


def test_curve_over_samples_uses_the_first_draws():
    samples, accuracy = _predictions()
    curve = pavpu_by_num_samples(samples, accuracy, [2, 5, 11], num_resamples=20)
    assert [point.num_samples for point in curve] == [2, 5, 11]
    for point in curve:
        expected = pavpu(accuracy, top_two_p_value(samples[: point.num_samples]), 0.05)
        assert point.value == pytest.approx(expected.item())


def test_pavpu_tends_to_the_accuracy_as_draws_are_added():
    samples, accuracy = _predictions(draws=400)
    curve = pavpu_by_num_samples(samples, accuracy, [3, 400], num_resamples=2)
    mean = accuracy.mean().item()
    assert abs(curve[1].value - mean) < abs(curve[0].value - mean)
    assert curve[1].certain_fraction > curve[0].certain_fraction


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (torch.tensor([0.5, 1.5]), torch.tensor([0.1, 0.1]), 0.05),
            "accuracy must have entries from 0 to 1 and no NaN, got entries",
        ),
        (
            (torch.tensor([0.5, 0.5]), torch.tensor([0.1, torch.nan]), 0.05),
            "p_value must have entries from 0 to 1 and no NaN, got entries",
        ),
        ((torch.tensor([0.5, 0.5]), torch.tensor([0.1, 0.1]), 1.5), "threshold must be from 0 to 1, got 1.5"),
        (
            (torch.tensor([0.5, 0.5]), torch.tensor([0.1, 0.1]), []),
            "thresholds must hold at least one number from 0 to 1, got none",
        ),
        ((torch.tensor([0.5]), torch.tensor([0.1, 0.1]), 0.05), "one common length of at least 1, got accuracy"),
        ((torch.zeros(0), torch.zeros(0), 0.05), "at least 1"),
    ],
)
def test_bad_pavpu_input_is_refused(arguments, message, monkeypatch):
    no_type_checks(monkeypatch)
    with pytest.raises(ValueError, match=message):
        pavpu(*arguments)


@pytest.mark.parametrize("draws", [1, 12])
def test_curve_over_samples_refuses_draws_it_has_not(draws):
    with pytest.raises(ValueError, match=r"num_samples must be (at most|an integer)"):
        pavpu_by_num_samples(*_predictions(), [draws])


def test_bootstrap_repeats_with_its_seed_and_not_with_another():
    values = torch.rand(41, 3)
    first = bootstrap_mean(values, seed=1, num_resamples=100)
    assert torch.equal(first, bootstrap_mean(values, seed=1, num_resamples=100))
    assert not torch.equal(first, bootstrap_mean(values, seed=2, num_resamples=100))


def test_bootstrap_of_any_statistic_agrees_with_that_of_the_mean():
    values = torch.rand(23, dtype=torch.float64)
    general = bootstrap_statistic(lambda column: column.mean(), values, num_resamples=150, seed=3)
    torch.testing.assert_close(general, bootstrap_mean(values, num_resamples=150, seed=3))


def test_bootstrap_interval_is_close_to_scipys():
    values = torch.rand(101, dtype=torch.float64)
    ours = bootstrap_mean(values, num_resamples=20_000, seed=0)
    theirs = scipy.stats.bootstrap(
        (values.numpy(),), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(0)
    ).confidence_interval
    # the end of a 95 % interval from R resamples has a standard error of about 2.7 sd/√R; five of them, for two intervals
    sd = float(values.std()) / 101**0.5
    np.testing.assert_allclose(ours, [theirs.low, theirs.high], rtol=0, atol=5 * 2.7 * 2**0.5 * sd / 20_000**0.5)


def test_bootstrap_in_chunks_keeps_every_resample(monkeypatch):
    from bayesattn.metrics import bootstrap

    values = torch.rand(17)
    whole = bootstrap_mean(values, num_resamples=53)
    monkeypatch.setattr(bootstrap, "_COUNTS_PER_CHUNK", 17 * 4)
    torch.testing.assert_close(bootstrap_mean(values, num_resamples=53), whole)


@pytest.mark.parametrize(("name", "value"), [("num_resamples", 0), ("confidence", 1.0)])
def test_bad_bootstrap_settings_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be .*, got {value}"):
        bootstrap_mean(torch.rand(3), **{name: value})
