"""Evaluation of language runs: methods, shifts, metrics that add up; serving; all from the run folder."""

import io
import json
import math
import shutil

import pytest
import torch
from language_files import GLUE, call, trained, write_glue, write_squad

from bayesattn.evaluation.runs import read_predictions, write_predictions
from bayesattn.metrics import aurc, expected_calibration_error
from bayesattn_recipes.common.doubt import MOST_DOUBTFUL
from bayesattn_recipes.language import serve, shifts, spans
from bayesattn_recipes.language.data import Example
from bayesattn_recipes.language.evaluate import measure_run, predict_run
from bayesattn_recipes.language.metrics import f1, pearson
from bayesattn_recipes.language.predictor import MEAN_BATCH_SIZE, Predictor, available_methods
from bayesattn_recipes.language.prepare import Split
from bayesattn_recipes.language.shifts import character_noise, shifted_splits, word_noise
from bayesattn_recipes.language.tasks import TASKS
from bayesattn_recipes.language.train import load_config, load_run, make_collator, train_run
from bayesattn_recipes.language.trust import choose_rule
from data import shared_data

FEW = ["encoder=tiny", "training.steps=3", "max_length=40"]
TEXT = "the quick brown fox jumps over the lazy dog and runs away from all of them"


@pytest.fixture
def bayesian_run():
    return trained("BAM-WC")


@pytest.fixture
def soft_run():
    return trained("soft")


def predictor(run):
    return Predictor(run.model, run.task, run.config, make_collator(run.config, run.tokenizer), run.class_names)


def test_evaluate_writes_metrics_of_every_split(bayesian_run, capsys):
    assert call("evaluate", bayesian_run, "--samples", 3, "--noise", "1", "--resamples", 10) == 0
    measured = json.loads((bayesian_run / "metrics.json").read_text())
    assert list(measured["methods"]) == ["mean", "attention"]
    splits = measured["methods"]["attention"]["splits"]
    assert list(splits) == ["validation", "test", "characters-1", "words-1"]
    values = splits["test"]["metrics"]
    assert {"accuracy", "nll", "ece", "pavpu_05", "aurc"} <= values.keys()
    assert values["accuracy"]["value"] > 0.9
    # noise takes the deciding word away in about one text of five
    assert splits["words-1"]["metrics"]["accuracy"]["value"] < values["accuracy"]["value"]
    assert "characters-1" in capsys.readouterr().out


def test_means_do_not_depend_on_the_size_of_batches(bayesian_run, monkeypatch):
    run = load_run(bayesian_run)
    rows = serve.encode(run.tokenizer, [("dull " * n,) for n in range(1, 8)], 24).rows
    found = []
    for size in (2, 7):
        monkeypatch.setitem(MEAN_BATCH_SIZE, run.model.device.type, size)
        found.append(predictor(run).draw(Split(rows), "mean", 2, 0))
    # padding changes the order of summation, nothing else
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-5)


