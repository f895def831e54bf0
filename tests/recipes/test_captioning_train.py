"""Captioning from data to run folder and back: it learns, every variant trains, runs repeat, images are explained."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import save_file

from bayesattn import record_kl
from bayesattn.cli import main
from bayesattn.cli.registry import Request
from bayesattn.evaluation.report import measure_run, write_report
from bayesattn.evaluation.runs import write_predictions
from bayesattn.files import RunError
from bayesattn_recipes.captioning import evaluate as captioning_evaluate
from bayesattn_recipes.captioning import explain as explain_module
from bayesattn_recipes.captioning import reproduce as captioning_reproduce
from bayesattn_recipes.captioning.data import SHAPES_SEED, generate_shapes
from bayesattn_recipes.captioning.evaluate import predict_run
from bayesattn_recipes.captioning.explain import Subject, explain, find_subject, plot_explanation, prior_weights
from bayesattn_recipes.captioning.reproduce import PAPER, VARIANTS, reproduce
from bayesattn_recipes.captioning.scoring import bleu
from bayesattn_recipes.captioning.train import (
    CONFIGS,
    CaptioningExperiment,
    caption_split,
    fit,
    load_config,
    load_run,
    search_options,
    train_run,
)
from bayesattn_recipes.captioning.vocabulary import tokenize
from bayesattn_recipes.vision.features import write_regions

TINY = ["width=12", "attention_dim=5", "training.epochs=1", "training.batch_size=10", "num_beams=1", "max_length=12"]
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))


@pytest.fixture(scope="module")
def data():
    return generate_shapes((20, 7, 5), seed=1)


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    train_run(load_config("shapes-wc", TINY), folder, data=data)
    return folder


@pytest.fixture
def call(capsys):
    def call(*arguments):
        with pytest.raises(SystemExit) as exited:
            main([str(argument) for argument in arguments])
        return exited.value.code, capsys.readouterr()

    return call


def best_constant_bleu(references: list[list[str]]) -> float:
    """BLEU-4 of the one caption that fits all images best, chosen on the very images it is scored on."""

    def four_grams(text: str) -> set[tuple[str, ...]]:
        words = tokenize(text)
        return set(zip(words, words[1:], words[2:], words[3:]))

    of_image = [set.union(*map(four_grams, found)) for found in references]
    shared = {text: sum(len(four_grams(text) & found) for found in of_image) for texts in references for text in texts}
    # those with the most four-grams in common with all images; each is then scored in full
    candidates = sorted(shared, key=lambda text: -shared[text])[:10]
    return max(bleu([text] * len(references), references) for text in candidates)


def test_shapes_are_described_better_than_by_the_best_constant_caption():
    data = generate_shapes((500, 1, 100), SHAPES_SEED)
    config = load_config("shapes-wc", ["training.epochs=8"])
    model, _ = fit(config, data)
    split = data.splits["test"]
    captions = caption_split(model, data, split, **search_options(config))
    assert bleu(captions, split.captions) > best_constant_bleu(split.captions)


# Flickr8k's variants differ from the shapes' by numbers only, COCO's by the preset
@pytest.mark.parametrize(
    "name", [f"shapes-{variant}" for variant in VARIANTS] + ["coco-lf", "coco-lc", "coco-wf", "coco-wc"]
)
def test_every_variant_takes_ten_finite_steps(name, data):
    # the generated images stand in for those of the other data sets
    config = load_config(name, [*TINY, "min_count=1", "training.keep=last", "training.patience=null"])
    model, log = fit(config, data)
    assert log.rows[-1]["step"] == 10
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert 0.0 < log.rows[-1]["train_nll"] < 10.0
    assert (log.rows[-1]["train_kl"] != 0.0) == config.attention.has_kl


@pytest.mark.parametrize("variant", ["soft", "hard-reinforce", "gaussian-context", "BAM-WC"])
def test_one_step_moves_every_parameter(variant, data):
    experiment = CaptioningExperiment(load_config("shapes-wc", [*TINY, f"attention.variant={variant}"]), data)
    batch = experiment.collate(torch.arange(20))
    with record_kl() as kl:
        loss = experiment.nll(experiment.model.train(), batch)
    (loss + kl.total()).backward()
    still = [name for name, parameter in experiment.model.named_parameters() if not parameter.grad.any()]
    # the prior's output bias cancels in its softmax
    assert still in ([], ["attention.weights.bayes_prior.bias_out"])


def test_gradient_entries_are_clipped_before_the_step(data):
    experiment = CaptioningExperiment(load_config("shapes-soft", [*TINY, "clip_value=1e-3"]), data)
    experiment.nll(experiment.model, experiment.collate(torch.arange(20))).backward()
    assert max(float(parameter.grad.abs().max()) for parameter in experiment.model.parameters()) > 1e-3
    experiment.optimizer.step()
    # 0.001 is not a float32
    assert max(float(parameter.grad.abs().max()) for parameter in experiment.model.parameters()) == pytest.approx(1e-3)


def test_epoch_holds_every_caption_once_and_images_whole(data):
    config = load_config("shapes-soft", TINY)
    experiment = CaptioningExperiment(config, data)
    batches = experiment.batches(config.training, torch.Generator().manual_seed(0))
    assert sorted(torch.cat(list(batches)).tolist()) == list(range(100))
    assert all(len(experiment.train.images[batch].unique()) == 2 for batch in batches)


def test_learning_rate_falls_after_the_epochs_asked_for(data):
    settings = ["training.epochs=4", "decay_epochs=2", "learning_rate_decay=0.5", "clip_value=null"]
    config = load_config("shapes-soft", [*TINY, *settings])
    experiment = CaptioningExperiment(config, data)
    rates = []
    for _ in range(40):
        rates.append(experiment.optimizer.param_groups[0]["lr"])
        experiment.optimizer.step()
        experiment.scheduler.step()
    assert rates == [config.learning_rate] * 20 + [config.learning_rate / 2] * 20


def test_same_seed_repeats_a_run_and_another_does_not(data):
    logs = [fit(load_config("shapes-wc", [*TINY, f"seed={seed}"]), data)[1].rows for seed in (3, 3, 4)]
    assert logs[0] == logs[1]
    assert logs[0] != logs[2]


def test_run_folder_speaks_without_its_data(run, data):
    config, model = load_run(run)
    assert config == load_config("shapes-wc", TINY)
    again, log = fit(config, data)
    assert model.vocabulary == again.vocabulary
    split = data.splits["test"]
    assert caption_split(model, data, split) == caption_split(again, data, split)
    assert [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()] == log.rows
    assert log.rows[0]["skipped_captions"] == 0


def test_checkpoint_of_something_else_is_refused(run, tmp_path):
    for name in ("run.json", "log.jsonl"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    save_file({"weight": torch.zeros(2)}, tmp_path / "checkpoint.safetensors")
    with pytest.raises(ValueError, match="does not belong to a captioning model"):
        load_run(tmp_path)


def test_explanation_follows_the_words(run, data):
    _, model = load_run(run)
    regions, _ = data.regions.gather(torch.tensor([2]))
    words = torch.tensor([3, 2, 5, 0, 0])
    found = explain(model, regions[0], words, num_samples=6)
    assert found.words == [*model.vocabulary.decode(words), "<end>"]
    assert found.drawn == "attention"
    assert {name: len(values) for name, values in found.maps.items()} == {"mean": 4, "std": 4, "prior": 1}
    for name in ("mean", "prior"):
        # float32 sums of 16 weights
        assert (found.maps[name].sum(dim=1) - 1.0).abs().max() < 1e-5
    assert (found.maps["std"] > 0).all()
    assert ((found.p_value >= 0) & (found.p_value <= 1)).all()
    again = explain(model, regions[0], words, num_samples=6)
    assert torch.equal(found.probability, again.probability)
    torch.testing.assert_close(prior_weights(model, regions), found.maps["prior"])


def test_soft_model_is_explained_by_dropout_and_one_without_by_its_mean(data):
    regions, _ = data.regions.gather(torch.tensor([2]))
    drawn = {}
    for dropout in (0.1, 0.0):
        model = CaptioningExperiment(load_config("shapes-soft", [*TINY, f"dropout={dropout}"]), data).model.eval()
        found = explain(model, regions[0], torch.tensor([3, 0]), num_samples=2)
        drawn[dropout] = (found.drawn, found.p_value is None, set(found.maps))
    assert drawn == {0.1: ("dropout", False, {"mean", "std"}), 0.0: (None, True, {"mean"})}


def test_words_are_predicted_and_attention_kept(run, data):
    found = predict_run(run, num_samples=3, noise=(0.0, 2.0), data=data)
    assert list(found.splits) == ["validation", "test", "noise-2"]
    assert found.methods == ["mean", "attention"]
    test = found.splits["test"]
    count = sum(len(captions[0].replace(",", "").split()[:12]) + 1 for captions in data.splits["test"].captions)
    assert test.samples["attention"].shape == (3, count, len(found.class_names))
    # float32 softmax over some thirty words
    assert (test.samples["attention"].sum(dim=-1) - 1.0).abs().max() < 1e-5
    assert {name: value.shape for name, value in test.attention.items()} == dict.fromkeys(
        ("mean", "std", "prior"), (count, 1, 16)
    )
    assert test.inputs is not None
    assert test.inputs.shape == (count, 64, 64, 3)
    assert test.texts is not None
    assert test.texts[:2] == ["…", f"{data.splits['test'].captions[0][0].split()[0]} …"]
    first = " ".join(found.class_names[label] for label in test.labels[: int((test.labels == 0).nonzero()[0])])
    assert first == data.splits["test"].captions[0][0].replace(" ,", "")
    assert not torch.equal(test.samples["mean"], found.splits["noise-2"].samples["mean"])


def test_report_shows_words_pictures_and_what_was_said_before(run, data, tmp_path):
    write_predictions(run, predict_run(run, num_samples=3, noise=(), data=data))
    measured = measure_run(run, num_resamples=0)
    assert {"nll", "ece", "pavpu_05"} <= set(measured["methods"]["attention"]["splits"]["test"]["metrics"])
    text = write_report([run], tmp_path / "page.html").read_text()
    assert "&lt;end&gt;" in text
    assert "…" in text
    assert "data:image/png;base64" in text


def test_bfloat16_trains(data):
    _, log = fit(load_config("shapes-wc", [*TINY, "training.precision=bf16"]), data)
    _, exact = fit(load_config("shapes-wc", TINY), data)
    # ten steps from the same start; bfloat16 has three digits
    assert log.rows[-1]["train_nll"] == pytest.approx(exact.rows[-1]["train_nll"], rel=0.03)


def test_predictions_stay_within_their_budget(run, data, monkeypatch):
    _, model = load_run(run)
    monkeypatch.setattr(captioning_evaluate, "MAX_VALUES", 3 * len(model.vocabulary) * 20)
    found = predict_run(run, num_samples=3, noise=(), data=data)
    assert 0 < found.splits["test"].samples["mean"].shape[1] <= 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ["dropout"]}, "method must be one of mean, attention.* for BAM-WC, got 'dropout'"),
        ({"num_samples": 1}, "num_samples must be an integer of at least 2, got 1"),
        ({"noise": (-1.0,)}, "noise must be finite numbers of at least 0, got"),
    ],
)
def test_impossible_predictions_are_refused(run, data, options, message):
    with pytest.raises(ValueError, match=message):
        predict_run(run, **{"num_samples": 2, "noise": (), "data": data, **options})


def test_caption_prints_words_and_writes_the_overlay(run, data, call, tmp_path):
    Image.fromarray(data.picture(data.splits["test"].names[0]).numpy()).save(tmp_path / "mine.png")
    out = tmp_path / "overlay.png"
    code, streams = call("caption", run, tmp_path / "mine.png", "--out", out, "--samples", 3)
    assert code == 0, streams.err
    assert "p-value" in streams.out
    assert "<end>" in streams.out or len(streams.out.splitlines()) > 12
    with Image.open(out) as picture:
        assert picture.width > 500


def test_regions_without_places_are_described_without_an_overlay(run, data, call, tmp_path, monkeypatch):
    name = data.splits["test"].names[0]
    values, _ = data.regions.gather(data.splits["test"].rows[:1])
    monkeypatch.setattr(explain_module, "find_subject", lambda *_: Subject(data.picture(name), values[0], None))
    code, streams = call("caption", run, name, "--out", tmp_path / "overlay.png", "--samples", 2)
    assert code == 0, streams.err
    assert "no overlay: the features have no places of their regions" in streams.out
    assert not (tmp_path / "overlay.png").exists()


def test_mistakes_of_caption_are_one_line(run, call, tmp_path):
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 not a whole JPEG")
    for image, message in (
        (tmp_path / "broken.jpg", "cannot be decoded"),
        ("absent.jpg", "image 'absent.jpg' is neither a file nor"),
    ):
        code, streams = call("caption", run, image, "--out", tmp_path / "out.png")
        assert (code, streams.err.count("\n")) == (2, 1)
        assert message in streams.err
        assert not (tmp_path / "out.png").exists()


def test_photo_without_features_is_refused(data):
    config = dataclasses.replace(load_config("shapes-wc", TINY), dataset="flickr8k")
    with pytest.raises(ValueError, match=r"image 'mine.jpg' has no features here"):
        find_subject(config, "mine.jpg", data)
    found = find_subject(config, data.splits["test"].names[3], data)
    with pytest.raises(ValueError, match="leave out --features: a run on shapes"):
        find_subject(load_config("shapes-wc"), "mine.jpg", features=Path("mine.safetensors"))
    assert torch.equal(found.regions, data.regions.gather(data.splits["test"].rows[[3]])[0][0])


def test_own_photo_is_described_from_its_feature_file(run, data, tmp_path):
    name = data.splits["test"].names[0]
    Image.fromarray(data.picture(name).numpy()).save(tmp_path / "mine.png")
    values, _ = data.regions.gather(data.splits["test"].rows[:1])
    write_regions(tmp_path / "mine.safetensors", ["mine.png"], values, (4, 4))
    config = dataclasses.replace(load_config("shapes-wc", TINY), dataset="flickr8k")
    found = find_subject(config, str(tmp_path / "mine.png"), features=tmp_path / "mine.safetensors")
    # kept in half precision
    torch.testing.assert_close(found.regions, values[0], atol=1e-3, rtol=1e-3)
    assert found.grid == (4, 4)


def test_figure_has_a_column_for_every_word(run, data):
    config, model = load_run(run)
    subject = find_subject(dataclasses.replace(config, dataset="flickr8k"), data.splits["test"].names[0], data)
    found = explain(model, subject.regions, torch.tensor([3, 2, 5, 0]), num_samples=2)
    titles = [ax.get_title() for ax in plot_explanation(subject, found).axes]
    assert all(any(title.startswith(word) for title in titles) for word in found.words)
    assert "prior Ψ" in titles


def test_reproduce_writes_tables_and_does_not_repeat_finished_runs(data, tmp_path, monkeypatch):
    monkeypatch.setattr(captioning_reproduce, "load_data", lambda name, folder: data)
    score = captioning_reproduce.score
    monkeypatch.setattr(captioning_reproduce, "score", lambda *found: score(*found, use_java=False))
    options = {"num_seeds": 2, "data": None, "out": tmp_path, "console": Console(quiet=True)}
    options["settings"] = [*TINY, "num_beams=3"]
    table = reproduce(Request(names=["shapes"], variants=["soft", "wc"], **options))
    text = table.read_text()
    assert all(part in text for part in ("| soft |", "| BAM-WC |", "plain tokenizer", "105.0", "Difference to soft"))
    assert all(f"## shapes, {search}, ours" in text for search in ("greedy search", "3 beams"))
    # a row for every variant, seed and search
    assert len((tmp_path / "captioning.csv").read_text().splitlines()) == 1 + 2 * 2 * 2
    monkeypatch.setattr(captioning_reproduce, "train_run", None)
    monkeypatch.setattr(captioning_reproduce, "score", None)
    assert reproduce(Request(names=["shapes"], variants=["soft", "wc"], **options)).read_text() == text


def test_table_without_time_for_a_run_is_of_what_is_finished(data, tmp_path, monkeypatch):
    monkeypatch.setattr(captioning_reproduce, "load_data", lambda name, folder: data)
    score = captioning_reproduce.score
    monkeypatch.setattr(captioning_reproduce, "score", lambda *found: score(*found, use_java=False))
    options = {"data": None, "out": tmp_path, "console": Console(quiet=True), "settings": TINY}
    with pytest.raises(RunError, match="no run on shapes has finished"):
        reproduce(Request(names=["shapes"], variants=["soft"], num_seeds=1, minutes=0.0, **options))
    reproduce(Request(names=["shapes"], variants=["soft"], num_seeds=1, **options))
    request = Request(names=["shapes"], variants=["soft", "wc"], num_seeds=3, minutes=0.0, **options)
    text = reproduce(request).read_text()
    ours = text.partition("the paper's")[0]
    assert "| soft | 1 |" in ours
    assert "BAM-WC" not in ours


@pytest.mark.parametrize(
    ("names", "variants", "message"),
    [
        (["cats"], None, "datasets must be among shapes, flickr8k, coco, got 'cats'"),
        (["shapes"], ["loud"], "variants must be among soft, .*, got 'loud'"),
    ],
)
def test_unknown_rows_of_the_table_are_refused(names, variants, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        reproduce(Request(names=names, variants=variants, out=tmp_path, console=Console(quiet=True)))


def test_every_row_of_the_table_has_its_configs():
    datasets = ("shapes", "flickr8k", "coco")
    assert set(NAMES) <= {f"{dataset}-{variant}" for dataset in datasets for variant in VARIANTS}
    # the generated pictures have all; real ones at least the rows of the paper
    assert {f"shapes-{variant}" for variant in VARIANTS} <= set(NAMES)
    assert {f"{dataset}-{variant}" for dataset in datasets for variant in PAPER} <= set(NAMES)
    assert all(load_config(name).dataset == name.partition("-")[0] for name in NAMES)
    assert set(PAPER) <= set(VARIANTS)
