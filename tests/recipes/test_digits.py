"""The digits recipe: honest data, one model for all variants, runs that repeat, and predictions that add up."""

import json

import pytest
import torch

import bayesattn as ba
from bayesattn_recipes.common.doubt import MOST_DOUBTFUL, with_noise
from bayesattn_recipes.digits import data
from bayesattn_recipes.digits.evaluate import attention_maps, available_methods, doubtful_examples, draw, predict_run
from bayesattn_recipes.digits.model import DigitClassifier
from bayesattn_recipes.digits.train import CONFIGS, fit, load_config, load_run, train_run

VARIANTS = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
TINY = ["training.epochs=2", "train_size=40", "training.batch_size=20", "width=8", "num_heads=2"]


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    train_run(load_config("wc", TINY), folder)
    return folder


def test_splits_share_no_image():
    splits = data.load_splits(200)
    rows = [tuple(image.flatten().tolist()) for split in splits.values() for image in split.images]
    assert len(rows) == 200 + data.VALIDATION_SIZE + data.TEST_SIZE
    assert len(set(rows)) == len(rows)


def test_splits_keep_the_share_of_every_class():
    for split in data.load_splits(200).values():
        share = torch.bincount(split.labels, minlength=10) / len(split.labels)
        # the whole set has shares of 9.7 to 10.2 %; stratified rounding moves each by less than one image of 200
        assert share.sub(0.1).abs().max() < 0.01


def test_training_pixels_are_standardised():
    images = data.load_splits(100)["train"].images
    # float32 mean of 6,400 pixels
    assert abs(float(images.mean())) < 1e-5
    assert abs(float(images.std(correction=0)) - 1.0) < 1e-5


@pytest.mark.parametrize("kind", data.SHIFTS)
def test_shift_changes_images_and_keeps_labels(kind):
    test = data.load_splits(200)["test"]
    shifted = data.shift(test, kind)
    assert torch.equal(shifted.labels, test.labels)
    assert shifted.images.shape == test.images.shape
    assert (shifted.images != test.images).flatten(1).any(dim=1).all()


def test_moved_image_is_the_image_one_pixel_down_and_right():
    test = data.load_splits(200)["test"]
    moved = data.shift(test, "moved").images
    assert torch.equal(moved[:, 1:, 1:], test.images[:, :-1, :-1])
    assert torch.equal(moved[:, 0], torch.full_like(moved[:, 0], float(test.images.min())))


def test_noise_has_the_strength_asked_for():
    test = data.load_splits(200)["test"]
    difference = data.add_noise(test, 0.5).images - test.images
    # 38,400 normal draws: the standard error of the deviation is 0.36 % of it; five of them
    assert abs(float(difference.std()) / 0.5 - 1.0) < 5 * 0.0036
    assert torch.equal(data.add_noise(test, 0.0).images, test.images)


def test_scrambled_images_keep_their_grey_values_and_lose_their_labels():
    test = data.load_splits(200)["test"]
    scrambled = data.scramble(test)
    assert scrambled.labels is None
    assert torch.equal(scrambled.images.flatten(1).sort().values, test.images.flatten(1).sort().values)
    assert (scrambled.images != test.images).flatten(1).any(dim=1).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: load_config("wc", ["train_size=7"]), "wc.yaml: train_size must be at least 20, got 7"),
        (lambda: load_config("wc", ["train_size=401"]), "wc.yaml: train_size must be at most 400, got 401"),
        (
            lambda: data.shift(data.load_splits(200)["test"], "up"),
            "kind must be one of 'rotated', 'moved', 'blurred', got 'up'",
        ),
        (
            lambda: data.add_noise(data.load_splits(200)["test"], -1.0),
            "strength must be a finite number of at least 0, got -1.0",
        ),
        (lambda: load_config("wc", ["training.epochs=0"]), "wc.yaml: training.epochs must be at least 1, got 0"),
        (lambda: load_config("wc", ["learning_rate=0"]), "wc.yaml: learning_rate must be above 0, got 0"),
    ],
)
def test_bad_values_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("name", VARIANTS)
def test_every_config_trains_and_its_loss_falls(name):
    model, log = fit(load_config(name, ["training.epochs=30", "train_size=100"]))
    assert log.rows[-1]["train_nll"] < 0.7 * log.rows[0]["train_nll"]
    assert model.last_attention.config.has_kl == (log.rows[-1]["train_kl"] != 0.0)


def test_variants_share_their_model_and_differ_by_the_prior():
    soft, bayesian = (dict(DigitClassifier(load_config(name)).named_parameters()) for name in ("soft", "wc"))
    assert [name for name in bayesian if "bayes_prior" not in name] == list(soft)
    assert len(bayesian) > len(soft)


def test_same_seed_repeats_a_run_and_another_does_not():
    logs = [fit(load_config("wc", [*TINY, f"seed={seed}"]))[1].rows for seed in (3, 3, 4)]
    assert logs[0] == logs[1]
    assert logs[0] != logs[2]


