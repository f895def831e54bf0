"""The translation recipe as a whole: it learns, its runs repeat, its command line says what is wrong with its input."""

import dataclasses
import io
import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from translation_data import generated_splits

from bayesattn.cli import main
from bayesattn.cli.registry import Request
from bayesattn_recipes.baselines import RIVALS
from bayesattn_recipes.bench import translation as cost
from bayesattn_recipes.common.config import seed_everything
from bayesattn_recipes.common.guards import Diverged
from bayesattn_recipes.common.loop import TrainingConfig, train
from bayesattn_recipes.translation import bleu, figures, measure, reproduce
from bayesattn_recipes.translation.commands import colored
from bayesattn_recipes.translation.config import TranslationConfig
from bayesattn_recipes.translation.data import load_splits
from bayesattn_recipes.translation.draws import available_methods, disagreement
from bayesattn_recipes.translation.model import Translator
from bayesattn_recipes.translation.text import Pairs
from bayesattn_recipes.translation.train import (
    CONFIGS,
    TranslationExperiment,
    load_config,
    load_run,
    train_run,
)
from bayesattn_recipes.translation.translate import translate
from data import shared_data

FOLDER = shared_data()
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
TINY = [
    "vocabulary_size=120",
    "embedding_dim=8",
    "encoder_dim=8",
    "decoder_dim=12",
    "attention_dim=8",
    "num_layers=1",
    "dropout=0.1",
    "attention.inference_dim=8",
    "batch_tokens=100",
    "learning_rate=0.01",
]


def fit(config, splits):
    seed_everything(config.seed)
    experiment = TranslationExperiment(config, splits)
    return experiment, train(experiment, config.training, seed=config.seed)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    train_run(load_config("multi30k-wc", [*TINY, "training.epochs=2"]), folder, data=generated_splits())
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_every_config_is_valid_and_names_its_own_command(name):
    config = load_config(name)
    assert name.startswith(config.dataset)
    assert f"--config {name} " in (CONFIGS / f"{name}.yaml").read_text()


def test_configs_cover_every_variant():
    variants = {load_config(name).attention.variant for name in NAMES}
    assert variants == {"soft", "BAM-NOKL", "BAM-LF", "BAM-LC", "BAM-WF", "BAM-WC", *RIVALS}


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("multi30k") and "gaussian-weights" not in name])
def test_every_variant_takes_twenty_steps_without_nan(name):
    config = load_config(name, [*TINY, "training.epochs=2"])
    experiment, log = fit(config, generated_splits(300))
    assert log.rows[-1]["step"] >= 20
    assert all(torch.isfinite(parameter).all() for parameter in experiment.model.parameters())
    # a model that knows nothing has the logarithm of the number of tokens
    assert log.rows[-1]["validation_nll"] < math.log(len(experiment.vocabulary))


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["uniform", "mc-dropout", "gumbel", "soft"])
def test_recorded_loop_trains_through_epochs_that_observe_entropy(variant):
    # the first batch of every epoch observes the entropy, the others replay what was recorded
    config = load_config(f"multi30k-{variant}", [*TINY, "training.epochs=3", "decoder_mode=cuda-graph"])
    experiment, log = fit(config, generated_splits(300))
    assert next(experiment.model.parameters()).is_cuda
    assert len(log.rows) == 3
    assert all(torch.isfinite(parameter).all() for parameter in experiment.model.parameters())
    assert log.rows[-1]["validation_nll"] < math.log(len(experiment.vocabulary))


@pytest.mark.parametrize("variant", ["soft", "wc"])
def test_loss_falls_on_the_generated_language(variant):
    config = load_config(f"multi30k-{variant}", [*TINY, "training.epochs=4", "learning_rate=0.02", "dropout=0"])
    _, log = fit(config, generated_splits(300))
    losses = [row["train_nll"] for row in log.rows]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.slow
@pytest.mark.skipif(FOLDER is None or not (FOLDER / "multi30k").is_dir(), reason="no Multi30k at hand")
def test_slice_of_multi30k_trains_and_its_loss_falls():
    splits = load_splits("multi30k", FOLDER)
    validation = Pairs(*(side[:100] for side in splits["validation"]))
    settings = ["train_size=1000", "vocabulary_size=800", "embedding_dim=48", "encoder_dim=48", "decoder_dim=64"]
    settings += ["attention_dim=48", "num_layers=1", "batch_tokens=800", "learning_rate=0.01", "training.epochs=3"]
    _, log = fit(load_config("multi30k-wc", settings), {"train": splits["train"], "validation": validation})
    losses = [row["validation_nll"] for row in log.rows]
    assert losses == sorted(losses, reverse=True)
    # ln 800 = 6.7 at the start
    assert losses[-1] < 5.6


