"""The running metrics: batch by batch equals all at once, and two processes equal one."""

import inspect
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from sklearn.metrics import roc_auc_score
from torchmetrics import MetricCollection

from bayesattn import metrics
from bayesattn.metrics import running
from processes import leave, run_on_two

S, B, C = 5, 103, 4


def _case():
    generator = torch.Generator().manual_seed(3)
    samples = torch.softmax(2 * torch.randn(S, B, C, generator=generator), -1)
    return samples, torch.randint(C, (B,), generator=generator)


def _make() -> dict[str, running.Metric]:
    return {
        "accuracy": running.Accuracy(),
        "nll": running.NegativeLogLikelihood(),
        "brier": running.BrierScore(),
        "mean_entropy": running.PredictiveEntropy(),
        "mean_mutual_information": running.MutualInformation(),
        "mean_pairwise_agreement": running.PairwiseAgreement(),
        "aurc": running.AURC(),
        "e_aurc": running.ExcessAURC(),
        "selective_accuracy_80": running.SelectiveAccuracy(0.8),
        "adaptive_ece": running.AdaptiveCalibrationError(),
        "ece": running.CalibrationError(num_classes=C),
        "auroc": running.AUROC(num_classes=C),
    }


def _feed(parts: list[slice]) -> dict[str, float]:
    samples, labels = _case()
    found = _make()
    pavpu, ood = running.PatchAccuracyVsUncertainty(), running.OODDetection()
    for part in parts:
        for metric in found.values():
            metric.update(samples[:, part], labels[part])
        mean = samples[:, part].mean(0, dtype=torch.float64)
        pavpu.update(samples[:, part], accuracy=metrics.correct(mean, labels[part]))
        ood.update(metrics.entropy(mean), labels[part] == 0)
    values = {name: float(metric.compute()) for name, metric in found.items()}
    values |= {f"pavpu_{key}": float(value) for key, value in zip(("01", "05", "10"), pavpu.compute(), strict=True)}
    return values | {f"ood_{name}": float(value) for name, value in ood.compute().items()}


def test_batches_add_up_to_the_functional_metrics():
    samples, labels = _case()
    found = _feed([slice(0, 40), slice(40, 41), slice(41, B)])
    expected = metrics.evaluate_predictions(samples, labels, num_resamples=0)
    for name, estimate in expected.items():
        # torchmetrics' calibration error is summed in float32
        assert found[name] == pytest.approx(estimate.value, abs=1e-6 if name == "ece" else 1e-12), name
    mean = samples.mean(0, dtype=torch.float64)
    assert found["auroc"] == pytest.approx(roc_auc_score(labels, mean, multi_class="ovr"), abs=1e-6)
    score = metrics.entropy(mean)
    assert found["ood_aupr"] == pytest.approx(metrics.ood_detection(score[labels != 0], score[labels == 0]).aupr, abs=1e-12)


def _worker(rank: int, rendezvous: str, results) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    # unequal shares: 61 and 42 predictions, in two and three batches
    parts = [slice(0, 30), slice(30, 61)] if rank == 0 else [slice(61, 62), slice(62, 90), slice(90, B)]
    results.put((rank, _feed(parts)))
    leave()


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path):
    results = mp.get_context("spawn").SimpleQueue()
    run_on_two(_worker, str(tmp_path / "rendezvous"), results)
    single = _feed([slice(0, B)])
    for _ in range(2):
        rank, found = results.get()
        assert found == pytest.approx(single, abs=1e-6), rank
        assert {n: v for n, v in found.items() if n not in ("ece", "auroc")} == pytest.approx(
            {n: v for n, v in single.items() if n not in ("ece", "auroc")}, abs=1e-12
        )


