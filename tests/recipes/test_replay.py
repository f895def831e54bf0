"""Recorded training steps: what every replay reads anew, whose gradients it leaves; on a GPU, that training is the same."""

from dataclasses import replace

import pytest
import torch
from fake_steps import FakeSteps
from torch import nn

from bayesattn import AttentionConfig
from bayesattn_recipes.common import loop as _loop


def make_steps():
    torch.manual_seed(0)
    used, unused = nn.Linear(5, 3), nn.Linear(2, 2)

    def run(batch, factors):
        loss = (used(batch["x"]) * batch["weight"]).square().sum() * factors[0]
        loss.backward()
        return (loss.detach(),)

    parameters = [*used.parameters(), *unused.parameters()]
    return FakeSteps(run, parameters), run, parameters


def test_replays_read_the_batch_and_the_factors_of_their_own_step():
    steps, run, parameters = make_steps()
    for step in range(5):
        batch, factors = {"x": torch.randn(7, 5), "weight": 2.0}, torch.tensor([1.0 + step])
        (found,) = steps(batch, factors)
        gradients = [None if p.grad is None else p.grad.clone() for p in parameters]
        found = found.clone()
        for parameter in parameters:
            parameter.grad = None
        (expected,) = run(batch, factors)
        torch.testing.assert_close(found, expected)
        for ours, parameter in zip(gradients, parameters, strict=True):
            assert (ours is None) == (parameter.grad is None)
            if ours is not None:
                torch.testing.assert_close(ours, parameter.grad)
    assert steps.captures == 1


def test_another_shape_type_or_number_is_another_recording():
    steps, _, _ = make_steps()
    cases = [(7, torch.float32, 2.0), (3, torch.float32, 2.0), (7, torch.float32, 3.0)]
    for size, dtype, weight in cases * 3:
        steps({"x": torch.randn(size, 5, dtype=dtype), "weight": weight}, torch.ones(1))
    assert steps.captures == len(cases)


def test_a_step_leaves_its_own_gradient_and_nothing_of_an_earlier_one():
    steps, _, parameters = make_steps()
    batch = {"x": torch.ones(2, 5), "weight": 1.0}
    found = []
    for _ in range(4):
        steps(batch, torch.ones(1))
        found.append(parameters[0].grad.clone())
    for gradient in found[1:]:
        assert torch.equal(gradient, found[0])


def test_all_recordings_leave_their_gradients_in_the_same_tensors():
    steps, _, parameters = make_steps()
    places = set()
    for size in (7, 3, 7, 3, 7, 3):
        steps({"x": torch.randn(size, 5), "weight": 1.0}, torch.ones(1))
        if steps.captures:
            places.add(parameters[0].grad.data_ptr())
    assert steps.captures == 2
    assert len(places) == 1


def test_nothing_is_recorded_without_a_gpu(monkeypatch):
    monkeypatch.setattr(_loop, "RecordedSteps", lambda *_: pytest.fail("recorded without a GPU"))
    train_tiny(AttentionConfig("soft"), records=True)


def test_training_gives_the_memory_of_its_recordings_back(monkeypatch):
    recorded = []
    released = []

    class Watched(FakeSteps):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            recorded.append(self)

    monkeypatch.setattr(_loop, "RecordedSteps", Watched)
    monkeypatch.setattr(_loop._Loop, "_can_record", lambda loop: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: released.append(len(recorded[0]._recordings)))
    train_tiny(AttentionConfig("soft"), records=True)
    assert recorded[0].captures > 0
    assert released == [0]


def train_tiny(attention, *, records, precision="fp32"):
    """Train a small classifier for some steps of two shapes; return its parameters."""

    class Tiny(_loop.Experiment):
        num_examples, is_recordable = 26, records

        def __init__(self):
            from bayesattn.nn import TransformerEncoderLayer

            torch.manual_seed(3)
            layer = TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, config=attention)
            self.model = nn.Sequential(layer, nn.Linear(16, 1))
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
            self.x = torch.randn(26, 11, 16)

        def collate(self, indices):
            return {"x": self.x[indices]}

        def nll(self, model, batch):
            return model(batch["x"]).square().sum()

    experiment = Tiny()
    config = _loop.TrainingConfig(epochs=6, batch_size=8, precision=precision, clip_norm=1.0)
    torch.manual_seed(5)
    _loop.train(experiment, replace(config), seed=1)
    return [parameter.detach().cpu() for parameter in experiment.model.parameters()]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("variant", ["soft", "BAM-NOKL", "BAM-LF", "BAM-LC", "BAM-WF", "BAM-WC"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_recorded_training_is_the_plain_one(variant, precision):
    plain, recorded = (
        train_tiny(AttentionConfig(variant), records=records, precision=precision) for records in (False, True)
    )
    for ours, truth in zip(recorded, plain, strict=True):
        # the same draws; atomics and another order of sums, through 24 steps of AdamW of 1e-3 each
        torch.testing.assert_close(ours, truth, rtol=0.0, atol=1e-3 if precision == "bf16" else 1e-4)