def test_same_seed_repeats_a_run_and_another_does_not():
    logs = [
        fit(load_config("multi30k-wc", [*TINY, "training.epochs=1", f"seed={seed}"]), generated_splits(60))[1].rows
        for seed in (3, 3, 4)
    ]
    assert logs[0] == logs[1]
    assert logs[0] != logs[2]


def test_run_folder_gives_model_and_vocabulary_back(run):
    config, vocabulary, model = load_run(run)
    assert config == load_config("multi30k-wc", [*TINY, "training.epochs=2"])
    sentence = "eins zwei"
    assert vocabulary.decode(vocabulary.encode([sentence])[0]) == sentence
    assert not model.training


def test_translations_have_a_number_for_every_token(run):
    _, vocabulary, model = load_run(run)
    sentences = ["eins zwei drei", "acht"]
    found = translate(model, vocabulary, sentences, max_tokens=125, num_samples=3, beam=2, seed=1)
    again = translate(model, vocabulary, sentences, max_tokens=125, num_samples=3, beam=2, seed=1)
    assert found == again
    for sentence, translation in zip(sentences, found, strict=True):
        assert translation.source == sentence
        assert translation.tokens[-1].piece == "</s>"
        assert len(translation.samples) == 3
        assert translation.score <= 0.0
        for token in translation.tokens:
            assert 0.0 <= token.probability <= 1.0
            assert 0.0 <= token.mutual_information <= token.entropy
            assert 0.0 <= token.disagreement <= 1.0


def test_draws_leave_torchs_generator_alone(run):
    _, vocabulary, model = load_run(run)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    translate(model, vocabulary, ["eins"], max_tokens=125, num_samples=2, beam=1)
    assert torch.equal(torch.rand(3), expected)


def test_disagreement_counts_common_tokens():
    assert disagreement([1, 2, 3, 4], [[1, 2, 3, 4]]) == 0.0
    assert disagreement([1, 2, 3, 4], [[5, 6]]) == 1.0
    # two of four tokens in common, on both sides: 1 − 2 · 2 / 8
    assert disagreement([1, 2, 3, 4], [[1, 2, 7, 8]]) == 0.5
    assert disagreement([1], []) == 0.0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("wc", ["mean", "attention", "attention+dropout"]),
        ("soft", ["mean", "dropout"]),
        ("enum", ["mean", "dropout"]),
        ("gaussian", ["mean", "attention", "attention+dropout"]),
        ("mc-dropout", ["mean", "dropout"]),
    ],
)
def test_methods_follow_from_what_is_random(name, expected):
    config = load_config(f"multi30k-{name}", TINY)
    assert available_methods(Translator(config, 60)) == expected


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("dropout=1.5", "dropout must be below 1, got 1.5"),
        ("batch_tokens=0", "batch_tokens must be at least 1, got 0"),
        ("learning_rate=0", "learning_rate must be above 0, got 0"),
        ("warmup=1", "warmup must be below 1, got 1"),
        ("attention.variant=nope", "variant must be one of 'soft', .*, got 'nope'"),
        ("decoder_mode=fast", "decoder_mode must be one of 'eager', 'compile', 'cuda-graph', 'auto', got 'fast'"),
    ],
)
def test_bad_settings_are_named(setting, message):
    with pytest.raises(ValueError, match=message):
        load_config("multi30k-wc", [setting])


def call(monkeypatch, content, *arguments):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    return stopped.value.code


def test_command_prints_a_line_for_every_line(run, monkeypatch, capsys):
    assert call(monkeypatch, b"eins zwei\ndrei\n", "translate", run, "--samples", "2", "--beam", "2") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all("score" in line and "disagreement" in line for line in lines)


