"""A number that is not finite stops a run with its place named, or is skipped and counted; a collapse is announced."""

import json
import math

import pytest
import torch
from loop_experiment import TinyConfig, TinyExperiment, training

import bayesattn as ba
from bayesattn import functional
from bayesattn.entropy import observe_entropy
from bayesattn.files import read_tensors
from bayesattn_recipes.common import runs
from bayesattn_recipes.common.checkpoints import Checkpoints
from bayesattn_recipes.common.config import seed_everything
from bayesattn_recipes.common.guards import Diverged, detect_collapse
from bayesattn_recipes.common.loop import train

BAD_STEP = 6


class Poisoned(TinyExperiment):
    """Goes wrong at one step, in a way to choose."""

    def __init__(self, config, how):
        super().__init__(config)
        self.how = how

    def collate(self, indices):
        batch = super().collate(indices)
        if self.batches_seen == BAD_STEP + 1:
            self.is_bad = True
            if self.how == "input":
                batch["inputs"][0, 0, 0] = math.nan
        else:
            self.is_bad = False
        return batch

    def nll(self, model, batch):
        if self.is_bad and self.how == "layer":
            layer = self.model.layers[1]
            layer.forward = lambda x, *args, **options: (x * math.inf, None)
            try:
                return super().nll(model, batch)
            finally:
                del layer.forward
        nll = super().nll(model, batch)
        if self.is_bad and self.how == "loss":
            nll = nll + math.inf
        if self.is_bad and self.how == "gradient":
            # the value 0, the slope of the square root at 0 is infinite
            nll = nll + torch.sqrt(self.model.head.bias[0] - self.model.head.bias[0].detach())
        return nll


def run(folder, how, *, resume=False, **changes):
    config = TinyConfig(training(checkpoint_seconds=None, **changes))
    return runs.train_run("tiny", config, lambda: Poisoned(config, how), folder, resume=resume)


@pytest.mark.parametrize(
    ("how", "place"),
    [
        ("input", "input 'inputs' of the batch"),
        ("layer", r"output of layer layers.1 \(MultiheadAttention\)"),
        ("loss", "the loss alone; the loss is inf"),
        ("gradient", "gradient of head.bias"),
    ],
)
def test_a_number_that_is_not_finite_stops_the_run_with_its_place_named(tmp_path, how, place):
    with pytest.raises(Diverged, match=rf"not finite at step 6 \(epoch 1, batch 2, examples \[.*\]\): .*({place})"):
        run(tmp_path, how)
    failure = json.loads((tmp_path / "failure.json").read_text())
    assert (failure["step"], failure["epoch"], failure["batch"], len(failure["examples"])) == (6, 1, 2, 7)
    assert not (tmp_path / "run.json").exists()


def test_the_state_before_the_bad_step_is_kept_and_goes_on_exactly(tmp_path):
    with pytest.raises(Diverged):
        run(tmp_path / "bad", "input")
    assert [path.name for path in Checkpoints(tmp_path / "bad", {}).paths()] == ["step-0000000006.safetensors"]
    # the same run, but nothing goes wrong in it
    run(tmp_path / "bad", "nothing", resume=True)
    run(tmp_path / "good", "nothing")
    assert (tmp_path / "bad" / "log.jsonl").read_text() == (tmp_path / "good" / "log.jsonl").read_text()
    (bad, _), (good, _) = (read_tensors(tmp_path / name / "checkpoint.safetensors") for name in ("bad", "good"))
    assert all(torch.equal(bad[name], good[name]) for name in good)


@pytest.mark.parametrize("how", ["input", "loss", "gradient"])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_skipping_leaves_the_step_out_and_counts_it(tmp_path, how, clip_norm):
    log = run(tmp_path, how, on_nonfinite="skip", clip_norm=clip_norm)
    assert [row["skipped_steps"] for row in log.rows] == [0, 1, 1]
    tensors, _ = read_tensors(tmp_path / "checkpoint.safetensors")
    assert all(bool(torch.isfinite(value).all()) for value in tensors.values())
    assert all(math.isfinite(value) for row in log.rows for value in row.values())


def test_a_stopped_run_may_go_on_with_skipping(tmp_path):
    with pytest.raises(Diverged):
        run(tmp_path, "loss")
    log = run(tmp_path, "loss", on_nonfinite="skip", resume=True)
    assert log.rows[-1]["skipped_steps"] == 1


def test_an_epoch_of_nothing_but_skipped_steps_is_an_error():
    config = TinyConfig(training(on_nonfinite="skip"))
    seed_everything(0)
    experiment = TinyExperiment(config)
    experiment.inputs[:] = math.nan
    with pytest.raises(Diverged, match="every step of epoch 0 was skipped"):
        train(experiment, config.training, seed=0)


