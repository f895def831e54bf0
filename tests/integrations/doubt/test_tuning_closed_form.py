"""tune_noise in closed form: the scale that the labels ask for, one pass over the data, a threshold with a guarantee."""

import dataclasses
import math

import pytest
import torch
import transformers as hf
from small_models import SMALL

import bayesattn as ba
from helpers import no_type_checks


def build(classes=2):
    torch.manual_seed(0)
    return hf.BertForSequenceClassification(hf.BertConfig(**{**SMALL, "num_labels": classes})).double().eval()


def labeled(model, noise, count=6, size=32):
    """Label inputs by the linearized model itself: what the true scale is, is known."""
    generator, result = torch.Generator().manual_seed(1), []
    for _ in range(count):
        ids = torch.randint(3, 61, (size, 7), generator=generator)
        truth = ba.uncertainty(model, {"input_ids": ids}, config=noise)
        moved = truth.margin + truth.std * torch.randn(size, generator=generator).double()
        keeps = torch.rand(size, generator=generator).double() < torch.sigmoid(moved)
        pair = truth.classes
        result.append({"input_ids": ids, "labels": torch.where(keeps, pair[:, 0], pair[:, 1])})
    return result


@pytest.mark.parametrize("variant", ["BAM-WC", "BAM-LF"])
def test_finds_the_scale_behind_the_labels(variant):
    model = build()
    # noise as large as the margins themselves, so that the labels depend on it
    true_k = 0.4
    data = labeled(model, ba.AttentionConfig("BAM-NOKL", weibull_k=true_k), count=20)
    ba.bayesianize(model, ba.AttentionConfig(variant))
    calls = []
    handle = model.register_forward_pre_hook(lambda *_: calls.append(1))
    result = ba.tune_noise(model, data, method="closed-form", quiet=True)
    handle.remove()
    assert len(calls) == len(data)  # one pass over the data
    (value,) = set(result.values.values())
    deviation = math.pi / math.sqrt(6) / value if variant == "BAM-WC" else value
    true = math.pi / math.sqrt(6) / true_k
    assert 0.5 * true < deviation < 2.0 * true
    assert result.after.nll < result.before.nll
    assert result.after.nll == pytest.approx(min(result.nll_by_value.values()))
    # the model has it now, and its averaged probabilities are those that were measured
    found = [ba.uncertainty(model, {"input_ids": batch["input_ids"]}) for batch in data]
    probabilities = torch.cat([one.averaged_probabilities for one in found])
    nll = ba.metrics.negative_log_likelihood(probabilities, torch.cat([batch["labels"] for batch in data])).mean()
    assert float(nll) == pytest.approx(result.after.nll, rel=1e-6)


def test_candidates_and_more_classes():
    model = build(classes=4)
    data = labeled(model, ba.AttentionConfig("BAM-NOKL", weibull_k=0.5))
    data[0]["labels"][:5] = -100
    ba.bayesianize(model, ba.AttentionConfig("BAM-NOKL"))
    two = ba.tune_noise(model, data, method="closed-form", candidates=[50.0, 1.0, 0.5], quiet=True)
    three = ba.tune_noise(model, data, method="closed-form", candidates=[50.0, 1.0, 0.5], num_classes=3, quiet=True)
    assert set(two.values.values()) <= {50.0, 1.0, 0.5}
    assert two.before == three.before
    assert two.after != three.after


def test_threshold_keeps_its_promise_on_its_data():
    model = build()
    data = labeled(model, ba.AttentionConfig("BAM-NOKL", weibull_k=2.0), count=8)
    ba.bayesianize(model, ba.AttentionConfig("BAM-NOKL"))
    result = ba.tune_noise(model, data, method="closed-form", risk=0.4, quiet=True)
    answered = [result.selector.answers(ba.uncertainty(model, {"input_ids": b["input_ids"]}).t) for b in data]
    report = result.selector.calibration
    assert sum(int(part.sum()) for part in answered) == report.num_answered > 0
    assert report.error <= result.selector.bound <= 0.4


@pytest.mark.parametrize(("variant", "field"), [("BAM-NOKL", "weibull_k"), ("BAM-LF", "sigma_q")])
def test_noise_that_is_not_small_is_said_to_be_none_for_draws(variant, field):
    model = build()
    ids = torch.randint(3, 61, (32, 7), generator=torch.Generator().manual_seed(2))
    # every text has both labels, which asks for all noise there is
    data = [{"input_ids": ids, "labels": torch.full((32,), label)} for label in (0, 1)]
    ba.bayesianize(model, ba.AttentionConfig(variant))
    result = ba.tune_noise(model, data, method="closed-form", quiet=True)
    note = "this noise is not small: use averaged_probabilities with it, not draws"
    chosen = next(iter(result.values.values()))
    assert str(result).endswith(f"{field} = {chosen:g} is the most noise of all candidates\n{note}")
    # also away from the end of the grid
    middle = 3.0 if variant == "BAM-LF" else 0.3
    inner = dataclasses.replace(result, values=dict.fromkeys(result.values, middle))
    assert inner.at_edge is None
    assert str(inner).endswith(note)
    small = [0.02, 0.03] if variant == "BAM-LF" else [50.0, 40.0]
    few = ba.tune_noise(model, data, method="closed-form", candidates=small, quiet=True)
    assert few.at_edge is not None
    assert not few.is_large
    assert few.at_edge.endswith("is the most noise of all candidates; more may be better: give candidates=[...]")


def test_a_plain_model_is_told_to_convert_without_new_parameters():
    model = build()
    with pytest.raises(
        ValueError, match=r'Convert it first: model = ba\.bayesianize\(model, ba\.AttentionConfig\("BAM-NOKL"\)'
    ):
        ba.tune_noise(model, labeled(model, ba.AttentionConfig("BAM-NOKL"), count=1), quiet=True)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"method": "closed"}, "method must be one of 'draws', 'closed-form', got 'closed'"),
        ({"risk": 0.1}, "needs method='closed-form'"),
        ({"method": "closed-form", "risk": 5}, "risk must be from 0 to 1, got 5"),
        ({"method": "closed-form", "per_layer": True}, "fits one scale"),
        (
            {"method": "closed-form", "risk": 1e-6},
            r"^an error of 1e-06 is asked for, but these 32 predictions ",
        ),
    ],
)
def test_wrong_options_are_refused_and_the_model_stays(options, match, monkeypatch):
    no_type_checks(monkeypatch)
    model = build()
    data = labeled(model, ba.AttentionConfig("BAM-NOKL", weibull_k=2.0), count=1)
    ba.bayesianize(model, ba.AttentionConfig("BAM-WC", weibull_k=7.0))
    with pytest.raises(ValueError, match=match):
        ba.tune_noise(model, data, quiet=True, **options)
    assert {m.config.weibull_k for m in model.modules() if hasattr(m, "weibull_k") or hasattr(m, "samples_in_eval")} == {7.0}