def test_command_writes_json_lines_and_figures(run, monkeypatch, capsys, tmp_path):
    words = ["translate", run, "--samples", "2", "--beam", "2", "--json", "--plots", tmp_path / "maps"]
    assert call(monkeypatch, "fünf sechs\nsieben\n".encode(), *words) == 0
    printed = capsys.readouterr()
    parsed, _ = map(json.loads, printed.out.splitlines())
    assert "maps" in printed.err
    assert parsed["source"] == "fünf sechs"
    assert set(parsed["tokens"][0]) == {"piece", "probability", "entropy", "mutual_information", "disagreement"}
    assert (tmp_path / "maps" / "attention-1.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"eins\n\nzwei\n", "input, line 2 is empty. Every line must hold one sentence"),
        (b"eins\nzw\xffei\n", "input, line 2 is not UTF-8: invalid start byte at byte 3"),
        (b"eins\n" + b"zwei " * 200 + b"\n", "input, line 2 must have at most 125 tokens, got 200"),
    ],
)
def test_bad_input_is_one_line_with_its_number(run, monkeypatch, capsys, content, message):
    assert call(monkeypatch, content, "translate", run) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--method", "dropout"], "method must be one of mean, attention, attention+dropout for this run, got 'dropout'"),
        (["--plots", __file__], "plots must be a folder, got"),
    ],
)
def test_bad_options_are_named_before_anything_is_translated(run, monkeypatch, capsys, words, message):
    monkeypatch.setattr("bayesattn_recipes.translation.translate.decode", lambda *args, **options: 1 / 0)
    assert call(monkeypatch, b"eins\n", "translate", run, *words) == 2
    assert message in capsys.readouterr().err


def test_unknown_folder_is_named(monkeypatch, capsys, tmp_path):
    assert call(monkeypatch, b"eins\n", "translate", tmp_path / "nowhere") == 2
    assert "nowhere is not a folder" in capsys.readouterr().err


