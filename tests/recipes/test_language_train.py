"""Fine-tuning through the command line: it learns, its run stands alone, and what goes wrong leaves nothing behind."""

import dataclasses
import json

import pytest
import torch
from language_files import call, sentiment_data, trained, write_glue, write_sentiment, write_squad

from bayesattn.recipes.language import fit as fitting
from bayesattn.recipes.language.fit import LanguageTraining, LogCallback, SpanTrainer, training_arguments
from bayesattn.recipes.language.tasks import TASKS
from bayesattn.recipes.language.train import load_config, load_run, prepare_run, train_model, train_run
from bayesattn.runs import RunError, read_run

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
    assert log_of(bayesian_run)[-1]["kl_weight"] == 0.01
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


@pytest.mark.parametrize(
    ("spoil", "settings", "message"),
    [
        (
            lambda f: (f / "train.tsv").write_text(HEADER + "A.\tgood\nB.\tbad\tx\nC.\tbad\n"),
            [],
            "line 3: has 3 fields",
        ),
        (lambda f: (f / "dev.tsv").write_text(HEADER + "A.\tnice\n"), [], "label is 'nice'; allowed: 'bad', 'good'"),
        (lambda f: (f / "dev.tsv").write_text(HEADER + "\tgood\n"), [], "line 2: sentence is empty"),
        (lambda f: (f / "train.tsv").unlink(), [], "holds no train.tsv"),
        (lambda f: None, ["encoder=e5-small"], "encoder_e5_small_hf is not in the data folder"),
        (lambda f: (f / "encoder").mkdir(), ["encoder=FOLDER/encoder"], "has no tokenizer"),
        (lambda f: None, ["training.batch_size=7", "training.accumulation_steps=2"], "allowed: a multiple of 2"),
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
    rows_of = fitted.prepared.splits["validation"].rows
    collator = fitting.Collator(0, 8, 24)
    batch = collator(rows_of)
    with torch.no_grad():
        loss = float(fitted.model(**batch).loss)
    # one batch, so the Trainer's mean is the same mean; float32
    assert loss == pytest.approx(rows[best]["validation_loss"], rel=1e-4)


def test_patience_stops_training():
    callback = LogCallback(LanguageTraining(keep="validation_loss", patience=2), lambda done, total: None)
    control = type("Control", (), {"should_training_stop": False})()
    state = type("State", (), {"global_step": 1})()
    stops = []
    for loss in (0.5, 0.4, 0.45, 0.41):
        callback.on_evaluate(None, state, control, metrics={"eval_loss": loss}, model=torch.nn.Linear(1, 1))
        stops.append(control.should_training_stop)
    assert stops == [False, False, False, True]


def test_training_key_becomes_the_trainers_arguments(tmp_path):
    config = LanguageTraining(
        epochs=7, batch_size=48, accumulation_steps=3, learning_rate=3e-4, warmup=11.0, group_by_length=True, clip_norm=0.5
    )
    made = training_arguments(config, TASKS["rte"], str(tmp_path), seed=5)
    assert (made.num_train_epochs, made.per_device_train_batch_size, made.gradient_accumulation_steps) == (7, 16, 3)
    assert (made.learning_rate, made.warmup_steps, made.max_grad_norm, made.seed) == (3e-4, 11, 0.5, 5)
    assert made.train_sampling_strategy == "group_by_length"


def test_an_answer_counts_as_two_labels():
    inputs = {"input_ids": torch.zeros(5, 3), "start_positions": torch.zeros(5), "end_positions": torch.zeros(5)}
    assert SpanTrainer.count_labels(None, inputs) == 10  # type: ignore[arg-type]


def test_train_size_takes_part_of_the_training_examples(sentiment):
    prepared = prepare_run(load_config("own", [*FEW, "train_size=37"]), sentiment)
    assert len(prepared.splits["train"].rows) == 37
    assert prepared.note == "37 training examples"


def test_complete_run_is_left_as_it_is_by_resume(soft_run):
    before = {path: path.stat().st_mtime_ns for path in soft_run.rglob("*")}
    config = load_run(soft_run).config
    assert train_run(config, soft_run, data=sentiment_data(), resume=True).rows == log_of(soft_run)
    assert {path: path.stat().st_mtime_ns for path in soft_run.rglob("*")} == before
    with pytest.raises(RunError, match=r"is another run: config\.seed is 1 and was 0"):
        train_run(dataclasses.replace(config, seed=1), soft_run, data=sentiment_data(), resume=True)


def test_loss_that_is_not_finite_stops_the_run(sentiment, tmp_path):
    config = load_config("own", [*FEW, "training.learning_rate=1e30", "training.clip_norm=null", "training.warmup=0"])
    with pytest.raises(ValueError, match="the loss is not finite after step 3"):
        train_run(config, tmp_path, data=sentiment)
    assert not (tmp_path / "run.json").exists()


def test_settings_of_the_other_training_loop_are_refused():
    with pytest.raises(ValueError, match=r"training\.noise is 'keyed'; allowed where the Hugging Face Trainer trains"):
        load_config("own", ["training.noise=keyed"])


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