def test_predictions_do_not_depend_on_the_order_of_rows(bayesian_run):
    run = load_run(bayesian_run)
    texts = [("the film was warm",), ("a dull plot",), ("superb " * 9,)]
    rows = serve.encode(run.tokenizer, texts, 24).rows
    forward = predictor(run).draw(Split(rows), "mean", 2, 0)
    backward = predictor(run).draw(Split(rows[::-1]), "mean", 2, 0)
    # padding changes the order of summation, nothing else
    torch.testing.assert_close(forward, backward.flip(1), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_mc_dropout_of_a_soft_model_drops_attention_weights(implementation, soft_run):
    run = load_run(soft_run)
    run.model.set_attn_implementation(implementation)
    rows = serve.encode(run.tokenizer, [("the film was warm",)], 24).rows
    for module in run.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for layer in run.model.bert.encoder.layer:
        layer.attention.self.dropout.p = 0.5
    drawn = predictor(run).draw(Split(rows), "dropout", 4, 0)
    assert float(drawn.std(dim=0).max()) > 0.0
    assert torch.equal(drawn, predictor(run).draw(Split(rows), "dropout", 4, 0))
    assert not torch.equal(drawn, predictor(run).draw(Split(rows), "dropout", 4, 1))
    assert not any(module.training for module in run.model.modules())


def test_methods_follow_from_the_attention(bayesian_run, soft_run):
    for folder, expected in (
        (bayesian_run, ["mean", "attention", "attention+dropout"]),
        (soft_run, ["mean", "dropout", "post-hoc"]),
    ):
        run = load_run(folder)
        assert available_methods(run.config, run.model) == expected


def test_post_hoc_noise_is_tuned_and_taken_back(soft_run):
    found = predict_run(soft_run, num_samples=2, noise=(0.0,), methods=["post-hoc", "mean"])
    drawn = found.splits["test"].samples["post-hoc"]
    assert drawn.shape[0] == 2
    assert float((drawn[0] - drawn[1]).abs().max()) > 0.0
    # what is drawn after it without noise is the soft model again
    alone = predict_run(soft_run, num_samples=2, noise=(0.0,), methods=["mean"])
    assert torch.equal(found.splits["test"].samples["mean"], alone.splits["test"].samples["mean"])


@pytest.mark.parametrize("variant", ["soft", "BAM-WC"])
def test_most_doubtful_texts_are_kept_with_their_tokens(variant):
    folder = trained(variant)
    found = predict_run(folder, num_samples=2, noise=(0.0,), methods=["mean"])
    part, run = found.splits["test"], load_run(folder)
    kept = part.doubtful
    assert len(kept.examples) == MOST_DOUBTFUL
    assert (kept.margin / kept.std).diff().min() >= 0
    # the margin is that of the probabilities in the same file
    top = part.samples["mean"][0, kept.examples].topk(2, dim=-1).values
    assert torch.allclose(kept.margin, (top[:, 0] / top[:, 1]).log(), rtol=1e-3, atol=1e-4)
    assert torch.allclose(kept.by_token.sum(dim=1), kept.std.square(), rtol=1e-4)
    assert torch.allclose(kept.by_head.sum(dim=(1, 2)), kept.std.square(), rtol=1e-4)
    for words, variances in zip(kept.words, kept.by_token, strict=True):
        assert words[0] == run.tokenizer.cls_token
        assert not variances[len(words) :].any()
    assert found.splits["validation"].doubtful is None


def test_data_of_the_run_come_before_the_variable(soft_run, tmp_path, monkeypatch):
    monkeypatch.setenv("BAYESATTN_DATA", str(tmp_path))
    assert predict_run(soft_run, noise=(0.0,), methods=["mean"], data=tmp_path).splits["test"].labels is not None
    with pytest.raises(ValueError, match=r"has no train\.tsv"):
        predict_run(soft_run, noise=(0.0,), methods=["mean"], data=tmp_path.parent)


def test_data_that_moved_are_found_by_the_variable(soft_run, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    shutil.copytree(soft_run, folder)
    run = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**run, "data": str(tmp_path / "gone")}))
    monkeypatch.delenv("BAYESATTN_DATA", raising=False)
    with pytest.raises(ValueError, match=r"does not exist. It must hold train"):
        predict_run(folder, noise=(0.0,), methods=["mean"])
    monkeypatch.setenv("BAYESATTN_DATA", run["data"])
    assert predict_run(folder, noise=(0.0,), methods=["mean"]).splits["test"].labels is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ["attention"]}, "method must be one of mean, dropout, post-hoc for this run, got 'attention'"),
        ({"num_samples": 1}, "num_samples must be an integer of at least 2, got 1"),
        ({"noise": (-1.0,)}, "noise must be from 0 to 5, got -1.0"),
    ],
)
def test_bad_option_of_evaluation_is_an_error(options, message, soft_run):
    with pytest.raises(ValueError, match="must be") as raised:
        predict_run(soft_run, **options)
    assert message in str(raised.value)


def measured_run(config, folder, data, noise=(0.0,)):
    train_run(load_config(config, FEW), folder, data=data)
    write_predictions(folder, predict_run(folder, num_samples=3, noise=noise))
    return measure_run(folder, num_resamples=5)


def test_f1_and_interval_are_those_of_the_predictions(tmp_path):
    header, *rows = GLUE["MRPC/train.tsv"].splitlines()
    many = "\n".join([header, *(row.replace(" .", f" {i} .") for i in range(9) for row in rows)])
    write_glue(tmp_path / "data", {"MRPC/train.tsv": many, "MRPC/dev.tsv": many})
    measured = measured_run("mrpc", tmp_path / "run", tmp_path / "data")
    split = read_predictions(tmp_path / "run").splits["test"]
    value = measured["methods"]["attention"]["splits"]["test"]["metrics"]["f1"]
    assert value["value"] == pytest.approx(f1(split.samples["attention"].mean(dim=0).argmax(dim=1), split.labels))
    assert value["low"] <= value["value"] <= value["high"]