def test_training_without_data_is_named(monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("BAYESATTN_DATA", raising=False)
    assert call(monkeypatch, b"", "train", "translation", "--config", "multi30k-soft", "--out", tmp_path / "out") == 2
    assert (
        "multi30k needs data, the folder of the data sets. Give it with --data or BAYESATTN_DATA" in capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()


def test_colors_follow_the_doubt(run):
    _, vocabulary, model = load_run(run)
    (translation,) = translate(model, vocabulary, ["eins"], max_tokens=125, num_samples=2, beam=1)
    text = colored(translation)
    assert text.plain.startswith(translation.text)
    assert text.plain.endswith("]")


@pytest.mark.parametrize("name", ["wc", "hard", "enum"])
def test_attention_samples_are_weights_over_the_source(name):
    model = Translator(load_config(f"multi30k-{name}", TINY), 60).eval()
    weights, prior = figures.attention_samples(model, [5, 6, 7, 3], [8, 9, 3], 4)
    assert weights.shape == (4, 3, 4)
    assert torch.allclose(weights.sum(dim=-1), torch.ones(4, 3), atol=1e-5)
    assert (prior is not None) == (name == "wc")
    # enum has soft attention, and dropout moves it
    assert not torch.equal(weights[0], weights[1])


def test_cost_has_a_row_for_every_variant(capsys):
    configs = {name: load_config(f"multi30k-{name}", TINY) for name in ("soft", "wc", "enum")}
    rows = cost.measure_costs(configs, num_sentences=3, length=4, vocabulary_size=60, device="cpu", rounds=2)
    assert [row.provider for row in rows] == ["soft", "wc", "enum"]
    assert rows[0].ratio == 1.0
    capsys.readouterr()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_cost_is_that_of_the_precision_a_config_trains_in(precision, monkeypatch, capsys):
    seen = []
    forward = torch.nn.Linear.forward
    monkeypatch.setattr(
        torch.nn.Linear, "forward", lambda self, x: seen.append(torch.is_autocast_enabled("cpu")) or forward(self, x)
    )
    configs = {"soft": load_config("multi30k-soft", [*TINY, f"training.precision={precision}"])}
    # oneDNN does not have a bf16 LSTM for every CPU
    monkeypatch.setattr(torch.nn.LSTM, "forward", torch.autocast("cpu", enabled=False)(torch.nn.LSTM.forward))
    cost.measure_costs(configs, num_sentences=3, length=4, vocabulary_size=60, device="cpu", rounds=1)
    assert set(seen) == {precision == "bf16"}
    capsys.readouterr()


def test_paper_sizes_have_the_papers_number_of_parameters():
    sizes = {}
    for name in ("soft", "wc", "enum"):
        with torch.device("meta"):
            model = Translator(load_config(f"iwslt14-{name}"), 10_000)
        sizes[name] = sum(parameter.numel() for parameter in model.parameters())
    # Table of the appendix, in millions; with about 10,000 types of each language
    assert round(sizes["soft"] / 1e6) in (42, 43)
    assert round(sizes["enum"] / 1e6) in (64, 65)
    assert sizes["wc"] - sizes["soft"] == 1024 * 5 + 5 + 5 + 1


def test_rank_correlation_of_uncertainty_with_quality_is_negated():
    assert measure.rank_correlation([1.0, 2.0, 3.0], [30.0, 20.0, 10.0]) == pytest.approx(1.0)
    assert measure.rank_correlation([1.0, 1.0, 1.0], [30.0, 20.0, 10.0]) == 0.0


def test_scores_are_sacrebleus():
    outputs = ["a small cat sat there", "the dog ran home today"]
    references = ["a small cat sat here", "the dog ran home today"]
    found = bleu.corpus_bleu(outputs, references)
    assert 0.0 < found.score < 100.0
    assert "tok:13a" in found.signature
    assert bleu.corpus_bleu(references, references).score == pytest.approx(100.0)
    assert bleu.corpus_bleu(["THE DOG RAN HOME NOW"], ["the dog ran home now"], "lowercase").score == pytest.approx(100.0)
    assert bleu.sentence_scores(outputs, references)["chrf"][1] == pytest.approx(100.0)
    assert bleu.bootstrap_p_value(outputs, outputs, references, num_resamples=50) == 1.0
    worse = ["a cat", "dogs run"] * 20
    assert bleu.bootstrap_p_value(worse, references * 20, references * 20, num_resamples=99) < 0.05
    # one sentence of forty differs by a word
    nearly = [*(references * 20)[:-1], "the dog ran home then"]
    assert bleu.bootstrap_p_value(references * 20, nearly, references * 20, num_resamples=99) > 0.05


def test_counts_of_sentences_add_up_to_the_bleu_of_their_text():
    outputs = ["a small cat sat there .", "the dog ran home today", "", "one"]
    references = ["a small cat sat here .", "A dog ran home today", "nothing", "one two"]
    counts = bleu.sentence_counts(outputs, references)
    for kept in ([0, 1, 2, 3], [0, 1], [3]):
        text = bleu.corpus_bleu([outputs[i] for i in kept], [references[i] for i in kept])
        assert bleu.bleu_of_counts([counts[i] for i in kept]) == pytest.approx(text.score, abs=1e-9)


def common_words(output, reference):
    words = set(reference.split())
    return 100.0 * len(words & set(output.split())) / len(words)


@pytest.fixture
def simple_scores(monkeypatch):
    """Stand-ins for sacrebleu's scores, so that what is built on them is tested without it."""

    def corpus(outputs, references, kind="cased"):
        each = [common_words(*pair) for pair in zip(outputs, references, strict=True)]
        return bleu.CorpusScore(sum(each) / len(each), f"words|{kind}")

    monkeypatch.setattr(bleu, "corpus_bleu", corpus)
    monkeypatch.setattr(bleu, "corpus_chrf", corpus)
    monkeypatch.setattr(
        bleu,
        "sentence_scores",
        lambda outputs, references: {name: [*map(common_words, outputs, references)] for name in ("chrf", "bleu")},
    )
    monkeypatch.setattr(
        bleu,
        "sentence_counts",
        lambda *texts: [bleu.Counts((round(common_words(*pair)),), (100,), 0, 0) for pair in zip(*texts, strict=True)],
    )
    monkeypatch.setattr(bleu, "bleu_of_counts", lambda counts: sum(c.correct[0] for c in counts) / len(counts))
    monkeypatch.setattr(bleu, "bootstrap_p_value", lambda baseline, ours, references: 0.25)


def test_tables_are_reproduced_and_not_repeated(simple_scores, monkeypatch, tmp_path, capsys):
    splits = generated_splits(60)
    monkeypatch.setattr(reproduce, "load_splits", lambda name, data: splits)
    monkeypatch.setattr(reproduce, "NUM_SAMPLES", 2)
    words = {"num_seeds": 2, "out": tmp_path, "console": Console(file=io.StringIO())}
    request = Request(names=["multi30k"], variants=["wc", "enum"], settings=[*TINY, "training.epochs=1"], **words)
    page = reproduce.reproduce(request)
    text = page.read_text()
    # soft is always there; the paper's numbers stand beside ours
    for expected in (
        "| soft |",
        "| wc |",
        "| enum |",
        "33.81",
        "0.25",
        "wc, attention disagreement",
        "soft, mean entropy",
        "64",
    ):
        assert expected in text
    assert len((tmp_path / "multi30k.csv").read_text().splitlines()) == 1 + 3 * 2
    compared = (tmp_path / "multi30k-comparisons.csv").read_text().splitlines()
    assert compared[0] == "dataset,variant,seed,test,bleu,difference,bootstrap_p"
    assert [line.split(",")[1:3] for line in compared[1:]] == [["wc", "0"], ["wc", "1"], ["enum", "0"], ["enum", "1"]]
    # the rivals are not drawn from, and their cells say so
    rival = json.loads((tmp_path / "cells" / "multi30k-enum-0.json").read_text())["measures"]
    assert rival["not_measured"] == ["iwslt14-test", "uncertainty", "calibration"]
    assert "enum, mean" not in text
    cell = json.loads((tmp_path / "cells" / "multi30k-wc-0.json").read_text())["measures"]
    # no folder of data, so no test out of domain
    assert cell["not_measured"] == ["iwslt14-test"]
    assert len(cell["tests"]["test"]["outputs"]) == len(splits["test"].sources)
    assert len(cell["uncertainty"]["attention entropy"]["rejection"]) == len(measure.REJECTED)
    assert cell["calibration"]["mean"]["perplexity"] == pytest.approx(cell["tests"]["test"]["perplexity"])
    assert cell["calibration"]["attention"] != cell["calibration"]["mean"]
    assert (tmp_path / "multi30k-rejection.png").exists()
    monkeypatch.setattr(reproduce, "train_run", lambda *args, **options: 1 / 0)
    reproduce.reproduce(request)
    with pytest.raises(ValueError, match="other settings"):
        reproduce.reproduce(dataclasses.replace(request, settings=[*TINY, "training.epochs=2"]))
    capsys.readouterr()


def test_withholding_the_least_certain_helps_when_certainty_is_right(simple_scores):
    counts = bleu.sentence_counts(["a b"] * 8 + ["x y"] * 2, ["a b"] * 10)
    certain = measure.rejection_curve([0.1] * 8 + [0.9] * 2, counts)
    assert certain[0] == pytest.approx(80.0)
    assert certain[2] == pytest.approx(100.0)
    wrong = measure.rejection_curve([0.9] * 8 + [0.1] * 2, counts)
    assert wrong[2] < wrong[0]


def test_runs_that_diverge_and_runs_that_are_missing_leave_a_table(simple_scores, monkeypatch, tmp_path, capsys):
    splits = generated_splits(60)
    monkeypatch.setattr(reproduce, "load_splits", lambda name, data: splits)
    monkeypatch.setattr(reproduce, "NUM_SAMPLES", 2)
    words = {"out": tmp_path, "settings": [*TINY, "training.epochs=1"], "console": Console(file=io.StringIO())}

    def run(variants, **options):
        return reproduce.reproduce(Request(names=["multi30k"], variants=variants, **options, **words))

    with pytest.raises(ValueError, match="no run of multi30k-soft has finished"):
        run(["soft"], num_seeds=1, minutes=0.0)
    run(["soft"], num_seeds=1)

    def diverge(*args, **options):
        raise Diverged("not finite at step 3 (epoch 0); the loss is nan")

    monkeypatch.setattr(reproduce, "train_run", diverge)
    text = run(["soft", "gaussian-weights"], num_seeds=1).read_text()
    assert "gaussian-weights, seed 0, diverged: not finite at step 3 (epoch 0)." in text
    monkeypatch.setattr(reproduce, "train_run", lambda *args, **options: 1 / 0)
    text = run(["wc", "gaussian-weights"], num_seeds=2, minutes=0.0).read_text()
    assert "| soft | 1 |" in text
    assert "| wc |" not in text
    assert "diverged" in (tmp_path / "multi30k.csv").read_text()
    capsys.readouterr()


@pytest.mark.parametrize(
    ("datasets", "variants", "message"),
    [
        (["nope"], None, "datasets must be among multi30k, tatoeba, iwslt14, got 'nope'"),
        (None, ["nope"], "variants must be among soft, nokl.*, got 'nope'"),
    ],
)
def test_unknown_tables_are_named(datasets, variants, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        reproduce.reproduce(Request(names=datasets, variants=variants, out=tmp_path, console=Console()))


def test_default_training_is_described_by_the_config():
    assert TranslationConfig().training == TrainingConfig(epochs=30, clip_norm=5.0)
