"""What metrics.json and the groups of a report say equals what the metrics say of the same predictions."""

import json
import math

import pytest
import torch
from report_runs import make_run
from scipy import stats
from sklearn.metrics import roc_auc_score

from bayesattn import files, metrics
from bayesattn.evaluation import runs
from bayesattn.evaluation.aggregate import over_runs
from bayesattn.evaluation.measure import measure
from bayesattn.evaluation.report import measure_run
from bayesattn.evaluation.report.gather import group_runs, read_runs


def test_interval_over_runs_is_students():
    values = [0.81, 0.84, 0.78, 0.9, 0.85]
    expected = stats.t.interval(0.95, 4, loc=sum(values) / 5, scale=stats.sem(values))
    summary = over_runs(values)
    assert (summary.low, summary.high) == pytest.approx(expected, rel=1e-12)
    assert summary.value == pytest.approx(sum(values) / 5, rel=1e-12)
    assert (over_runs([0.5]).low, over_runs([0.5]).num_runs) == (None, 1)


@pytest.mark.parametrize("values", [[], [math.nan], [1.0, math.inf]])
def test_summary_of_nothing_is_refused(values):
    with pytest.raises(ValueError, match="values must be one or more finite numbers, got"):
        over_runs(values)


def test_metrics_file_holds_the_library_s_numbers(tmp_path):
    folder = make_run(tmp_path / "run", num_resamples=50)
    written = json.loads((folder / "metrics.json").read_text())
    predictions = runs.read_predictions(folder)
    split = predictions.splits["test"]
    expected = metrics.evaluate_predictions(split.samples["attention"], split.labels, num_resamples=50)
    found = written["methods"]["attention"]["splits"]["test"]["metrics"]
    for name, estimate in expected.items():
        assert found[name] == json.loads(json.dumps(estimate.to_dict()))
    assert written["methods"]["attention"]["num_samples"] == 6
    assert written["methods"]["mean"]["num_samples"] == 1
    assert "pavpu_05" not in written["methods"]["mean"]["splits"]["test"]["metrics"]


def test_detection_equals_scikit_learn(tmp_path):
    folder = make_run(tmp_path / "run")
    written = json.loads((folder / "metrics.json").read_text())
    splits = runs.read_predictions(folder).splits
    scores = [torch.special.entr(splits[name].samples["mean"][0].double()).sum(-1) for name in ("test", "strange")]
    expected = roc_auc_score([0] * 61 + [1] * 61, torch.cat(scores))
    found = written["methods"]["mean"]["splits"]["strange"]["metrics"]
    # the same ranks counted twice: only the last division differs
    assert found["ood_auroc_entropy"]["value"] == pytest.approx(expected, rel=1e-12)
    assert "ood_auroc_mutual_information" not in found


def test_temperature_is_fitted_on_validation_and_applied_to_test(tmp_path):
    folder = make_run(tmp_path / "run")
    method = json.loads((folder / "metrics.json").read_text())["methods"]["mean"]
    split = runs.read_predictions(folder).splits["validation"]
    logits, labels = split.samples["mean"][0].double().log(), split.labels

    def nll(temperature):
        return float(torch.nn.functional.cross_entropy(logits / temperature, labels))

    best = method["temperature"]
    assert nll(best) <= min(nll(best * 1.01), nll(best / 1.01))
    assert method["splits"]["validation"]["metrics"]["scaled_nll"]["value"] == pytest.approx(nll(best), rel=1e-9)


def test_predictions_that_are_no_probabilities_are_named(tmp_path):
    folder = make_run(tmp_path / "run")
    before = (folder / "metrics.json").read_bytes()
    tensors, meta = files.read_tensors(folder / runs.PREDICTIONS_FILE)
    tensors["1/samples/attention"][0, 0] = torch.nan
    files.write_tensors(folder / runs.PREDICTIONS_FILE, tensors, meta)
    with pytest.raises(files.RunError, match="split 'test', method 'attention'"):
        measure_run(folder, num_resamples=0)
    assert (folder / "metrics.json").read_bytes() == before


def test_runs_that_differ_only_by_seed_form_one_group(run_folders):
    groups = group_runs(read_runs(run_folders))
    assert [(group.label, len(group.runs)) for group in groups] == [
        ("BAM-WC, no draws", 2),
        ("BAM-WC, draws", 2),
        ("soft, no draws", 1),
        ("soft, draws", 1),
    ]
    values = [run.metrics["methods"]["mean"]["splits"]["test"]["metrics"]["nll"]["value"] for run in groups[0].runs]
    assert groups[0].metric("test", "nll").value == pytest.approx(sum(values) / 2, rel=1e-12)


def test_runs_of_one_variant_are_told_apart_by_what_differs(tmp_path):
    folders = [
        make_run(tmp_path / f"k{k}", seed=k, config={"seed": k, "attention": {"weibull_k": k, "variant": "BAM-WC"}})
        for k in (1, 5)
    ]
    labels = [group.label for group in group_runs(read_runs(folders))]
    assert labels[0] == "BAM-WC weibull_k=1, no draws"
    assert labels[2] == "BAM-WC weibull_k=5, no draws"


def test_single_run_keeps_its_bootstrap_interval(tmp_path):
    folder = make_run(tmp_path / "run", num_resamples=50)
    written = json.loads((folder / "metrics.json").read_text())["methods"]["attention"]["splits"]["test"]["metrics"][
        "accuracy"
    ]
    summary = group_runs(read_runs([folder]))[1].metric("test", "accuracy")
    assert (summary.value, summary.low, summary.high) == (written["value"], written["low"], written["high"])


def test_metrics_of_other_predictions_are_refused(tmp_path):
    first = make_run(tmp_path / "run")
    second = runs.read_predictions(first)
    del second.splits["noise-1"]
    runs.write_predictions(first, second)
    with pytest.raises(files.RunError, match=r"metrics.json does not belong to these predictions; run `bayesattn evaluate"):
        read_runs([first])


def test_faultless_validation_split_leaves_the_scaled_nll_finite():
    sure = torch.tensor([[0.9999, 0.0001], [0.0001, 0.9999]]).repeat(1, 5, 1)
    right = torch.tensor([0, 1]).repeat(5)
    wrong = torch.cat([1 - right[:1], right[1:]])
    splits = {
        "validation": runs.SplitPredictions({"mean": sure}, right),
        "test": runs.SplitPredictions({"mean": sure}, wrong),
    }
    measured = measure(runs.Predictions(splits, ["a", "b"], ["mean"], seed=0), "mean", num_resamples=0)
    # the lowest temperature of the search multiplies the logit of the one error by 100; probabilities are float32
    assert measured["temperature"] == 0.01
    scaled = measured["splits"]["test"]["metrics"]["scaled_nll"]["value"]
    assert scaled == pytest.approx(math.log(9999.0) * 100.0 / 10, rel=1e-4)