def test_regression_is_measured_by_correlations_and_spread(tmp_path):
    header = GLUE["STS-B/dev.tsv"].splitlines()[0]
    rows = [f"{i}\tg\tf\t2012\t1\tn\tn\tA man {i}.\tA dog {i % 3}.\t{i % 6}" for i in range(30)]
    text = "\n".join([header, *rows])
    write_glue(tmp_path / "data", {"STS-B/train.tsv": text, "STS-B/dev.tsv": text})
    measured = measured_run("stsb", tmp_path / "run", tmp_path / "data")
    split = read_predictions(tmp_path / "run").splits["test"]
    values = measured["methods"]["attention"]["splits"]["test"]["metrics"]
    predicted = split.samples["attention"].double().mean(dim=0)[:, 0]
    assert values["pearson"]["value"] == pytest.approx(pearson(predicted, split.labels.double()))
    assert values["mean_deviation"]["value"] > 0.0
    assert measured["methods"]["mean"]["splits"]["test"]["metrics"]["mean_deviation"]["value"] == 0.0
    model = serve.load(tmp_path / "run", num_samples=3)
    assert "a score is neither right nor wrong" in model.note
    served = model("A man.", "A dog.")
    assert (served.probability, served.trust) == (None, None)
    assert served.deviation > 0.0


@pytest.fixture(scope="module")
def squad_runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("squad")
    write_squad(folder, "1.1", articles=17)
    write_squad(folder, "2.0", articles=13, impossible=(1,))
    runs = {name: folder / name for name in ("squad1", "squad2")}
    return runs, {name: measured_run(name, run, folder, (1.0,)) for name, run in runs.items()}


def test_answers_are_measured_by_exact_match_and_f1(squad_runs):
    runs, measured = squad_runs
    values = measured["squad1"]["methods"]["attention"]["splits"]["test"]
    answers = json.loads((runs["squad1"] / "answers.json").read_text())["splits"]["test"]["attention"]
    assert values["num_examples"] == len(answers) == 20
    assert values["metrics"]["f1"]["value"] == pytest.approx(sum(a["f1"] for a in answers) / 20)
    assert {"exact_match", "nll", "ece", "aurc"} <= values["metrics"].keys()


def test_right_answer_has_the_same_class_whatever_the_way_to_predict(squad_runs, monkeypatch):
    question = shifts.Question("q", "Which color?", "red or blue", (("blue", 7),), "T")
    ranked = {"mean": ["red", "blue", "x", "y", "z"], "attention": ["blue", "red", "x", "y", "z"]}
    shares = torch.tensor([[0.5, 0.2, 0.1, 0.05, 0.05, 0.1]])
    found = {method: spans.Answer(texts, shares, 0.0, shares[:, 0]) for method, texts in ranked.items()}
    monkeypatch.setattr(Predictor, "answers", lambda self, split, method, *_: [found[method]])
    run = load_run(squad_runs[0]["squad1"])
    splits = {"validation": Split([], questions=[question])}
    predictions, answers = predictor(run).predict(splits, methods=list(ranked), num_samples=2)
    split = predictions.splits["validation"]
    assert split.labels.tolist() == [1]
    assert {method: round(float(draws[0, 0, 1]), 6) for method, draws in split.samples.items()} == {
        "mean": 0.2, "attention": 0.5,
    }  # fmt: skip
    assert [answers["validation"][method][0]["is_right"] for method in ranked] == [False, True]


def test_calibration_of_answers_is_that_of_the_answers_given(squad_runs):
    values = squad_runs[1]["squad1"]["methods"]["attention"]["splits"]["test"]["metrics"]
    records = json.loads((squad_runs[0]["squad1"] / "answers.json").read_text())["splits"]["test"]["attention"]
    confidence, is_right = (torch.tensor([float(r[name]) for r in records]).double() for name in ("confidence", "is_right"))
    right = [r["right_probability"] for r in records]
    assert values["answer_nll"]["value"] == pytest.approx(-sum(math.log(p) for p in right) / len(right))
    assert values["answer_aurc"]["value"] == pytest.approx(float(aurc(confidence, is_right)))
    assert values["answer_ece"]["value"] == pytest.approx(float(expected_calibration_error(confidence, is_right)))
    # what `predict` trusts is chosen by the answers that are given, too
    records = json.loads((squad_runs[0]["squad1"] / "answers.json").read_text())["splits"]["validation"]["attention"]
    trust = squad_runs[1]["squad1"]["methods"]["attention"]["trust"]
    expected = choose_rule(
        *(torch.tensor([float(r[name]) for r in records]) for name in ("confidence", "is_right")), trust["num_samples"]
    )
    assert trust == expected.to_dict()


