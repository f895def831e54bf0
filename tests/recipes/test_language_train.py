"""Fine-tuning through the command line: it learns, its run stands alone, and what goes wrong leaves nothing behind."""

import dataclasses
import json
import shutil

import pytest
import torch
import transformers as hf
from language_files import call, sentiment_data, trained, write_glue, write_sentiment, write_squad

from bayesattn.evaluation.runs import read_run
from bayesattn.files import RunError
from bayesattn_recipes.common.config import seed_everything
from bayesattn_recipes.language.features import Collator
from bayesattn_recipes.language.model import tiny_tokenizer
from bayesattn_recipes.language.train import LanguageExperiment, load_config, load_run, prepare_run, train_model, train_run

HEADER = "sentence\tlabel\n"
FEW = ["encoder=tiny", "training.steps=3", "max_length=24"]


@pytest.fixture
def sentiment():
    return sentiment_data()


@pytest.fixture
def bayesian_run():
    return trained("BAM-WC")


@pytest.fixture
def soft_run():
    return trained("soft")


def log_of(run):
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", ["bayesian_run", "soft_run"])
def test_200_steps_learn_the_task(name, request):
    rows = log_of(request.getfixturevalue(name))
    assert rows[-1]["step"] == 200
    assert rows[-1]["train_nll"] < 0.5 * rows[0]["train_nll"]
    # the majority class has 60 %; the word that decides is always there
    assert rows[-1]["validation_accuracy"] > 0.9


def test_bayesian_run_logs_its_kl_and_soft_has_none(bayesian_run, soft_run):
    assert log_of(bayesian_run)[-1]["train_kl"] > 0.0
    assert log_of(bayesian_run)[-1]["kl_weight"] == 1e-5
    assert all(row["train_kl"] == 0.0 for row in log_of(soft_run))


def test_run_folder_holds_no_pickle(bayesian_run):
    files = sorted(str(path.relative_to(bayesian_run)) for path in bayesian_run.rglob("*") if path.is_file())
    allowed = {"answers.json", "metrics.json", "predictions.safetensors", "report.html"}
    assert set(files) - allowed == {
        "checkpoint.safetensors", "log.csv", "log.jsonl", "run.json",
        "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json",
    }  # fmt: skip


def test_run_says_what_it_was_trained_on(bayesian_run):
    run = read_run(bayesian_run)
    assert run["class_names"] == ["bad", "good"]
    assert run["num_examples"]["test"] == 101
    assert run["num_truncated"] == {"train": 0, "validation": 0, "test": 0}
    # two layers, heads of 8 features, ten hidden units: 8·10 + 10 + 10 + 1
    assert run["added_parameters"] == 2 * 101


def test_run_is_read_back_as_it_was_trained_and_repeats(tmp_path, sentiment):
    train_run(load_config("own", FEW), tmp_path, data=sentiment)
    run = load_run(tmp_path)
    assert run.tokenizer.pad_token_id == 0
    assert not run.model.training
    again = train_model(load_config("own", FEW), sentiment).model.state_dict()
    assert all(torch.equal(value, again[name]) for name, value in run.model.state_dict().items())


def test_run_without_its_tokenizer_is_an_error(soft_run, tmp_path):
    for name in ("run.json", "checkpoint.safetensors"):
        (tmp_path / name).write_bytes((soft_run / name).read_bytes())
    with pytest.raises(RunError, match=r"has no tokenizer\.json"):
        load_run(tmp_path)


