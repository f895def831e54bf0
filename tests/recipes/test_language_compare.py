"""Two runs compared on the same test examples."""

import csv
import json
import sys

import pytest
import torch
from language_files import call, trained

from bayesattn.evaluation.runs import Predictions, SplitPredictions, write_predictions, write_run
from bayesattn_recipes.language import compare as comparing
from bayesattn_recipes.language.compare import compare, example_measures
from bayesattn_recipes.language.measure import write_answers


def write_side(folder, probabilities, labels, *, task="mrpc", seed=0, samples=1):
    """Write a run that predicted one split; the draws differ, their mean is what is given."""
    mean = torch.tensor(probabilities)
    draws = torch.stack([mean + 0.01 * (2 * i - samples + 1) * torch.tensor([1.0, -1.0]) for i in range(samples)])
    split = SplitPredictions({"mean": draws}, torch.tensor(labels))
    write_predictions(folder, Predictions({"test": split}, ["a", "b"], ["mean"], seed=0))
    write_run(folder, recipe="language", variant="soft", config={"task": task}, seed=seed)
    return folder


def test_measures_by_hand(tmp_path):
    folder = write_side(tmp_path, [[0.8, 0.2], [0.4, 0.6], [0.7, 0.3]], [0, 1, 1], samples=3)
    found = example_measures(folder, "mean", "test")
    assert found["accuracy"].tolist() == [1.0, 1.0, 0.0]
    expected = -torch.tensor([0.8, 0.6, 0.3], dtype=torch.float64).log()
    # probabilities are kept in float32
    torch.testing.assert_close(found["nll"], expected, atol=1e-6, rtol=1e-6)


def test_difference_is_the_first_minus_the_second_with_an_interval_around_it(tmp_path):
    generator = torch.Generator().manual_seed(0)
    right = 0.2 + 0.6 * torch.rand(2, 211, generator=generator)
    sides = [
        write_side(tmp_path / str(i), torch.stack([p, 1 - p], dim=1).tolist(), [0] * 211, seed=i)
        for i, p in enumerate(right)
    ]
    accuracy, nll = compare((sides[0], "mean"), (sides[1], "mean"))
    gap = (right[1].log() - right[0].log()).double()
    assert nll.value == pytest.approx(float(gap.mean()), abs=1e-6)
    # a bootstrap of a mean of 211 values has the width of the normal interval, to a few per cent
    assert nll.high - nll.low == pytest.approx(2 * 1.96 * float(gap.std()) / 211**0.5, rel=0.1)
    assert nll.low < nll.value < nll.high
    assert (accuracy.num_examples, accuracy.seeds, accuracy.first) == (211, "0/1", "soft:mean")


def test_answers_are_compared_by_their_own_measures(tmp_path):
    for name, value in (("a", 1.0), ("b", 0.0)):
        record = {"exact_match": value, "f1": 0.5, "right_probability": 0.5 + 0.25 * value}
        write_answers(tmp_path / name, {"test": {"mean": [record] * 3}})
        write_run(tmp_path / name, recipe="language", variant="soft", config={"task": "squad1"}, seed=0)
    found = {d.metric: d.value for d in compare((tmp_path / "a", "mean"), (tmp_path / "b", "mean"))}
    assert found == pytest.approx({"exact_match": 1.0, "f1": 0.0, "answer_nll": -float(torch.tensor(1.5).log())})


def test_runs_of_other_examples_are_an_error(tmp_path):
    first = write_side(tmp_path / "a", [[0.8, 0.2]], [0])
    second = write_side(tmp_path / "b", [[0.8, 0.2], [0.5, 0.5]], [0, 1])
    with pytest.raises(ValueError, match="must have the same examples, got 1 of 'mrpc' and 2 of 'mrpc'"):
        compare((first, "mean"), (second, "mean"))
    with pytest.raises(ValueError, match="no labeled predictions of split 'test' and method 'dropout'"):
        compare((first, "dropout"), (second, "mean"))


def test_command_compares_trained_runs(tmp_path, monkeypatch, capsys):
    runs = {}
    for variant, method in (("soft", "mean"), ("BAM-WC", "attention")):
        assert call("evaluate", trained(variant), "--samples", 3, "--noise", "0", "--resamples", 0) == 0
        runs[variant] = f"{trained(variant)}:{method}"
    out = tmp_path / "differences.csv"
    monkeypatch.setattr(sys, "argv", ["compare", runs["BAM-WC"], runs["soft"], "--out", str(out)])
    comparing.main()
    rows = list(csv.DictReader(out.read_text().splitlines()))
    measured = [
        json.loads((trained(variant) / "metrics.json").read_text())["methods"][method]["splits"]["test"]["metrics"]
        for variant, method in (("BAM-WC", "attention"), ("soft", "mean"))
    ]
    for row in rows:
        values = [side[row["metric"]]["value"] for side in measured]
        assert float(row["value"]) == pytest.approx(values[0] - values[1], abs=1e-6)
    assert "BAM-WC:attention − soft:mean" in capsys.readouterr().out