def test_unanswerable_questions_are_out_of_distribution_for_squad_1(squad_runs):
    splits = squad_runs[1]["squad1"]["methods"]["attention"]["splits"]
    scores = {"ood_auroc_entropy", "ood_auroc_mutual_information", "ood_auroc_answer", "ood_auroc_null_score"}
    assert scores <= splits["unanswerable"]["metrics"].keys()
    # one of two questions in each of seven articles
    assert splits["unanswerable"]["num_examples"] == 7
    assert "exact_match" not in splits["unanswerable"]["metrics"]


def test_unanswerable_questions_are_of_articles_that_were_not_trained_on(tmp_path):
    for version, articles in (("1.1", 17), ("2.0", 12)):
        write_squad(tmp_path, version, articles=articles, impossible=(1,) if version == "2.0" else ())
    first, second = (shifts.squad.load(TASKS[name], tmp_path)[0] for name in ("squad1", "squad2"))
    found = shifted_splits(TASKS["squad1"], first["test"], [1.0], tmp_path)["unanswerable"]
    tested = [{question.title for question in part} for part in (first["test"], second["test"])]
    # one article of 2.0's test split is in 1.1's validation split
    assert len(tested[1] - tested[0]) == 1
    assert {question.title for question in found} == tested[0] & tested[1]


def test_no_answer_threshold_is_chosen_on_validation(squad_runs):
    splits = squad_runs[1]["squad2"]["methods"]["mean"]["splits"]
    thresholds = {values["metrics"]["exact_match"]["null_threshold"] for values in splits.values()}
    assert len(thresholds) == 1
    # half of the questions have no answer, and leaving all is always possible
    assert splits["validation"]["metrics"]["exact_match"]["value"] >= 0.5


def test_question_is_answered_from_its_paragraph(squad_runs):
    context = "In Town1 the box 7 is dark blue and it is heavy."
    served = serve.load(squad_runs[0]["squad1"], num_samples=3)("What color is box 7?", context)
    assert served.label in context
    assert served.label
    assert 0.0 < served.probability < 1.0


def test_noise_has_the_strength_asked_for():
    texts = [f"{TEXT} {i}" for i in range(200)]
    changed = [character_noise(text, 1.0) for text in texts]
    assert changed != texts
    assert [character_noise(text, 1.0) for text in texts] == changed
    assert character_noise(TEXT, 0.0) == TEXT
    # words that are changed at a fifth: of 15 words the first stays as first with probability 0.8 plus doubling's 0.05
    kept = sum(word_noise(text, 1.0, ["zzz"]).split()[0] == "the" for text in texts) / 200
    # standard error 0.025; five of them
    assert abs(kept - 0.85) < 0.13


def test_noise_never_empties_a_text():
    assert all(character_noise(letter, 5.0).strip() and word_noise(letter, 5.0, ["b"]).strip() for letter in "abcdefghij")


def test_question_keeps_its_paragraph_under_noise(tmp_path):
    questions = shifts.squad.load(TASKS["squad1"], write_squad(tmp_path))[0]["test"]
    noisy = shifts.noisy(questions, "characters", 3.0)
    assert [q.context for q in noisy] == [q.context for q in questions]
    assert any(a.question != b.question for a, b in zip(noisy, questions))


def test_related_and_foreign_texts_are_found(tmp_path):
    write_glue(tmp_path)
    (tmp_path / "reviews.tsv").write_text("sentence\tlabel\nA long review .\t1\n")
    test = [Example(("so good", "so so"), 1)]
    assert shifted_splits(TASKS["mrpc"], test, (1.0,), tmp_path)["qqp"] == [Example(("Why?", "How come?"), 1)]
    assert shifted_splits(TASKS["qqp"], test, (1.0,), tmp_path)["mrpc"][0].label == 0
    # three classes become two: only entailment is entailment
    assert shifted_splits(TASKS["rte"], test, (1.0,), tmp_path)["mnli"] == [Example(("E.", "F."), 0)]
    found = shifted_splits(TASKS["sst2"], test, (1.0,), tmp_path)
    assert found["foreign-cola"] == [Example(("Stayed she.",), None)]
    assert found["reviews"] == [Example(("A long review .",), 1)]
    assert shifted_splits(TASKS["sst2"], test, (0.0,), tmp_path) == {}


