"""Scores, calibration, selective prediction, detection and disagreement against scikit-learn, torchmetrics and by hand."""

import math

import numpy as np
import pytest
import scipy.optimize
import scipy.special
import sklearn.metrics
import torch
import torchmetrics.functional.classification as reference

from bayesattn import metrics
from helpers import no_type_checks

B, C = 211, 7


def _case():
    logits = 2 * torch.randn(B, C, dtype=torch.float64)
    labels = torch.where(torch.rand(B) < 0.5, logits.argmax(-1), torch.randint(C, (B,)))
    probabilities = torch.softmax(logits, -1)
    return logits, probabilities, labels


def test_nll_equals_sklearns_log_loss():
    _, probabilities, labels = _case()
    expected = sklearn.metrics.log_loss(labels, probabilities, labels=range(C))
    assert metrics.negative_log_likelihood(probabilities, labels).mean().item() == pytest.approx(expected, abs=1e-12)


def test_nll_from_logits_is_that_of_the_mean_and_survives_underflow():
    logits = 3 * torch.randn(5, B, C, dtype=torch.float64)
    labels = torch.randint(C, (B,))
    expected = metrics.negative_log_likelihood(torch.softmax(logits, -1).mean(0), labels)
    torch.testing.assert_close(metrics.nll_from_logits(logits, labels), expected)
    far = torch.tensor([[[0.0, 2000.0]]], dtype=torch.float64)
    assert metrics.nll_from_logits(far, torch.tensor([0])).item() == pytest.approx(2000.0)


def test_brier_score_equals_sklearns():
    _, probabilities, labels = _case()
    expected = sklearn.metrics.brier_score_loss(labels, probabilities, labels=list(range(C)), scale_by_half=False)
    assert metrics.brier_score(probabilities, labels).mean().item() == pytest.approx(expected, abs=1e-12)


def test_multilabel_scores_by_hand():
    probabilities, targets = torch.tensor([[0.2, 1.0, 0.0]]), torch.tensor([[0.3, 1.0, 0.0]])
    expected = -(0.3 * math.log(0.2) + 0.7 * math.log(0.8))
    assert metrics.binary_cross_entropy(probabilities, targets).item() == pytest.approx(expected, rel=1e-6)
    assert metrics.multilabel_brier_score(probabilities, targets).item() == pytest.approx(0.01, rel=1e-6)


def test_ece_equals_torchmetrics():
    _, probabilities, labels = _case()
    confidence, accuracy = probabilities.amax(-1), metrics.correct(probabilities, labels)
    for bins in (5, 15):
        expected = reference.multiclass_calibration_error(probabilities, labels, C, n_bins=bins)
        ours = metrics.expected_calibration_error(confidence, accuracy, num_bins=bins)
        assert ours.item() == pytest.approx(expected.item(), abs=1e-6)  # torchmetrics sums in float32


def test_confidence_one_is_in_the_last_bin():
    bins = metrics.reliability_bins(torch.tensor([1.0, 0.99, 0.0]), torch.tensor([1, 0, 1]), num_bins=10)
    assert bins.count.tolist() == [1.0, 2.0]
    assert bins.accuracy.tolist() == [1.0, 0.5]


def test_adaptive_ece_by_hand():
    confidence, accuracy = torch.tensor([0.1, 0.2, 0.6, 0.7, 0.9]), torch.tensor([0, 1, 0, 1, 1])
    # bins of 3 and 2: |1/3 − 0.3| · 3/5 + |1 − 0.8| · 2/5
    expected = (1 / 3 - 0.3) * 0.6 + 0.2 * 0.4
    ours = metrics.expected_calibration_error(confidence, accuracy, num_bins=2, scheme="equal_count")
    assert ours.item() == pytest.approx(expected, abs=1e-6)


def test_one_bin_is_the_gap_between_mean_confidence_and_accuracy():
    confidence, accuracy = torch.rand(97), torch.rand(97)
    gap = abs(confidence.double().mean() - accuracy.double().mean()).item()
    for scheme in ("equal_width", "equal_count"):
        assert metrics.expected_calibration_error(confidence, accuracy, num_bins=1, scheme=scheme).item() == pytest.approx(
            gap
        )


@pytest.mark.parametrize("name", ["expected_calibration_error", "aurc", "excess_aurc", "selective_accuracy"])
def test_order_of_the_input_has_no_influence_even_with_ties(name):
    confidence, accuracy = torch.randint(4, (101,)) / 5, torch.randint(2, (101,))
    options = {"scheme": "equal_count"} if name == "expected_calibration_error" else {}
    order = torch.randperm(101)
    first = getattr(metrics, name)(confidence, accuracy, **options)
    torch.testing.assert_close(
        getattr(metrics, name)(confidence[order], accuracy[order], **options), first, rtol=1e-13, atol=0
    )


