"""What the loop keeps beside the parameters: time, log, sums, seeds; and what it looks at."""

import json
from types import SimpleNamespace

import pytest
import torch
from line_experiment import BATCHES, LineExperiment

from bayesattn.entropy import is_observing_entropy
from bayesattn.files import RunError
from bayesattn.noise.keyed import example_seeds
from bayesattn_recipes.common.checkpoints import Checkpoints, check_identity
from bayesattn_recipes.common.config import build_config
from bayesattn_recipes.common.experiment import Experiment
from bayesattn_recipes.common.guards import Diverged
from bayesattn_recipes.common.loop import TrainingConfig, train
from bayesattn_recipes.common.position import Position
from bayesattn_recipes.common.processes import Processes
from bayesattn_recipes.common.state import random_state


class Killed(BaseException):
    """Stands for the end of the process."""


def kill(done, total):
    if done == 5:
        raise Killed


def test_entropy_is_observed_in_the_first_step_of_an_epoch_only():
    """Looking at the weights costs time, so one step of an epoch has to do."""
    seen = []

    class Looking(LineExperiment):
        def nll(self, model, batch):
            seen.append(is_observing_entropy())
            return super().nll(model, batch)

    train(Looking(), TrainingConfig(epochs=2), seed=0)
    assert seen == [True, False, False] * 2


def test_the_seconds_of_a_resumed_run_are_those_of_all_its_parts(tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("bayesattn_recipes.common.loop.time", SimpleNamespace(monotonic=lambda: clock[0]))

    class Slow(LineExperiment):
        def collate(self, indices):
            clock[0] += 10.0
            return super().collate(indices)

    config, checkpoints = TrainingConfig(epochs=3, checkpoint_steps=1), Checkpoints(tmp_path, {"recipe": "line"})
    with pytest.raises(Killed):
        train(Slow(), config, seed=0, checkpoints=checkpoints, on_progress=kill)
    clock[0] += 1000.0
    # nine steps: four of them before the last checkpoint
    assert train(Slow(), config, seed=0, checkpoints=checkpoints).seconds == 90.0
    assert train(Slow(), config, seed=0).seconds == 90.0


def test_keyed_noise_is_another_in_every_step(monkeypatch):
    keys = []

    def note(seed, step, indices):
        keys.append((seed, step, indices.tolist()))
        return example_seeds(seed, step, indices)

    monkeypatch.setattr("bayesattn_recipes.common.loop.example_seeds", note)
    train(LineExperiment(), TrainingConfig(epochs=2, noise="keyed"), seed=13)
    assert keys == [(13, step, BATCHES[step % 3].tolist()) for step in range(6)]


def test_what_went_wrong_is_looked_for_with_the_draws_of_the_step():
    drawn = []

    class Unlucky(LineExperiment):
        def nll(self, model, batch):
            drawn.append(torch.rand(()).item())
            return super().nll(model, batch) * (float("nan") if len(drawn) == 5 else 1.0)

    with pytest.raises(Diverged, match="not finite at step 4"):
        train(Unlucky(), TrainingConfig(epochs=3), seed=0)
    assert len(drawn) == 6
    assert drawn[5] == drawn[4]


def test_the_log_so_far_is_beside_the_checkpoints_and_leftovers_go_when_a_run_goes_on(tmp_path):
    checkpoints = Checkpoints(tmp_path, {"recipe": "line"})
    config = TrainingConfig(epochs=3, checkpoint_steps=1)
    with pytest.raises(Killed):
        train(LineExperiment(), config, seed=0, checkpoints=checkpoints, on_progress=kill)
    assert [json.loads(line)["epoch"] for line in (tmp_path / "log.jsonl").read_text().splitlines()] == [0]
    left = [tmp_path / ".log.csv.abc.part", checkpoints.folder / ".step-0000000005.safetensors.abc.part"]
    for path in left:
        path.touch()
    state = checkpoints.load()
    assert state is not None
    assert state["step"] == 4
    assert not any(path.exists() for path in left)


@pytest.mark.parametrize("rank", [0, 1])
def test_sums_of_other_processes_go_to_the_first_when_their_number_changes(rank):
    """Begun by three processes, on with two: what the three had added up counts once."""
    experiment, processes = LineExperiment(), Processes()
    at = Position(step=4, batch=1)
    at.sums |= {"nll": 2.0, "kl": 3.0, "labels": 11, "examples": 7}
    state = at.pack(experiment, processes, random_state(), {})
    other = {**state["processes"][0], "sums": {**at.sums, "nll": 5.0}}
    state["processes"] = [state["processes"][0], other, other]
    processes.world, processes.rank = 2, rank
    with pytest.warns(UserWarning, match="started with 3 processes and continues with 2"):
        found, generators = Position.unpack(state, experiment, processes, seed=0)
    assert generators is None
    assert (found.step, found.batch) == (4, 1)
    expected = {"nll": 12.0, "kl": 9.0} if rank == 0 else {"nll": 0.0, "kl": 0.0}
    assert {name: float(found.sums[name]) for name in expected} == expected
    # of all processes together already
    assert (found.sums["labels"], found.sums["examples"]) == (11, 7)


def test_a_setting_that_one_side_lacks_is_another_run(tmp_path):
    with pytest.raises(RunError, match=r"has another config: config\.limit is missing and was None"):
        check_identity(tmp_path, {"config": {"limit": None}}, {"config": {}})


def test_a_batch_has_one_label_per_example_unless_a_recipe_says_otherwise():
    assert Experiment().num_labels({"inputs": torch.zeros(5, 3), "weights": torch.zeros(7)}) == 5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"accumulation_steps": 0}, "accumulation_steps must be at least 1, got 0"),
        ({"checkpoint_steps": 0}, "checkpoint_steps must be at least 1, got 0"),
        ({"clip_norm": 0.0}, "clip_norm must be above 0, got 0.0"),
        ({"clip_norm": float("inf")}, "clip_norm must be a finite number, got inf"),
        ({"checkpoint_seconds": float("inf")}, "checkpoint_seconds must be a finite number, got inf"),
        ({"checkpoint_seconds": -1.0}, "checkpoint_seconds must be at least 0, got -1.0"),
        ({"patience": 0, "keep": "score"}, "patience must be at least 1, got 0"),
        ({"patience": 1}, "patience must be null with keep 'last', got 1"),
    ],
)
def test_settings_that_cannot_be_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        build_config(TrainingConfig, values)
    with pytest.raises(ValueError, match=next(iter(values))):
        TrainingConfig(**values)
