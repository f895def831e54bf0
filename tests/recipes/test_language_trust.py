"""`trust` of an answer: a threshold on its probability, chosen on validation data, kept with the run, and explained."""

import io
import json
import shutil

import pytest
import torch
from language_files import call, trained

from bayesattn.metrics import SelectivePredictor
from bayesattn_recipes.language import serve
from bayesattn_recipes.language.trust import TrustRule, choose_rule, read_rule


@pytest.fixture
def run(tmp_path):
    """A run that was never evaluated."""
    folder = tmp_path / "run"
    shutil.copytree(trained("BAM-WC"), folder, ignore=shutil.ignore_patterns("metrics.json", "predictions.safetensors"))
    return folder


def write_rule(folder, **changes):
    rule = {"threshold": 0.9, "error": 0.05, "level": 0.95, "num_samples": 5, "num_examples": 211, "coverage": 0.5}
    methods = {"attention": {"trust": {**rule, **changes}}}
    (folder / "metrics.json").write_text(json.dumps({"schema": "bayesattn.metrics/1", "methods": methods}))


def test_the_threshold_is_that_of_the_strictest_error_rate_that_can_be_promised():
    confidence = torch.linspace(0.5, 1.0, 997, dtype=torch.float64)
    # wrong below 0.7: what is trusted lies above
    correct = confidence > 0.7
    rule = choose_rule(confidence, correct, 7)
    expected = SelectivePredictor.for_error(confidence, correct, 0.05, level=0.95)
    assert rule == TrustRule(expected.threshold, 0.05, 0.95, 7, 997, expected.calibration.coverage)
    assert 0.68 < expected.threshold < 0.75
    # 61 right answers promise 10 %, not 5 %; everything is trusted
    few = choose_rule(confidence[-61:], correct[-61:], 7)
    assert (few.error, few.coverage, few.threshold) == (0.1, 1.0, 0.0)


def test_too_few_validation_texts_promise_nothing():
    rule = choose_rule(torch.linspace(0.5, 1.0, 7, dtype=torch.float64), torch.ones(7), 3)
    assert rule.threshold is None
    assert str(rule).startswith("no answer is marked: 7 validation texts cannot promise that at most 20 %")


def test_a_run_without_a_threshold_says_so_and_how_to_get_one(run, capsys):
    assert call("predict", run, "--text", "a dull plot", "--samples", 3) == 0
    line, about = capsys.readouterr().out.splitlines()
    assert line.startswith("bad  probability 0.")
    assert "trust" not in line
    command = f"bayesattn evaluate {run} --method attention"
    assert about == f"no answer is marked: the run has no threshold yet for method 'attention'; run `{command}`"


def test_evaluate_keeps_the_threshold_and_predict_applies_and_explains_it(run, capsys):
    assert call("evaluate", run, "--samples", 7, "--noise", "0", "--resamples", 0, "--method", "attention") == 0
    kept = json.loads((run / "metrics.json").read_text())["methods"]["attention"]["trust"]
    rule = read_rule(run, "attention")
    assert rule is not None
    assert rule.to_dict() == kept
    assert (rule.num_samples, rule.error) == (7, 0.1)
    model = serve.load(run)
    assert model.num_samples == 7
    served = model("the music was superb")
    assert served.trust is True
    assert served.probability >= rule.threshold
    capsys.readouterr()
    assert call("predict", run, "--text", "the music was superb") == 0
    line, about = capsys.readouterr().out.splitlines()
    assert line.endswith("  trust")
    assert about == str(rule)
    assert "at most 10 % of the trusted answers are wrong" in about
    assert read_rule(run, "mean") is None


def test_an_answer_below_the_threshold_is_not_trusted_however_small_its_p_value(run, capsys):
    write_rule(run, threshold=1.0)
    served = serve.load(run)("a dull plot")
    assert (served.label, served.trust) == ("bad", False)
    assert served.p_value < 0.05
    assert call("predict", run, "--text", "a dull plot") == 0
    line, about = capsys.readouterr().out.splitlines()
    assert line.endswith("do not trust")
    assert about == (
        "trust means a probability of at least 1.000: at most 5 % of the trusted answers are wrong, for texts like the 211 "
        "of the validation split (95 % sure), of which 50 % are trusted"
    )
    # the threshold itself is trusted
    write_rule(run, threshold=served.probability)
    assert serve.load(run)("a dull plot").trust is True


def test_a_threshold_is_for_its_number_of_draws(run):
    write_rule(run)
    model = serve.load(run, num_samples=3)
    assert model("a dull plot").trust is None
    assert "the threshold is for 5 draws, not 3; run" in model.note
    assert model.note.endswith("--method attention --samples 3`")


def test_answers_without_a_promise_are_not_marked(run):
    write_rule(run, threshold=None)
    model = serve.load(run)
    assert model("a dull plot").trust is None
    assert "cannot promise" in model.note


@pytest.mark.parametrize("changes", [{"threshold": "high"}, {"error": None}, {"num_samples": 2.5}, {"more": 1}])
def test_a_rule_that_cannot_be_read_is_one_line(run, changes, capsys):
    write_rule(run, **changes)
    assert call("predict", run, "--text", "a") == 2
    error = capsys.readouterr().err
    assert f"Run `bayesattn evaluate {run}` again" in error
    assert error.count("\n") == 1


def test_what_trust_means_is_not_among_the_answers_for_a_program(run, capsys, monkeypatch):
    write_rule(run)
    monkeypatch.setattr("sys.stdin", io.StringIO('{"text": "a dull plot"}\n'))
    assert call("predict", run) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["trust"] in (True, False)
    assert shown.err == "trust means " + shown.err.removeprefix("trust means ")


def test_every_text_is_answered(run, capsys):
    write_rule(run)
    assert call("predict", run, "--text", "a dull plot", "--text", "warm music") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("  ")[0] for line in lines[:-1]] == ["bad", "good"]
    assert call("predict", run, "--text", "a", "--text", "b", "--second", "c") == 2
    assert "--second is given 1 times with 2 --text. Give one for every --text" in capsys.readouterr().err
