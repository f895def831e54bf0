"""The benchmark harness: what it writes, what it refuses, and the one claim that does not depend on the clock."""

import csv

import pytest
import torch

from bayesattn.bench import harness, run_suite
from bayesattn.bench.model import build_encoder, training_step
from bayesattn.bench.plot import plot_ratios


def test_ratios_are_to_the_first_provider_of_the_same_case_and_mode(tmp_path, capsys):
    suite = harness.Suite("toy", "cpu")
    small, large = torch.randn(40, 40), torch.randn(400, 400)
    suite.run("a", "base", "forward", lambda: small @ small)
    suite.run("a", "other", "forward", lambda: large @ large)
    suite.run("b", "base", "forward", lambda: large @ large)
    first, second, third = suite.rows
    assert first.ratio == third.ratio == 1.0
    assert second.ratio == pytest.approx(second.median_ms / first.median_ms)
    assert first.p20_ms <= first.median_ms <= first.p80_ms
    assert "other" in capsys.readouterr().out
    harness.write_csv(suite.rows, tmp_path / "toy.csv")
    with open(tmp_path / "toy.csv", newline="", encoding="utf-8") as file:
        written = list(csv.DictReader(file))
    assert [row["provider"] for row in written] == ["base", "other", "base"]
    assert {path.name for path in tmp_path.iterdir()} == {"toy.csv"}
    assert len(plot_ratios(suite.rows).axes) == 1


def test_peak_memory_counts_what_is_alive_at_once():
    def two_at_once() -> None:
        a = torch.empty(2**20)
        b = torch.empty(2**20)
        del a, b

    def one_after_the_other() -> None:
        for _ in range(3):
            torch.empty(2**20)

    assert harness.peak_memory(two_at_once, device="cpu") == pytest.approx(8.0, abs=0.1)
    assert harness.peak_memory(one_after_the_other, device="cpu") == pytest.approx(4.0, abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [4, 8])
def test_a_bayesian_training_step_needs_at_most_half_as_much_memory_again(heads):
    inputs = torch.randn(8, 256, 256)
    peaks = []
    for variant in ("soft", "BAM-WC"):
        model = build_encoder(variant, dim=256, heads=heads, layers=4)
        peaks.append(harness.peak_memory(training_step(model, inputs, with_kl=variant != "soft"), device="cpu"))
    assert peaks[1] <= 1.5 * peaks[0]


@pytest.mark.parametrize(
    ("device", "out", "message"),
    [("tpu", "x.csv", "device is 'tpu'; allowed"), ("cpu", "x.txt", "out is 'x.txt'; allowed: a path that ends in .csv")],
)
def test_bad_arguments_are_named_before_anything_runs(tmp_path, monkeypatch, device, out, message):
    monkeypatch.chdir(tmp_path)
    from pathlib import Path

    with pytest.raises(ValueError, match=message):
        run_suite("model", device, Path(out))
    assert not list(tmp_path.iterdir())
