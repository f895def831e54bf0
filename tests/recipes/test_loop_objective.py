"""The loop computes what its first page says: compared with the formulas, step by step, on a model of two numbers."""

from types import SimpleNamespace

import pytest
import torch
from line_experiment import BATCHES, COSTS, INPUTS, LABELS, RATE, LineExperiment

from bayesattn import KLSchedule
from bayesattn_recipes.common.experiment import Experiment, num_steps
from bayesattn_recipes.common.loop import TrainingConfig, train, training_step


def by_hand(epochs, schedule):
    """Return (w, z) after every epoch and the rows of the log: loss = (Σ NLL + λ_t Σ KL) / labels."""
    w, z, step, after, rows = 0.25, 40.0, 0, [], []
    for epoch in range(epochs):
        sums = SimpleNamespace(nll=0.0, kl=0.0)
        for indices in BATCHES:
            labels = float(LABELS[indices].sum())
            sums.nll += float((w * INPUTS * LABELS)[indices].sum())
            sums.kl += float(z * COSTS[indices].sum())
            w -= RATE * float((INPUTS * LABELS)[indices].sum()) / labels
            z -= RATE * schedule(step) * float(COSTS[indices].sum()) / labels
            step += 1
        after.append((w, z))
        rows.append(
            {"epoch": epoch, "step": step, "kl_weight": schedule(step - 1), "train_nll": sums.nll / float(LABELS.sum()),
             "train_kl": sums.kl / len(INPUTS)}
        )  # fmt: skip
    return after, rows


# a linear ramp: the weight of every step is another, and that of the first is 0
@pytest.mark.parametrize("accumulation_steps", [1, 2])
@pytest.mark.parametrize("schedule", [KLSchedule("linear", period=5.0), KLSchedule("constant", final=3.0)])
def test_every_step_is_the_negative_elbo_per_label(schedule, accumulation_steps):
    experiment = LineExperiment()
    config = TrainingConfig(epochs=3, accumulation_steps=accumulation_steps, kl_schedule=schedule)
    log = train(experiment, config, seed=0)
    after, rows = by_hand(3, schedule)
    assert experiment.validated == [pytest.approx(pair) for pair in after]
    for row, expected in zip(log.rows, rows, strict=True):
        assert {name: row[name] for name in expected} == pytest.approx(expected)


def test_the_kl_weight_is_that_of_the_step():
    """The first of two steps has weight 0 and must leave z alone, the second has weight 1."""
    experiment = LineExperiment()
    with training_step(experiment, TrainingConfig(kl_schedule=KLSchedule("linear", period=1.0)), seed=0) as advance:
        advance(torch.tensor([1, 3]))
        assert experiment.model.z.item() == 40.0
        advance(torch.tensor([1, 3]))
    assert experiment.model.z.item() == pytest.approx(40.0 - RATE * (1.0 + 3.0) / (140 + 2))


def test_labels_of_one_example_share_its_kl():
    experiment = LineExperiment()
    with training_step(experiment, TrainingConfig(), seed=0) as advance:
        advance(torch.tensor([1]))
    assert experiment.model.z.item() == pytest.approx(40.0 - RATE / 140)


@pytest.mark.parametrize(
    ("scores", "mode", "kept"),
    [
        ((3.0, 1.0, 2.0), "min", 1),
        ((3.0, 5.0, 2.0), "max", 1),
        # of equal ones the first
        ((1.0, 1.0, 2.0), "min", 0),
        ((1.0, 1.0, 0.0), "max", 0),
    ],
)
def test_the_best_parameters_are_restored(scores, mode, kept):
    experiment = LineExperiment(scores)
    log = train(experiment, TrainingConfig(epochs=3, keep="score", keep_mode=mode), seed=0)
    assert (experiment.model.w.item(), experiment.model.z.item()) == experiment.validated[kept]
    assert len(set(experiment.validated)) == 3
    assert [row["is_best"] for row in log.rows].count(True) == kept + 1
    assert not experiment.model.training


def test_the_last_parameters_are_kept_where_nothing_else_is_asked_for():
    experiment = LineExperiment((1.0, 2.0, 3.0))
    train(experiment, TrainingConfig(epochs=3), seed=0)
    assert (experiment.model.w.item(), experiment.model.z.item()) == experiment.validated[2]


@pytest.mark.parametrize(("patience", "epochs"), [(1, 3), (2, 6), (None, 8)])
def test_patience_counts_the_epochs_since_the_best(patience, epochs):
    experiment = LineExperiment((5.0, 4.0, 4.5, 3.0, 3.5, 3.5, 2.0, 9.0))
    log = train(experiment, TrainingConfig(epochs=8, keep="score", patience=patience), seed=0)
    assert len(log.rows) == epochs


def test_a_number_of_steps_replaces_the_epochs():
    experiment, seen = LineExperiment(), []
    experiment.max_steps = 5
    config = TrainingConfig(epochs=1)
    assert num_steps(experiment, config) == 5
    log = train(experiment, config, seed=0, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, 5) for done in range(1, 6)]
    assert [row["step"] for row in log.rows] == [3, 5]
    # the second epoch was cut after two of its three steps
    (_, z), total = by_hand(1, config.kl_schedule)[0][0], 0.0
    for indices in BATCHES[:2]:
        cost = float(COSTS[indices].sum())
        total, z = total + z * cost, z - RATE * cost / float(LABELS[indices].sum())
    assert log.rows[1]["train_kl"] == pytest.approx(total / 6)


def test_the_scheduler_steps_once_per_optimizer_step_and_the_gradient_is_clipped():
    experiment = LineExperiment()
    experiment.scheduler = torch.optim.lr_scheduler.LambdaLR(experiment.optimizer, lambda step: 0.5**step)
    config = TrainingConfig(accumulation_steps=2, clip_norm=0.01, kl_schedule=KLSchedule("constant", final=0.0))
    with training_step(experiment, config, seed=0) as advance:
        for _ in range(3):
            advance(torch.tensor([4, 0]))
    # the gradient of w is far above the bound, that of z is 0
    assert experiment.model.w.item() == pytest.approx(0.25 - RATE * 0.01 * (1.0 + 0.5 + 0.25), rel=1e-6)
    assert experiment.scheduler.get_last_lr() == [RATE * 0.5**3]


class Shuffled(LineExperiment):
    """The batches of every experiment, and which examples were asked for."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def batches(self, config, generator):
        return Experiment.batches(self, config, generator)

    def collate(self, indices):
        self.asked.append(indices.tolist())
        return super().collate(indices)


def flat(parts):
    return [index for part in parts for index in part]


def test_every_epoch_has_every_example_once_in_an_order_of_its_own():
    orders = {}
    for seed in (3, 4):
        experiment = Shuffled()
        train(experiment, TrainingConfig(epochs=3, batch_size=3), seed=seed)
        assert [len(part) for part in experiment.asked] == [3, 3, 1] * 3
        orders[seed] = [flat(experiment.asked[start : start + 3]) for start in (0, 3, 6)]
    every = [tuple(order) for found in orders.values() for order in found]
    assert all(sorted(order) == list(range(7)) for order in every)
    assert len(set(every)) == 6
    again = Shuffled()
    train(again, TrainingConfig(epochs=3, batch_size=3), seed=3)
    assert flat(again.asked) == flat(orders[3])