HOSTILE = {
    "a broken tokenizer": ("tokenizer/tokenizer.json", lambda text: text[:100]),
    "an empty tokenizer": ("tokenizer/tokenizer.json", lambda text: ""),
    "another kind of tokenizer": ("tokenizer/tokenizer.json", lambda text: '{"model": {"type": "BPE"}}'),
    "settings of a tokenizer that are a list": ("tokenizer/tokenizer_config.json", lambda text: "[1]"),
    "another architecture": ("run.json", lambda text: text.replace('"model_type": "bert"', '"model_type": "own"')),
    "a size that is a word": ("run.json", lambda text: text.replace('"hidden_size": 32', '"hidden_size": "x"')),
    "a negative size": ("run.json", lambda text: text.replace('"hidden_size": 32', '"hidden_size": -32')),
    "another size": ("run.json", lambda text: text.replace('"hidden_size": 32', '"hidden_size": 36')),
    "no class names": ("run.json", lambda text: text.replace('"class_names"', '"names"')),
    "an empty checkpoint": ("checkpoint.safetensors", lambda text: ""),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_broken_run_is_refused_in_one_line(name, soft_run, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(soft_run, folder)
    file, change = HOSTILE[name]
    before = (folder / file).read_text(errors="replace")
    (folder / file).write_text(change(before))
    assert (folder / file).read_text(errors="replace") != before
    assert call("predict", folder, "--text", "the film was lovely") == 2
    error = capsys.readouterr().err
    assert error.startswith("bayesattn: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("spoil", "settings", "message"),
    [
        (
            lambda f: (f / "train.tsv").write_text(HEADER + "A.\tgood\nB.\tbad\tx\nC.\tbad\n"),
            [],
            "line 3: the row must have 2 fields (sentence, label), got 3",
        ),
        (lambda f: (f / "dev.tsv").write_text(HEADER + "A.\tnice\n"), [], "label must be one of 'bad', 'good', got 'nice'"),
        (lambda f: (f / "dev.tsv").write_text(HEADER + "\tgood\n"), [], "line 2: sentence is empty"),
        (lambda f: (f / "train.tsv").unlink(), [], "has no train.tsv"),
        (lambda f: None, ["encoder=e5-small"], "encoder_e5_small_hf, which is not in the data folder"),
        (lambda f: (f / "encoder").mkdir(), ["encoder=FOLDER/encoder"], "has no tokenizer"),
    ],
)
def test_mistake_is_one_line_and_leaves_no_run(spoil, settings, message, tmp_path, capsys):
    folder = write_sentiment(tmp_path / "data")
    spoil(folder)
    options = [f"--set={setting.replace('FOLDER', str(folder))}" for setting in (*FEW, *settings)]
    out = tmp_path / "run"
    assert call("train", "language", "--config", "own", "--data", folder, "--out", out, *options) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (out / "run.json").exists()


def test_long_texts_are_counted_in_the_run(tmp_path, sentiment):
    train_run(load_config("own", [*FEW, "max_length=8"]), tmp_path, data=sentiment)
    counted = read_run(tmp_path)["num_truncated"]
    # 4 to 11 fillers and a word beside two special tokens: longer than 8 unless there are at most 5 fillers
    assert 0 < counted["test"] < 101


def test_best_epoch_is_kept(sentiment):
    config = load_config(
        "own",
        [
            *FEW,
            "training.keep=validation_loss",
            "training.learning_rate=3e-2",
            "training.steps=16",
            "training.warmup=0",
            "train_size=64",
        ],
    )
    fitted = train_model(config, sentiment)
    rows = fitted.log.rows
    best = min(range(len(rows)), key=lambda index: rows[index]["validation_loss"])
    assert [row["is_best"] for row in rows][best]
    assert not any(row["is_best"] for row in rows[best + 1 :])
    batch = Collator(0, 8, 24)(fitted.prepared.splits["validation"].rows)
    with torch.no_grad():
        loss = float(fitted.model(**batch).loss)
    # one batch in place of two of other lengths; float32
    assert loss == pytest.approx(rows[best]["validation_loss"], rel=1e-4)


def test_patience_stops_training(sentiment):
    settings = ["training.keep=validation_loss", "training.patience=2", "training.learning_rate=1e-30", "train_size=33"]
    log = train_model(load_config("own", ["encoder=tiny", "max_length=24", *settings, "training.epochs=50"]), sentiment).log
    # nothing is learned, so no epoch is better than the first
    assert [row["is_best"] for row in log.rows] == [True, False, False]


@pytest.mark.parametrize("warmup", [0.4, 2])
def test_steps_are_those_of_the_hugging_face_trainer(sentiment, tmp_path, warmup):
    """The whole training set is one batch, so the order does not matter; nothing is drawn."""
    from transformers import Trainer, TrainingArguments

    settings = [
        "encoder=tiny", "max_length=24", "train_size=61", "attention.variant=soft", "dropout=0", "attention_dropout=0",
        "classifier_dropout=0", "training.batch_size=61", "training.steps=5", "training.learning_rate=1e-2",
        "training.weight_decay=0.3", "training.clip_norm=0.7", f"training.warmup={warmup}",
    ]  # fmt: skip
    config = load_config("own", settings)
    moved = train_model(config, sentiment).model.state_dict()
    seed_everything(config.seed)
    other = LanguageExperiment(config, sentiment)
    start = {name: value.clone() for name, value in other.model.state_dict().items()}
    arguments = TrainingArguments(
        str(tmp_path), max_steps=5, per_device_train_batch_size=61, learning_rate=1e-2, warmup_steps=warmup,
        weight_decay=0.3, max_grad_norm=0.7, use_cpu=True, report_to="none",
        save_strategy="no", disable_tqdm=True, logging_strategy="no",
        dataloader_pin_memory=False, remove_unused_columns=False,
    )  # fmt: skip
    Trainer(other.model, arguments, train_dataset=other.train, data_collator=other.collator).train()
    expected = other.model.state_dict()
    for name, value in moved.items():
        if value.is_floating_point():
            # float32 sums over the batch in another order, five steps of about 1e-2
            torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=2e-4)
    assert max(float((value - start[name]).abs().max()) for name, value in moved.items() if value.is_floating_point()) > 0.01


@pytest.mark.parametrize("is_grouped", [True, False])
def test_an_epoch_holds_every_example_once(is_grouped, sentiment):
    config = load_config("own", [*FEW, f"training.group_by_length={str(is_grouped).lower()}", "train_size=301"])
    experiment = LanguageExperiment(config, sentiment)
    batches = experiment.batches(config.training, torch.Generator().manual_seed(3))
    assert sorted(torch.cat(list(batches)).tolist()) == list(range(301))
    spread = [len({len(experiment.train[i]["input_ids"]) for i in batch.tolist()}) for batch in batches]
    # texts have eight lengths; sorted among four batches or so, a batch of 32 meets few of them
    assert (sum(spread) / len(spread) < 5) == is_grouped
    again = experiment.batches(config.training, torch.Generator().manual_seed(4))
    assert not torch.equal(batches[0], again[0])


def test_an_answer_counts_as_two_labels(tmp_path):
    config = load_config("squad1", ["encoder=tiny", "max_length=40"])
    experiment = LanguageExperiment(config, write_squad(tmp_path))
    assert experiment.num_labels(experiment.collate(torch.arange(3))) == 6


def test_train_size_takes_part_of_the_training_examples(sentiment):
    prepared = prepare_run(load_config("own", [*FEW, "train_size=37"]), sentiment)
    assert len(prepared.splits["train"].rows) == 37
    assert prepared.note == "37 training examples"


def test_complete_run_is_left_as_it_is_by_resume(soft_run):
    before = {path: path.stat().st_mtime_ns for path in soft_run.rglob("*")}
    config = load_run(soft_run).config
    assert train_run(config, soft_run, data=sentiment_data(), resume=True).rows == log_of(soft_run)
    assert {path: path.stat().st_mtime_ns for path in soft_run.rglob("*")} == before
    with pytest.raises(RunError, match=r"has another config: config\.seed is 1 and was 0"):
        train_run(dataclasses.replace(config, seed=1), soft_run, data=sentiment_data(), resume=True)


def test_loss_that_is_not_finite_stops_the_run(sentiment, tmp_path):
    config = load_config("own", [*FEW, "training.learning_rate=1e30", "training.clip_norm=null", "training.warmup=0"])
    with pytest.raises(ValueError, match=r"not finite at step 1 \(epoch 0, batch 1, examples .*output of layer bert"):
        train_run(config, tmp_path, data=sentiment)
    assert not (tmp_path / "run.json").exists()


class Killed(BaseException):
    """Stands for the end of the process: nothing in the library may catch it."""


@pytest.mark.parametrize("variant", ["BAM-WC", "soft"])
def test_a_run_ended_after_any_step_goes_on_exactly(variant, sentiment, tmp_path):
    settings = ["encoder=tiny", "max_length=24", "training.steps=7", "train_size=150", "training.checkpoint_steps=1"]
    config = load_config("own", [*settings, f"attention.variant={variant}", "training.keep=validation_loss"])

    def run(name, kill_at=None):
        def on_progress(done, total):
            assert total == 7
            if done == kill_at:
                raise Killed

        train_run(config, tmp_path / name, on_progress, data=sentiment, resume=True)

    run("peace")
    # in the first epoch of five steps, at its end, in the second
    for kill_at in (2, 5, 6):
        with pytest.raises(Killed):
            run("killed", kill_at)
    run("killed")
    for name in ("checkpoint.safetensors", "log.jsonl", "tokenizer/tokenizer.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "peace" / name).read_bytes(), name


def test_noise_can_be_keyed_by_example(sentiment):
    rows = train_model(
        load_config("own", [*FEW, "training.noise=keyed", "training.accumulation_steps=2"]), sentiment
    ).log.rows
    assert rows[-1]["train_kl"] > 0.0


@pytest.mark.parametrize("variant", ["BAM-WC", "soft"])
def test_regression_trains(variant, tmp_path):
    header = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
    rows = "".join(f"{i}\tg\tf\t2012\t1\tn\tn\tA man {i}.\tA dog {i}.\t{i % 6}\n" for i in range(40))
    write_glue(tmp_path, {"STS-B/train.tsv": header + rows, "STS-B/dev.tsv": header + rows[:200].rsplit("\n", 1)[0] + "\n"})
    log = train_model(load_config("stsb", [*FEW, f"attention.variant={variant}"]), tmp_path).log
    assert {"validation_pearson", "validation_spearman", "validation_loss"} <= log.rows[-1].keys()


def test_questions_train_and_their_loss_falls(tmp_path):
    write_squad(tmp_path, articles=30, paragraphs=6)
    settings = [
        "encoder=tiny",
        "training.steps=50",
        "max_length=40",
        "training.learning_rate=3e-3",
        "training.group_by_length=false",
    ]
    rows = train_model(load_config("squad1", settings), tmp_path).log.rows
    assert rows[-1]["train_nll"] < 0.7 * rows[0]["train_nll"]


@pytest.mark.parametrize("task", ["mrpc", "stsb", "squad2"])
def test_papers_configs_run_from_a_folder_of_albert(task, tmp_path, capsys):
    tokenizer = tiny_tokenizer(["a dog ran the box is dark blue"])
    sizes = {"embedding_size": 7, "hidden_size": 22, "num_attention_heads": 2, "intermediate_size": 13}
    encoder = hf.AlbertModel(hf.AlbertConfig(vocab_size=len(tokenizer), num_hidden_layers=3, **sizes))
    encoder.save_pretrained(tmp_path / "albert")
    tokenizer.save_pretrained(tmp_path / "albert")
    write_squad(write_glue(tmp_path / "data"), "2.0", impossible=(1,))
    settings = [f"encoder={tmp_path / 'albert'}", "training.steps=2", "training.warmup=1", "max_length=40"]
    run = tmp_path / "run"
    options = [f"--set={setting}" for setting in settings]
    assert call("train", "language", "--config", f"albert-{task}", "--data", tmp_path / "data", "--out", run, *options) == 0
    # ALBERT's layers share one prior network: 11 to 5 and 5 to 1, with biases
    assert read_run(run)["added_parameters"] == 11 * 5 + 5 + 5 + 1
    (tmp_path / "new.tsv").write_text("a dog ran\tthe box is blue\n")
    capsys.readouterr()
    assert call("predict", run, "--file", tmp_path / "new.tsv", "--samples", 3) == 0
    assert {"label", "probability", "p_value", "trust"} <= json.loads(capsys.readouterr().out).keys()
