"""The scripts in examples/ run, and come out where their texts say."""

import importlib.util
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_run_here():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {"bert_classifier", "sampled_generation", "graph_attention"}


@pytest.mark.slow
def test_bert_classifier_learns_and_its_surer_half_is_better(capsys):
    # nine of ten can be had: the 80 % that can be known, and half of the tossed ones
    assert load("bert_classifier").main(steps=300) > 0.8
    last = capsys.readouterr().out.splitlines()[-1]
    overall, surer = (float(part.split()[-1]) for part in last.split(";"))
    assert surer > overall


def test_sampled_generation_gives_draws_that_differ():
    result = load("sampled_generation").main(num_samples=4)
    assert result.tokens.shape[:2] == (4, 2)
    assert bool((result.disagreement > 0).all())


def test_graph_attention_learns():
    assert load("graph_attention").main(epochs=60) > 0.8