@pytest.mark.parametrize("name", list(_make()))
def test_metrics_can_be_pickled_and_reset(name):
    samples, labels = _case()
    metric = _make()[name]
    metric.update(samples, labels)
    copy = pickle.loads(pickle.dumps(metric))
    assert float(copy.compute()) == float(metric.compute())
    metric.reset()
    metric.update(samples[:, :50], labels[:50])
    fresh = _make()[name]
    fresh.update(samples[:, :50], labels[:50])
    assert float(metric.compute()) == float(fresh.compute())


@pytest.mark.parametrize("kind", [running.BrierScore, running.AURC])
@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
def test_computing_before_any_update_is_an_error(kind):
    with pytest.raises(ValueError, match=r"no predictions to compute from. Call update first"):
        kind().compute()


def test_a_refused_batch_leaves_the_state_as_it_was():
    samples, labels = _case()
    metric = running.AURC()
    metric.update(samples, labels)
    before = float(metric.compute())
    with pytest.raises(ValueError, match="labels must be classes from 0 to 3, got values"):
        metric.update(samples, labels + C)
    metric._computed = None
    assert float(metric.compute()) == before


def test_a_collection_gives_what_its_metrics_give_alone():
    samples, labels = _case()
    together = MetricCollection({**_make(), "pavpu": running.PatchAccuracyVsUncertainty()})
    alone = {**_make(), "pavpu": running.PatchAccuracyVsUncertainty()}
    for part in (slice(0, 40), slice(40, B)):
        together.update(samples[:, part], labels[part])
        for metric in alone.values():
            metric.update(samples[:, part], labels[part])
    found = together.compute()
    assert {"aurc", "e_aurc"} <= set(next(group for group in together.compute_groups.values() if "aurc" in group))
    for name, metric in alone.items():
        assert torch.equal(found[name], metric.compute()), name


def test_averages_that_agree_on_the_first_batch_stay_apart_in_a_collection():
    # all answers right and all draws agree: accuracy and agreement are 1, then they part
    sure = torch.tensor([0.9, 0.1]).expand(3, 4, 2)
    split = torch.tensor([[[0.9, 0.1]] * 2, [[0.1, 0.9]] * 2, [[0.9, 0.1]] * 2])
    together = MetricCollection({"accuracy": running.Accuracy(), "agreement": running.PairwiseAgreement()})
    together.update(sure, torch.zeros(4, dtype=torch.long))
    together.update(split, torch.ones(2, dtype=torch.long))
    found = together.compute()
    assert float(found["accuracy"]) == pytest.approx(4 / 6)
    assert float(found["agreement"]) == pytest.approx((4 + 2 / 3) / 6)


def test_ranking_metrics_take_another_confidence_and_calibration_does_not():
    samples, labels = _case()
    doubt = torch.rand(B, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    together = MetricCollection({"aurc": running.AURC(), "ece": running.AdaptiveCalibrationError()})
    together.update(samples=samples, labels=labels, confidence=-doubt)
    found = together.compute()
    right = metrics.correct(samples.mean(0, dtype=torch.float64), labels)
    assert float(found["aurc"]) == pytest.approx(float(metrics.aurc(-doubt, right)), abs=1e-12)
    plain = running.AdaptiveCalibrationError()
    plain.update(samples, labels)
    assert torch.equal(found["ece"], plain.compute())


def test_pavpu_takes_labels_or_accuracies_and_refuses_to_guess():
    samples, labels = _case()
    by_label, by_accuracy = running.PatchAccuracyVsUncertainty(), running.PatchAccuracyVsUncertainty()
    by_label.update(samples, labels)
    by_accuracy.update(samples, accuracy=metrics.correct(samples.mean(0, dtype=torch.float64), labels))
    assert torch.equal(by_label.compute(), by_accuracy.compute())
    for arguments in ((samples,), (samples, torch.rand(B))):
        with pytest.raises(ValueError, match=r"labels must be integers. Otherwise give accuracy="):
            inspect.unwrap(running.PatchAccuracyVsUncertainty.update)(by_label, *arguments)