def test_temperature_equals_a_scalar_optimizer():
    logits, _, labels = _case()

    def nll(log_temperature: float) -> float:
        scaled = logits.numpy() / math.exp(log_temperature)
        return -(scipy.special.log_softmax(scaled, axis=1)[np.arange(B), labels.numpy()]).mean()

    expected = math.exp(scipy.optimize.minimize_scalar(nll, bounds=(-4, 4), method="bounded", options={"xatol": 1e-10}).x)
    # a minimum found by values alone is known to the square root of the machine's precision
    assert metrics.fit_temperature(logits, labels) == pytest.approx(expected, rel=1e-6)


def test_temperature_recovers_the_one_that_made_the_data():
    logits = torch.randn(20_011, 3, dtype=torch.float64)
    labels = torch.multinomial(torch.softmax(logits, -1), 1).squeeze(1)
    fitted = metrics.fit_temperature(2.5 * logits, labels)
    assert fitted == pytest.approx(2.5, rel=0.1)  # the standard error at this size is about 2 %
    torch.testing.assert_close(metrics.apply_temperature(2.5 * logits, 2.5), torch.softmax(logits, -1))


def test_perfect_and_useless_logits_end_at_the_bounds():
    logits = torch.eye(3, dtype=torch.float64)
    assert metrics.fit_temperature(logits, torch.arange(3), bounds=(0.5, 2.0)) == 0.5
    assert metrics.fit_temperature(-logits, torch.arange(3), bounds=(0.5, 2.0)) == 2.0


def test_aurc_by_hand():
    # ranked: right, wrong, right, wrong: risks 0, 1/2, 1/3, 1/2; best order: 0, 0, 1/3, 1/2
    confidence, accuracy = torch.tensor([0.4, 0.9, 0.6, 0.8]), torch.tensor([0, 1, 1, 0])
    assert metrics.aurc(confidence, accuracy).item() == pytest.approx((0 + 1 / 2 + 1 / 3 + 1 / 2) / 4)
    assert metrics.excess_aurc(confidence, accuracy).item() == pytest.approx(1 / 8)
    assert metrics.selective_accuracy(confidence, accuracy, coverage=0.75).item() == pytest.approx(2 / 3)


def test_ties_give_the_expectation_over_their_orders():
    confidence, accuracy = torch.tensor([0.5, 0.5, 0.9, 0.5]), torch.tensor([1, 0, 0, 1])
    total = 0.0
    for order in ((0, 1, 3), (0, 3, 1), (1, 0, 3), (1, 3, 0), (3, 0, 1), (3, 1, 0)):
        broken = confidence.clone()
        broken[list(order)] -= 0.01 * torch.arange(3)
        total += metrics.aurc(broken, accuracy).item()
    assert metrics.aurc(confidence, accuracy).item() == pytest.approx(total / 6)


@pytest.mark.parametrize(("coverage", "kept"), [(0.0, 1), (0.2, 1), (0.8, 4), (0.81, 5), (1.0, 5)])
def test_selective_accuracy_keeps_the_smallest_number_that_covers(coverage, kept):
    confidence, accuracy = torch.tensor([5.0, 4, 3, 2, 1]), torch.tensor([0.9, 0.1, 0.5, 0.3, 0.7])
    expected = accuracy[:kept].double().mean().item()
    assert metrics.selective_accuracy(confidence, accuracy, coverage=coverage).item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("ties", [False, True])
def test_detection_equals_sklearn(ties):
    score_in, score_out = 3 * torch.randn(83), 3 * torch.randn(59) + 2
    if ties:
        score_in, score_out = score_in.round(), score_out.round()
    label = [0] * 83 + [1] * 59
    score = torch.cat([score_in, score_out])
    found = metrics.ood_detection(score_in, score_out)
    assert found.auroc == pytest.approx(sklearn.metrics.roc_auc_score(label, score), abs=1e-12)
    assert found.aupr == pytest.approx(sklearn.metrics.average_precision_score(label, score), abs=1e-12)
    # accepting = calling in-distribution: the ROC of −score with in-distribution as the positive class
    false, true, _ = sklearn.metrics.roc_curve([1 - y for y in label], -score, drop_intermediate=False)
    assert found.fpr95 == pytest.approx(false[np.argmax(true >= 0.95)], abs=1e-12)


