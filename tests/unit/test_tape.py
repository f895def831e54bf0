"""Recorded launches are replayed with other addresses, and only where nothing but the addresses differs."""

import pytest
import torch
from test_launch import FakeDriver, FakeKernel

from bayesattn.ops.common import launch as launcher
from bayesattn.ops.common import tape as tapes
from bayesattn.ops.common.tape import Tape


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launcher, "INTERPRETED", False)
    monkeypatch.setattr(tapes, "INTERPRETED", False)
    monkeypatch.setattr(launcher, "driver", FakeDriver)
    return FakeKernel()


def call(tape, kernel, x, memory, missing=None):
    """Make two launches, one with parts of an array; return whether they were replayed."""
    arrays = (x, missing, memory)
    if tape.replay(arrays):
        return True
    with tape.recording(arrays):
        launcher.prepared(kernel, (3, 2), 37, 0.5, BLOCK=64, WIDE=True)(x, memory[4:], missing)
        launcher.prepared(kernel, (5,), 41, 0.5, BLOCK=64, WIDE=True)(memory[8:], memory, x)
    return False


def test_the_call_after_the_first_that_found_its_kernels_is_replayed(kernel):
    tape = Tape()
    x, memory = torch.zeros(16), torch.zeros(16)
    assert not call(tape, kernel, x, memory)
    kernel.launches.clear()
    before = launcher.LAUNCHES["fake"]
    other, elsewhere = torch.zeros(16), torch.zeros(16)
    assert call(tape, kernel, other, elsewhere)
    base = elsewhere.data_ptr()
    assert kernel.launches == [
        ((3, 2, 1), (other.data_ptr(), base + 16, None, 37, 0.5, True, 64)),
        ((5, 1, 1), (base + 32, base, other.data_ptr(), 41, 0.5, True, 64)),
    ]
    assert launcher.LAUNCHES["fake"] == before + 2


def test_an_array_at_an_odd_address_is_not_replayed(kernel):
    tape = Tape()
    x, memory = torch.zeros(16), torch.zeros(16)
    call(tape, kernel, x, memory)
    assert call(tape, kernel, x, memory)
    assert not call(tape, kernel, torch.zeros(17)[1:], memory)
    assert call(tape, kernel, x, memory)


def test_while_a_profiler_listens_triton_launches(kernel):
    tape = Tape()
    x, memory = torch.zeros(16), torch.zeros(16)
    call(tape, kernel, x, memory)
    hooks = launcher.knobs.runtime.launch_enter_hook

    def listen(metadata):
        raise AssertionError("the fake kernel calls no hooks")

    hooks.add(listen)
    try:
        assert not call(tape, kernel, x, memory)
    finally:
        hooks.remove(listen)
    assert kernel.observed == 2


def test_an_array_that_the_tape_was_not_given_is_an_error(kernel):
    tape, x = Tape(), torch.zeros(16)

    def record():
        with tape.recording((x,)):
            launcher.prepared(kernel, (3,), 37, 0.5, BLOCK=64, WIDE=True)(x, torch.zeros(16))

    # compiles, and is recorded at once
    with pytest.raises(RuntimeError, match=r"shape \(16,\) that is not among those of its tape"):
        record()


def test_a_failed_call_leaves_no_recorder_behind(kernel):
    tape, x = Tape(), torch.zeros(16)
    with pytest.raises(ZeroDivisionError), tape.recording((x,)):
        raise ZeroDivisionError
    assert launcher._local.made is None


def test_an_empty_part_of_an_array_begins_where_the_array_does():
    memory = torch.zeros(64)
    assert tapes._place(memory[64:], [None, memory]) == (1, 0)
    assert tapes._place(memory[16:], [None, memory]) == (1, 64)
