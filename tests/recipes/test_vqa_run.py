"""The VQA recipe from training to the table: it learns from the image, and every number adds up."""

import dataclasses
import json
from collections import Counter, defaultdict
from html import escape
from pathlib import Path

import pytest
import torch
from PIL import Image
from rich.console import Console

from bayesattn.cli import main
from bayesattn.cli.registry import Request
from bayesattn.evaluation.runs import SplitPredictions, read_predictions
from bayesattn.files import RunError
from bayesattn.metrics import evaluate_predictions, evaluate_table, pavpu
from bayesattn_recipes.vqa import data as data_module
from bayesattn_recipes.vqa import evaluate as evaluate_module
from bayesattn_recipes.vqa import reproduce as reproduce_module
from bayesattn_recipes.vqa.accuracy import soft_accuracy, soft_targets
from bayesattn_recipes.vqa.ask import ask
from bayesattn_recipes.vqa.data import DataConfig, load_splits
from bayesattn_recipes.vqa.evaluate import Condition, by_kind, draws, noisy_conditions, predict_run, tabulate, thin
from bayesattn_recipes.vqa.train import load_config, load_run, train_run
from helpers import STANDARD_ERRORS

TINY = [
    *("data.train_images=30", "training.epochs=1", "model.width=8", "model.num_heads=2", "model.feedforward_dim=8"),
    *("model.word_dim=4", "model.reduction_dim=5", "model.fused_dim=6", "attention.prior_hidden_dim=3"),
]
SHORT = ["data.train_images=800", "training.epochs=8"]


