"""All metrics at once: names, values against the single functions, chunks, memory, one draw, multi-label."""

import subprocess
import sys

import pytest
import torch

from bayesattn import metrics
from bayesattn.metrics import evaluate_predictions, evaluate_table, tabulate_predictions
from helpers import no_type_checks

S, B, C = 7, 101, 5


def _case():
    logits = 2 * torch.randn(S, B, C, dtype=torch.float64) + 2 * torch.randn(B, C, dtype=torch.float64)
    labels = torch.where(torch.rand(B) < 0.6, logits.mean(0).argmax(-1), torch.randint(C, (B,)))
    return logits, torch.softmax(logits, -1), labels


def test_every_name_is_the_value_of_its_function():
    _, samples, labels = _case()
    mean = samples.mean(0)
    sure, right = mean.amax(-1), metrics.correct(mean, labels)
    p_value = metrics.top_two_p_value(samples, test="welch")
    expected = {
        "accuracy": right.mean(),
        "nll": metrics.negative_log_likelihood(mean, labels).mean(),
        "brier": metrics.brier_score(mean, labels).mean(),
        "mean_entropy": metrics.entropy(mean).mean(),
        "mean_mutual_information": metrics.mutual_information(samples).mean(),
        "mean_pairwise_agreement": metrics.pairwise_agreement(samples).mean(),
        "pavpu_01": metrics.pavpu(right, p_value, 0.01),
        "pavpu_05": metrics.pavpu(right, p_value, 0.05),
        "pavpu_10": metrics.pavpu(right, p_value, 0.1),
        "ece": metrics.expected_calibration_error(sure, right),
        "adaptive_ece": metrics.expected_calibration_error(sure, right, scheme="equal_count"),
        "aurc": metrics.aurc(sure, right),
        "e_aurc": metrics.excess_aurc(sure, right),
        "selective_accuracy_80": metrics.selective_accuracy(sure, right, coverage=0.8),
    }
    found = evaluate_predictions(samples, labels, test="welch", num_resamples=20)
    assert {name: estimate.value for name, estimate in found.items()} == pytest.approx(
        {name: float(value) for name, value in expected.items()}, abs=1e-12
    )
    assert all(estimate.low <= estimate.value + 0.1 and estimate.low <= estimate.high for estimate in found.values())
    assert (
        found["pavpu_05"].to_dict().items()
        >= {"test": "welch", "space": "probability", "num_samples": S, "threshold": 0.05}.items()
    )


def test_logits_and_probabilities_differ_only_in_what_is_tested():
    logits, samples, labels = _case()
    from_logits = evaluate_predictions(logits, labels, space="logit", num_resamples=0)
    from_samples = evaluate_predictions(samples, labels, num_resamples=0)
    for name, estimate in from_samples.items():
        if not name.startswith("pavpu"):
            assert from_logits[name].value == pytest.approx(estimate.value, abs=1e-12), name
    assert from_logits["pavpu_05"].settings["space"] == "logit"
    assert from_samples["nll"].low is None


def test_one_draw_has_every_metric_that_needs_no_second():
    _, samples, labels = _case()
    found = evaluate_predictions(samples[:1], labels, num_resamples=5)
    assert found["mean_mutual_information"].value == pytest.approx(0.0, abs=1e-15)
    assert not [name for name in found if "pavpu" in name or "agreement" in name]
    assert tabulate_predictions(samples[:1], labels).p_value is None


def test_multilabel_accuracy_is_the_target_of_the_answer():
    samples = torch.sigmoid(torch.randn(S, B, C, dtype=torch.float64))
    targets = torch.randint(4, (B, C)) / 3
    table = tabulate_predictions(samples, targets, task="multilabel", test="welch")
    answer = samples.mean(0).argmax(-1)
    torch.testing.assert_close(table.accuracy, targets[torch.arange(B), answer].double())
    torch.testing.assert_close(table.nll, metrics.binary_cross_entropy(samples.mean(0), targets))
    assert 0.0 < evaluate_table(table, num_resamples=0)["pavpu_05"].value < 1.0


def test_chunks_do_not_change_the_table(monkeypatch):
    _, samples, labels = _case()
    whole = tabulate_predictions(samples, labels)
    monkeypatch.setattr("bayesattn.metrics.evaluate.VALUES_PER_CHUNK", 13 * samples[:, 0].numel())
    parts = tabulate_predictions(samples, labels)
    for name in ("confidence", "nll", "brier", "entropy", "mutual_information", "agreement", "p_value"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 1e-2), (torch.bfloat16, 5e-2), (torch.float32, 1e-5)])
def test_lower_precision_gives_nearly_the_same_metrics(dtype, tolerance):
    _, samples, labels = _case()
    low = evaluate_predictions(samples.to(dtype), labels, num_resamples=0)
    high = evaluate_predictions(samples, labels, num_resamples=0)
    for name in ("nll", "brier", "mean_entropy"):
        assert low[name].value == pytest.approx(high[name].value, rel=tolerance)


def test_the_same_seed_gives_the_same_intervals():
    _, samples, labels = _case()
    assert evaluate_predictions(samples, labels, num_resamples=10) == evaluate_predictions(samples, labels, num_resamples=10)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s, y: (s, y + C), "labels must be classes from 0 to 4, got values"),
        (lambda s, y: (s[:1] * torch.nan, y), "NaN"),
        (lambda s, y: (s[:1] * 0.5, y), "sum to one"),
        (lambda s, y: (s[:, :0], y[:0]), "none of them empty"),
        (lambda s, y: (s, y[:, None]), "labels must have shape .*, got"),
    ],
)
def test_bad_predictions_are_refused(change, message, monkeypatch):
    no_type_checks(monkeypatch)
    _, samples, labels = _case()
    with pytest.raises(ValueError, match=message):
        evaluate_predictions(*change(samples, labels))


_MEMORY = """
import resource, sys, torch
from bayesattn.metrics import tabulate_predictions, top_two_p_value
torch.set_num_threads(1)
b, c, draws = 50_003, 100, 20
# draws that overlap in memory: 0.4 GB of samples in 20 MB, so that what is measured is what the functions add
rows = torch.softmax(torch.randn(b + draws, c), -1)
samples = rows.as_strided((draws, b, c), (c, c, 1))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
(top_two_p_value(samples) if sys.argv[1] == "p" else tabulate_predictions(samples, torch.zeros(b, dtype=torch.int64)))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["p", "table"])
def test_memory_does_not_grow_with_the_predictions(what):
    # 0.4 GB in float32 would be 0.8 GB if it were turned to float64 as a whole; ru_maxrss is in KiB
    run = subprocess.run([sys.executable, "-c", _MEMORY, what], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 512 * 1024


def test_metrics_import_without_torchmetrics_scipy_or_matplotlib():
    code = (
        "import sys\n"
        "for name in ('torchmetrics', 'scipy', 'matplotlib', 'sklearn'): sys.modules[name] = None\n"
        "import bayesattn.metrics as m\n"
        "try: m.running\n"
        "except ImportError: print('needs torchmetrics')\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "needs torchmetrics"