@pytest.mark.parametrize("epochs", [1, 9, 10, 11])
def test_any_number_of_steps_has_a_learning_rate(epochs):
    config = load_config("soft", [*TINY, "train_size=40", "training.batch_size=40", f"training.epochs={epochs}"])
    assert fit(config)[1].rows[-1]["step"] == epochs


def test_run_folder_gives_the_model_back(tiny_run):
    config, model = load_run(tiny_run)
    assert config == load_config("wc", TINY)
    again, log = fit(config)
    images = data.load_splits(40)["validation"].images
    assert torch.equal(model(images), again(images))
    assert [json.loads(line) for line in (tiny_run / "log.jsonl").read_text().splitlines()] == log.rows


def test_checkpoint_of_another_model_is_refused(tiny_run, tmp_path):
    train_run(load_config("wc", [*TINY, "width=4"]), tmp_path)
    (tmp_path / "checkpoint.safetensors").write_bytes((tiny_run / "checkpoint.safetensors").read_bytes())
    with pytest.raises(ValueError, match="does not fit the config of its run"):
        load_run(tmp_path)


def test_predictions_are_probabilities_with_the_methods_asked_for(tiny_run):
    seen = []
    found = predict_run(
        tiny_run,
        num_samples=3,
        noise=(0.0, 2.0),
        methods=["mean", "attention", "attention+dropout"],
        on_progress=lambda *progress: seen.append(progress),
    )
    assert list(found.splits) == ["validation", "test", "noise-2", "rotated", "moved", "blurred", "scrambled"]
    assert seen[-1] == (7, 7)
    for split in found.splits.values():
        assert {method: len(samples) for method, samples in split.samples.items()} == {
            "mean": 1,
            "attention": 3,
            "attention+dropout": 3,
        }
        for samples in split.samples.values():
            # float32 softmax over ten classes
            assert (samples.sum(dim=-1) - 1.0).abs().max() < 1e-6
    assert found.splits["scrambled"].labels is None


@pytest.mark.parametrize("name", ["soft", "wc"])
def test_most_doubtful_images_are_those_of_the_whole_split(name):
    torch.manual_seed(0)
    config = load_config(name, TINY)
    model, images = DigitClassifier(config).eval(), data.load_splits(40)["test"].images[:40]
    found = doubtful_examples(model, images)
    assert model.last_attention.config == config.attention
    with with_noise(model):
        whole = ba.uncertainty(model, images)
    order = whole.t.argsort()[:MOST_DOUBTFUL]
    assert torch.equal(found.examples, order)
    assert torch.allclose(found.std, whole.std[order], rtol=1e-4)
    assert torch.allclose(found.by_token, whole.by_token[order], rtol=1e-3, atol=1e-7)


def test_weights_of_a_rival_have_no_closed_form(tmp_path):
    train_run(load_config("soft", [*TINY, "attention.variant=hard-gumbel"]), tmp_path / "run")
    found = predict_run(tmp_path / "run", num_samples=2, noise=(0.0,), methods=["mean"])
    assert found.splits["test"].doubtful is None


def test_draws_differ_and_repeat_with_their_seed(tiny_run):
    _, model = load_run(tiny_run)
    images = data.load_splits(40)["validation"].images[:7]
    first, again, other = (draw(model, images, "attention", 4, seed) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first[0], first[1])


def test_mc_dropout_draws_from_a_soft_model():
    config = load_config("soft", TINY)
    model = DigitClassifier(config).eval()
    images = data.load_splits(40)["validation"].images[:7]
    draws = draw(model, images, "dropout", 4, seed=0)
    assert not torch.equal(draws[0], draws[1])
    assert available_methods(config) == ["mean", "dropout"]
    assert available_methods(load_config("soft", ["dropout=0"])) == ["mean"]


def test_attention_maps_are_the_weights_of_the_last_layer(tiny_run):
    _, model = load_run(tiny_run)
    split = data.load_splits(40)["validation"]
    maps = attention_maps(model, split, num_samples=5, seed=0)
    assert set(maps) == {"mean", "std", "prior"}
    assert all(value.shape == (data.VALIDATION_SIZE, 2, 17) for value in maps.values())
    # float32 sums of 17 weights
    assert (maps["mean"].sum(dim=-1) - 1.0).abs().max() < 1e-5
    assert (maps["prior"].sum(dim=-1) - 1.0).abs().max() < 1e-5
    assert (maps["std"] > 0).all()
    # no hook is left behind
    assert not model.last_attention._forward_hooks
    assert not model.last_attention._forward_pre_hooks


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ["dropout"]}, "method must be one of mean, attention, attention\\+dropout.* for BAM-WC, got 'dropout'"),
        ({"num_samples": 1}, "num_samples must be an integer of at least 2, got 1"),
    ],
)
def test_impossible_predictions_are_refused(tiny_run, options, message):
    with pytest.raises(ValueError, match=message):
        predict_run(tiny_run, **{"num_samples": 2, "noise": (0.0,), **options})