def call(*arguments):
    with pytest.raises(SystemExit) as exited:
        main([str(argument) for argument in arguments])
    return exited.value.code


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that has learnt something, evaluated."""
    folder = tmp_path_factory.mktemp("runs") / "wc"
    train_run(load_config("shapes-wc", SHORT), folder)
    assert call("evaluate", folder, "--samples", 3, "--noise", "0,2", "--resamples", 20) == 0
    return folder


@pytest.fixture(scope="module")
def splits():
    return load_splits(DataConfig(train_images=800), None)


@pytest.fixture
def small_world(monkeypatch):
    """Few test questions, for claims that need a run but no learning."""
    monkeypatch.setattr(data_module, "SHAPES_TEST_IMAGES", 11)
    data_module._shapes.cache_clear()
    yield
    data_module._shapes.cache_clear()


@pytest.fixture
def picture(splits, tmp_path):
    question = splits["test"].questions[0]
    path = tmp_path / "scene.png"
    Image.fromarray(splits["test"].pictures.read(question.image).numpy()).save(path)
    return path, question


def language_only_accuracy(splits) -> float:
    """The best a model can do that never looks: the most frequent answer to each wording of a question."""
    said = defaultdict(Counter)
    for question in splits["train"].questions:
        said[question.text].update(question.answers)
    best = {text: answers.most_common(1)[0][0] for text, answers in said.items()}
    scores = [soft_accuracy(q.answers.count(best.get(q.text, "no")), len(q.answers)) for q in splits["test"].questions]
    return sum(scores) / len(scores)


def test_model_learns_more_than_the_question_alone_can_tell(run, splits):
    metrics = json.loads((run / "metrics.json").read_text())["methods"]["mean"]["splits"]["test"]["metrics"]
    # accuracies lie in [0, 1]: the standard error of their mean is at most half of 1/√n
    margin = STANDARD_ERRORS * 0.5 / len(splits["test"]) ** 0.5
    assert metrics["accuracy"]["value"] > language_only_accuracy(splits) + margin


def test_evaluate_measures_noise_and_types_of_question_with_welchs_test(run):
    methods = json.loads((run / "metrics.json").read_text())["methods"]
    assert set(methods) == {"mean", "attention+dropout"}
    found = methods["attention+dropout"]["splits"]
    kinds = {"test: color", "test: number", "test: shape", "test: yes/no"}
    assert set(found) == {"validation", "test", "noise-2"} | kinds
    assert found["test"]["metrics"]["pavpu_05"]["test"] == "welch"
    assert {"pavpu_01", "pavpu_10", "nll", "ece"} <= set(found["test"]["metrics"])
    assert sum(found[kind]["num_examples"] for kind in kinds) == found["test"]["num_examples"]


def test_noise_on_the_features_at_test_lowers_the_accuracy(run):
    found = json.loads((run / "metrics.json").read_text())["methods"]["mean"]["splits"]
    assert found["noise-2"]["metrics"]["accuracy"]["value"] < found["test"]["metrics"]["accuracy"]["value"]


def test_stored_accuracy_is_min_of_a_third_of_the_annotators_and_one(run, splits):
    predictions = read_predictions(run)
    part = predictions.splits["test"]
    predicted = part.samples["mean"][0].argmax(dim=1)
    scores = [
        soft_accuracy(question.answers.count(predictions.class_names[int(index)]), 10)
        for question, index in zip(splits["test"].questions, predicted)
    ]
    metrics = json.loads((run / "metrics.json").read_text())["methods"]["mean"]["splits"]["test"]["metrics"]
    # targets are float32
    assert metrics["accuracy"]["value"] == pytest.approx(sum(scores) / len(scores), abs=1e-6)


def test_report_shows_questions_and_attention_over_their_pictures(run, tmp_path):
    assert call("report", run, "--out", tmp_path / "page.html") == 0
    page = (tmp_path / "page.html").read_text()
    texts = read_predictions(run).splits["test"].texts
    assert any(escape(text) in page for text in texts)
    assert escape("Welch's t-test", quote=False) in page.replace("&#39;", "'")
    assert "prior Ψ of example" in page


def test_ask_answers_and_draws_the_overlay(run, picture, tmp_path, capsys):
    path, question = picture
    assert call("ask", run, path, question.text, "--out", tmp_path / "over.png", "--samples", 4) == 0
    shown = capsys.readouterr().out
    answer = ask(run, path, question.text, num_samples=4)
    assert shown.startswith(f"{answer.text}  probability {answer.probability:.3f}  p-value {answer.p_value:.2g}")
    with Image.open(tmp_path / "over.png") as overlay:
        assert overlay.width > overlay.height
    assert set(answer.maps) == {"prior", "mean", "std"}


def test_ask_knows_the_answer_that_evaluate_gave(run, picture):
    path, question = picture
    predictions = read_predictions(run)
    expected = predictions.splits["test"].samples["attention+dropout"][:, 0].mean(dim=0)
    answer = ask(run, path, question.text, num_samples=200)
    # 3 draws against 200 of the same distribution; probabilities move by about 0.05 from draw to draw
    assert answer.probability == pytest.approx(float(expected[predictions.class_names.index(answer.text)]), abs=0.15)


def test_ask_takes_the_name_of_an_image_of_the_data_set(run, picture, splits):
    path, question = picture
    by_name = ask(run, Path(question.image), question.text, num_samples=2)
    by_file = ask(run, path, question.text, num_samples=2)
    assert torch.equal(by_name.image, splits["test"].pictures.read(question.image))
    assert (by_name.text, by_name.probability) == (by_file.text, by_file.probability)


def test_overlay_of_an_unknown_format_leaves_no_file(run, picture, tmp_path):
    assert call("ask", run, *picture[:1], "what?", "--out", tmp_path / "over.xyz", "--samples", 2) == 2
    assert not list(tmp_path.glob("over*"))


def test_ask_names_unknown_words(run, picture):
    assert ask(run, picture[0], "how many purple dragons are there?", num_samples=2).unknown == ["purple", "dragons"]


def test_mistakes_in_asking_are_one_line(run, picture, tmp_path, capsys):
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(b"\xff\xd8\xff no picture")
    for arguments, message in (
        ((tmp_path / "nowhere.jpg", "what?"), "cannot be read"),
        (("nowhere.jpg", "what?"), "image 'nowhere.jpg' is neither a file nor one of the data set's pictures"),
        ((broken, "what?"), "cannot be decoded"),
        ((picture[0], " "), "question must have at least one word, got none"),
        ((picture[0], "what?", "--features", broken), "leave out --features: a run on shapes"),
    ):
        assert call("ask", run, *arguments, "--out", tmp_path / "over.png") == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert not (tmp_path / "over.png").exists()


def test_features_command_says_what_it_lacks(tmp_path, capsys):
    Image.new("RGB", (5, 7)).save(tmp_path / "a.png")
    try:
        import timm  # noqa: F401
    except ModuleNotFoundError:
        assert call("features", tmp_path, "--out", tmp_path / "f.safetensors") == 2
        assert "needs the package 'timm'" in capsys.readouterr().err
    else:
        pytest.skip("timm is installed")


def test_table_of_a_stream_is_the_table_of_all_draws(run, splits, monkeypatch):
    monkeypatch.setattr(evaluate_module, "TABLE_BATCHES", 1)
    _, model = load_run(run)
    condition = Condition("test", thin(splits["test"], 150), variance=0.1)
    table = tabulate(model, condition, ["mean", "attention"], 3, seed=5)["attention"]
    samples = torch.cat([part["attention"] for part, _ in draws(model, condition, ["attention"], 3, seed=5)], dim=1)
    targets = soft_targets(condition.split.questions, model.vocabulary, "paper")
    whole = evaluate_predictions(samples, targets, task="multilabel", test="welch", num_resamples=0)
    stream = evaluate_table(table, num_resamples=0)
    assert {name: estimate.value for name, estimate in stream.items()} == pytest.approx(
        {name: estimate.value for name, estimate in whole.items()}
    )


def test_feature_noise_is_the_same_for_every_method(run, splits, monkeypatch):
    _, model = load_run(run)
    seen, add_noise = defaultdict(list), evaluate_module.add_noise

    def spy(values, variance, generator):
        noisy = add_noise(values, variance, generator)
        seen[method].append(noisy)
        return noisy

    monkeypatch.setattr(evaluate_module, "add_noise", spy)
    condition = Condition("noisy", thin(splits["test"], 140), variance=1.0)
    for method in ("mean", "attention"):
        list(draws(model, condition, [method], 2, seed=1))
    assert len(seen["mean"]) == 2
    assert all(torch.equal(first, second) for first, second in zip(seen["mean"], seen["attention"], strict=True))


def test_measures_take_the_accuracy_of_the_deterministic_answer(run, splits):
    _, model = load_run(run)
    condition = Condition("clean", thin(splits["test"], 130))
    measured = reproduce_module.measure(model, condition, "attention+dropout", num_samples=4)
    plain, drawn = tabulate(model, condition, ["mean", "attention+dropout"], 4, seed=0).values()
    assert measured["accuracy"] == float(plain.accuracy.mean())
    assert measured["pavpu_05"] == pytest.approx(float(pavpu(plain.accuracy, drawn.p_value)))
    assert measured["accuracy_leave_one_out"] <= measured["accuracy"]
    kinds = Counter(question.kind for question in condition.split.questions)
    by_type = sum(measured[f"accuracy {kind}"] * count for kind, count in kinds.items()) / 130
    assert by_type == pytest.approx(measured["accuracy"])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_measures_are_of_the_split_asked_for_in_the_precision_of_the_training(run, splits, monkeypatch, precision):
    config, _ = load_run(run)
    config = dataclasses.replace(config, training=dataclasses.replace(config.training, precision=precision))
    seen = []

    def measure(model, condition, method):
        seen.append((len(condition.split), condition.name, torch.is_autocast_enabled("cpu")))
        return {"accuracy": 0.5}

    monkeypatch.setattr(reproduce_module, "measure", measure)
    monkeypatch.setattr(evaluate_module, "choose_device", lambda: torch.device("cpu"))
    found = reproduce_module.measure_run(run, config, None, "validation")
    names = ["clean", "noise 0.5x", "noise 1x", "noise 2x"]
    assert seen == [(len(splits["validation"]), name, precision == "bf16") for name in names]
    assert found["noise 2x accuracy"] == 0.5


def test_noise_is_stated_in_deviations_of_the_features(splits):
    conditions = noisy_conditions(splits["test"], (0.0, 0.5, 2.0), "daquar")
    own = splits["test"].regions.variance
    assert [(c.name, c.variance) for c in conditions] == [
        ("noise-0.5", pytest.approx(0.25 * own)),
        ("noise-2", pytest.approx(4.0 * own)),
        ("noise-variance-5", 5.0),
    ]
    with pytest.raises(ValueError, match="strength must be a finite number of at least 0, got -1"):
        noisy_conditions(splits["test"], (-1.0,), "shapes")


def test_types_of_question_share_out_the_test_questions(splits):
    part = thin(splits["test"], 37)
    assert len(part) == 37
    whole = SplitPredictions({"mean": torch.rand(1, 37, 3)}, torch.rand(37, 3))
    assert sum(len(kind.labels) for kind in by_kind(part, whole).values()) == 37


def test_run_repeats_exactly_with_its_seed(small_world, tmp_path):
    for name in ("first", "second"):
        train_run(load_config("shapes-wc", TINY), tmp_path / name)
    first, second = (load_run(tmp_path / name)[1].state_dict() for name in ("first", "second"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_soft_runs_draw_dropout_and_refuse_attention(small_world, tmp_path):
    train_run(load_config("shapes-soft", [*TINY, "attention.prior_hidden_dim=10"]), tmp_path / "soft")
    predictions = predict_run(tmp_path / "soft", num_samples=2, noise=())
    assert predictions.methods == ["mean", "dropout"]
    with pytest.raises(ValueError, match=r"method must be one of mean, dropout.* for soft, got 'attention'"):
        predict_run(tmp_path / "soft", methods=["attention"])


def test_checkpoint_of_something_else_is_refused(small_world, tmp_path):
    from bayesattn.files import write_tensors

    train_run(load_config("shapes-soft", TINY), tmp_path / "soft")
    write_tensors(tmp_path / "soft" / "checkpoint.safetensors", {"weight": torch.zeros(3)})
    with pytest.raises(RunError, match="lacks"):
        load_run(tmp_path / "soft")


def test_reproduce_compares_seed_by_seed_and_repeats_nothing(small_world, tmp_path, monkeypatch):
    monkeypatch.setattr(reproduce_module, "NUM_SAMPLES", 2)
    console = Console(quiet=True)
    options = {"num_seeds": 2, "out": tmp_path, "console": console, "settings": TINY}
    request = Request(names=["shapes"], variants=["soft", "wc"], **options)
    table = reproduce_module.reproduce(request)
    text = table.read_text()
    assert "| wc − soft |" in text
    assert "Noise of 2 times the features' variance" in text
    assert (tmp_path / "vqa-shapes-noise.png").stat().st_size > 5000
    cell = json.loads((tmp_path / "cells" / "shapes-wc-1.json").read_text())
    assert cell["identity"]["config"]["seed"] == 1
    monkeypatch.setattr(reproduce_module, "train_run", None)  # a call would raise
    assert reproduce_module.reproduce(request).read_text() == text


def test_reproduce_refuses_what_it_does_not_know(tmp_path):
    with pytest.raises(ValueError, match="datasets must be among shapes, daquar, vqa2, got 'clevr'"):
        reproduce_module.reproduce(Request(names=["clevr"], out=tmp_path, console=Console(quiet=True)))
