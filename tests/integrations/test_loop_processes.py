"""The same global batch on one, two or four processes is the same training; FSDP is DDP; both resume exactly."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bayesattn.files import read_tensors

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    script = Path(__file__).parent / "loop_processes.py"
    ended = subprocess.run([sys.executable, script, folder], capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-5000:]
    return folder


def assert_same_training(folder, one, other):
    first, second = torch.load(folder / f"{one}.pt"), torch.load(folder / f"{other}.pt")
    assert len(first["rows"]) == len(second["rows"])
    for row, same in zip(first["rows"], second["rows"], strict=True):
        for name in ("train_nll", "train_kl", "validation_nll"):
            # float64 sums in another order, carried through twelve steps
            assert row[name] == pytest.approx(same[name], rel=1e-10), (name, row, same)
    for name, value in first["parameters"].items():
        torch.testing.assert_close(
            second["parameters"][name], value, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(("case", "world"), [("plain", 2), ("plain", 4), ("empty shares", 4)])
def test_any_number_of_processes_gives_the_same_losses_and_parameters(results, case, world):
    assert_same_training(results, f"{case}-1", f"{case}-{world}")


def test_accumulation_over_processes_gives_the_same(results):
    assert_same_training(results, "plain-1", "accumulated-2")


def test_the_kl_is_not_multiplied_by_the_processes(results):
    assert_same_training(results, "strong KL-1", "strong KL-2")
    # and it is there: fifty times its weight changes the parameters
    strong, plain = (torch.load(results / f"{name}-1.pt")["parameters"] for name in ("strong KL", "plain"))
    assert any(not torch.allclose(strong[name], plain[name], rtol=1e-2) for name in strong)


def test_noise_by_process_is_another_draw(results):
    with pytest.raises(AssertionError):
        assert_same_training(results, "by process-1", "by process-2")


@pytest.mark.parametrize("case", ["plain", "accumulated"])
def test_fsdp_is_ddp(results, case):
    assert_same_training(results, f"{case}-2", f"{case}-fsdp")


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_resume_exactly(results, kind):
    for name in ("log.jsonl", "checkpoint.safetensors"):
        assert (results / f"whole-{kind}" / name).read_bytes() == (results / f"ended-{kind}" / name).read_bytes(), name


def test_a_run_of_two_processes_may_be_finished_by_one(results):
    """Examples, noise and objective stay; dropout masks are drawn anew, so the result is near, not equal."""
    assert (results / "fewer" / "run.json").exists()
    tensors, _ = read_tensors(results / "fewer" / "checkpoint.safetensors")
    assert all(bool(torch.isfinite(value).all()) for value in tensors.values())