def test_a_validation_measure_that_is_not_finite_stops_the_run(tmp_path):
    class Spoilt(TinyExperiment):
        def validate(self, model):
            return {"validation_nll": math.nan}

    config = TinyConfig(training())
    with pytest.raises(Diverged, match=r"validation_nll is nan after step 4 \(epoch 0\)"):
        runs.train_run("tiny", config, lambda: Spoilt(config), tmp_path)
    assert not (tmp_path / "run.json").exists()


def test_a_metric_to_keep_that_is_not_measured_is_refused(tmp_path):
    config = TinyConfig(training(keep="validation_f2"))
    with pytest.raises(
        ValueError, match=r"training\.keep must be one of 'last', .*'validation_nll', .*, got 'validation_f2'"
    ):
        runs.train_run("tiny", config, lambda: TinyExperiment(config), tmp_path)
    assert not (tmp_path / "run.json").exists()


def rows(**columns):
    return [dict(zip(columns, values)) for values in zip(*columns.values())]


@pytest.mark.parametrize(
    ("log", "found"),
    [
        (rows(train_kl=[3.0, 2.0, 1e-3]), ["train_kl"]),
        (rows(train_kl=[3.0, 2.0, 4e-3]), []),
        (rows(train_kl=[0.0, 0.0, 0.0]), []),
        (rows(train_kl=[1e-9]), []),
        (rows(train_kl=[3.0, 3.0], attention_entropy=[0.9, 0.009]), ["attention_entropy"]),
        (rows(train_kl=[3.0, 3.0], attention_entropy=[0.9, 0.02]), []),
        # attention that was sharp from the beginning has not collapsed
        (rows(train_kl=[3.0, 3.0], attention_entropy=[0.009, 0.009]), []),
    ],
)
def test_a_collapse_is_found_in_the_log(log, found):
    assert list(detect_collapse(log)) == found


def test_a_collapse_is_announced_once():
    """The scores grow without bound where the projections do."""

    class Sharpening(TinyExperiment):
        def validate(self, model):
            for layer in self.model.layers:
                layer.in_proj_weight.mul_(30.0)
            return {"validation_nll": 0.0}

    config = TinyConfig(training(epochs=5, keep="last"))
    seed_everything(0)
    experiment = Sharpening(config)
    for group in experiment.optimizer.param_groups:
        group["lr"] = 0.0
    with pytest.warns(UserWarning, match="the attention entropy has collapsed") as caught:
        log = train(experiment, config.training, seed=0)
    assert len([warning for warning in caught if "entropy" in str(warning.message)]) == 1
    assert log.rows[0]["attention_entropy"] > 0.5 > log.rows[-1]["attention_entropy"]


def test_entropy_of_uniform_attention_is_one_and_of_one_key_zero():
    config, value = ba.AttentionConfig("BAM-NOKL"), torch.randn(3, 2, 5, 4)
    uniform, sharp = torch.zeros(3, 2, 5, 4), 100.0 * torch.eye(5, 4).expand(3, 2, 5, 4)
    shares = []
    for query, key in ((uniform, uniform), (sharp[:, :, :4], sharp[:, :, :4])):
        with observe_entropy() as scope:
            functional.attention(query, key, value[:, :, : key.shape[2]], config=config)
        assert scope.count == 3
        shares.append(float(scope.total) / scope.count)
    assert shares[0] == pytest.approx(1.0, abs=1e-6)
    assert shares[1] == pytest.approx(0.0, abs=1e-6)


def test_entropy_counts_allowed_keys_only_and_is_the_same_by_weights_and_by_outputs():
    config = ba.AttentionConfig("BAM-NOKL")
    query, key = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4)
    mask = torch.zeros(2, 1, 5, 7, dtype=torch.bool)
    mask[..., :3] = True
    mask[0, :, 0] = False
    mask[0, :, 1, 1:] = False
    with observe_entropy() as by_output:
        functional.attention(query, key, key, config=config, mask=mask)
    with observe_entropy() as by_weights:
        functional.attention_weights(query @ key.transpose(-2, -1) / 2.0, config=config, mask=mask)
    weights = torch.softmax((query @ key[:, :, :3].transpose(-2, -1)) / 2.0, dim=-1)
    share = -(weights * weights.log()).sum(dim=-1) / math.log(3)
    # of the first example the rows without a choice are left out
    expected = float(share[0, :, 2:].mean() + share[1].mean())
    assert float(by_output.total) == pytest.approx(expected, rel=1e-5)
    assert float(by_weights.total) == pytest.approx(expected, rel=1e-5)