def test_detection_ranks_scores_that_a_sigmoid_would_saturate():
    assert metrics.auroc(torch.tensor([100.0, 101.0]), torch.tensor([102.0, 103.0])).item() == 1.0


def test_entropy_and_mutual_information_by_hand():
    samples = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]], dtype=torch.float64)
    assert metrics.entropy(samples.mean(0)).item() == pytest.approx(math.log(2))
    assert metrics.mutual_information(samples).item() == pytest.approx(math.log(2))
    same = torch.tensor([0.3, 0.7], dtype=torch.float64).expand(5, 3, 2)
    assert metrics.mutual_information(same).tolist() == pytest.approx([0.0] * 3, abs=1e-15)
    # two independent binary answers, each settled in every draw and undecided on average
    settled = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]], dtype=torch.float64)
    assert metrics.mutual_information(settled, task="multilabel").item() == pytest.approx(2 * math.log(2))


def test_entropy_equals_scipys():
    _, probabilities, _ = _case()
    np.testing.assert_allclose(metrics.entropy(probabilities), scipy.special.entr(probabilities.numpy()).sum(-1), rtol=1e-12)


def test_pairwise_agreement_counts_pairs():
    samples = torch.softmax(torch.randn(6, 13, 3), -1)
    votes = samples.argmax(-1)
    pairs = [(i, j) for i in range(6) for j in range(6) if i != j]
    expected = torch.stack([(votes[i] == votes[j]).double() for i, j in pairs]).mean(0)
    torch.testing.assert_close(metrics.pairwise_agreement(samples), expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p, y: metrics.brier_score(p, y + C), "labels must be classes from 0 to 6, got values from"),
        (lambda p, y: metrics.brier_score(p, y - 1), "labels must be classes from 0 to 6, got values from -1"),
        (lambda p, y: metrics.brier_score(p, y[1:]), "one per prediction, got"),
        (lambda p, y: metrics.brier_score(p, y.double()), "integer tensor"),
        (lambda p, y: metrics.brier_score(2 * p, y), "from 0 to 1"),
        (lambda p, y: metrics.negative_log_likelihood(0.9 * p, y), "sum to one"),
        (lambda p, y: metrics.negative_log_likelihood(p[:0], y[:0]), "none of them empty"),
        (lambda p, y: metrics.entropy(p[:0]), "must have no empty axis, got shape"),
        (lambda p, y: metrics.entropy(p * torch.nan), "NaN"),
        (lambda p, y: metrics.mutual_information(p[None] * torch.nan), "NaN"),
        (lambda p, y: metrics.pairwise_agreement(p[None]), "at least 2"),
        (lambda p, y: metrics.aurc(p[:, 0] * torch.nan, y == 0), "NaN"),
        (lambda p, y: metrics.aurc(p[:0, 0], y[:0]), "at least 1"),
        (lambda p, y: metrics.selective_accuracy(p[:, 0], y == 0, coverage=1.2), "coverage must be from 0 to 1, got 1.2"),
        (
            lambda p, y: metrics.expected_calibration_error(p[:, 0] + 1, y == 0),
            "confidence must have entries from 0 to 1 and no NaN, got entries from",
        ),
        (
            lambda p, y: metrics.expected_calibration_error(p[:, 0], y == 0, num_bins=0),
            "num_bins must be an integer of at least 1, got 0",
        ),
        (
            lambda p, y: metrics.reliability_bins(p[:, 0], y == 0, scheme="guess"),
            "scheme must be one of 'equal_width', 'equal_count', got 'guess'",
        ),
        (lambda p, y: metrics.auroc(p[:0, 0], p[:, 0]), "none of them empty"),
        (lambda p, y: metrics.ood_detection(p[:, 0], p[:, 0] * torch.nan), "NaN"),
        (
            lambda p, y: metrics.fit_temperature(p, y, bounds=(2.0, 1.0)),
            "bounds must be two numbers with 0 < low < high, got",
        ),
        (lambda p, y: metrics.apply_temperature(p, 0.0), "temperature must be a finite number above 0, got 0.0"),
        (lambda p, y: metrics.binary_cross_entropy(p, p[:, 1:]), "targets must have the shape of probabilities, .*, got"),
    ],
)
def test_bad_input_is_refused(call, message, monkeypatch):
    no_type_checks(monkeypatch)
    _, probabilities, labels = _case()
    labels[0] = 0
    with pytest.raises(ValueError, match=message):
        call(probabilities, labels)