def test_task_without_related_data_has_noise_only(tmp_path):
    found = shifted_splits(TASKS["mrpc"], [Example(("a b", "c d"), 1)], (0.5, 0.0), tmp_path)
    assert list(found) == ["characters-0.5", "words-0.5"]


def test_three_lines_of_python_answer(bayesian_run):
    model = serve.load(bayesian_run)
    served = model("the music was superb")
    assert served.label == "good"
    assert served.probability == max(served.probabilities.values())
    assert served == model("the music was superb")


def test_predict_prints_label_probability_and_p_value(bayesian_run, capsys):
    assert call("predict", bayesian_run, "--text", "a dull plot", "--samples", 5) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("bad  probability 0.")
    assert "p-value" in shown


def test_predict_reads_json_lines_from_standard_input(bayesian_run, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO('{"text": "a dull plot"}\n\n{"text": "warm music"}\n'))
    assert call("predict", bayesian_run, "--samples", 3) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["label"] for row in rows] == ["bad", "good"]
    assert rows[0]["truncated"] is False


def test_predict_answers_a_line_before_it_reads_the_next(bayesian_run, capsys, monkeypatch):
    answered = []

    def lines():
        for text in ("a dull plot", "warm music"):
            yield json.dumps({"text": text})
            answered.append(json.loads(capsys.readouterr().out)["label"])

    monkeypatch.setattr("sys.stdin", lines())
    assert call("predict", bayesian_run, "--samples", 3) == 0
    assert answered == ["bad", "good"]


def test_bad_line_of_a_file_is_an_error_with_its_number_before_any_answer(bayesian_run, capsys, tmp_path):
    (tmp_path / "texts.txt").write_text("a dull plot\n" * 40 + "\nwarm\tmusic\n")
    assert call("predict", bayesian_run, "--file", tmp_path / "texts.txt", "--samples", 3) == 2
    shown = capsys.readouterr()
    assert "line 42 must be 1 text that is not empty for task 'own', got ('warm', 'music')" in shown.err
    assert shown.out == ""


def test_predict_reads_files_and_says_what_was_cut(bayesian_run, capsys, tmp_path):
    (tmp_path / "texts.txt").write_text("a dull plot\n" + "superb " * 50 + "\n")
    assert call("predict", bayesian_run, "--file", tmp_path / "texts.txt", "--samples", 3) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["truncated"] for row in rows] == [False, True]


@pytest.mark.parametrize(
    ("options", "stdin", "message"),
    [
        (["--text", " "], "", "input 1 must be 1 text that is not empty for task 'own', got (' ',)"),
        (["--text", "a", "--second", "b"], "", "input 1 must be 1 text that is not empty for task 'own', got ('a', 'b')"),
        (["--second", "b"], "", "--second is given without --text"),
        (["--text", "a", "--file", "x"], "", "both --text and --file are given"),
        (["--file", "nowhere.txt"], "", "nowhere.txt"),
        (
            ["--text", "a", "--method", "dropout"],
            "",
            "method must be one of mean, attention, attention+dropout for this run, got 'dropout'",
        ),
        ([], '{"text": "a"}\n{"text": 3}\n', "line 2 is"),
        ([], "{\n", "line 1: not JSON"),
        ([], "[" * 100_000, "line 1: nested too deeply"),
        ([], '\n{"text": " "}\n', "line 2 must be 1 text that is not empty for task 'own', got (' ',)"),
    ],
)
def test_bad_input_of_predict_is_one_line(options, stdin, message, bayesian_run, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
    assert call("predict", bayesian_run, *options) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_predict_says_which_recipe_it_is_for(bayesian_run, tmp_path, capsys):
    run = json.loads((bayesian_run / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps(run | {"recipe": "vqa"}))
    assert call("predict", tmp_path, "--text", "a") == 2
    refusal = capsys.readouterr().err
    assert "is a run of recipe 'vqa', which has no module 'serve' and so cannot answer for new inputs" in refusal
    assert refusal.endswith("Use a run of 'language'\n")


@pytest.mark.skipif(shared_data() is None, reason="the shared data folder is not there")
def test_mrpc_of_the_shared_data_has_qqp_as_its_shift():
    found = shifted_splits(TASKS["mrpc"], [], (1.0,), shared_data())
    assert len(found["qqp"]) == 650
