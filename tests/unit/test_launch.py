"""The launcher finds a compiled kernel again, and only for arguments it was compiled for; without a GPU, with a fake one."""

import pytest
import torch

from bayesattn.ops import launch as launcher


class FakeKernel:
    """Counts compilations, and remembers what its compiled kernels were called with."""

    arg_names = ("X", "size", "factor", "WIDE", "BLOCK")

    def __init__(self):
        self.fn = type("fake_kernel", (), {})
        self.compilations, self.launches = 0, []

    def __getitem__(self, grid):
        def compile_and_launch(*args, **constants):
            self.compilations += 1
            return FakeCompiled(self, args)

        return compile_and_launch


class FakeCompiled:
    def __init__(self, kernel, args):
        self.kernel, self.kinds = kernel, list(map(type, args))

    def __getitem__(self, grid):
        def run(*args):
            assert list(map(type, args[: len(self.kinds)])) == self.kinds
            self.kernel.launches.append((grid, args))

        return run


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launcher, "INTERPRETED", False)
    return FakeKernel()


def launch(kernel, x, size, factor=0.5, block=64):
    launcher.launch(kernel, (3, 2), x, size, factor, BLOCK=block, WIDE=True, num_warps=4)


def test_the_second_launch_goes_to_the_compiled_kernel_with_everything_by_position(kernel):
    x = torch.zeros(64)
    before = launcher.LAUNCHES["fake"]
    launch(kernel, x, 37)
    launch(kernel, x, 37, factor=0.25)
    assert kernel.compilations == 1
    assert kernel.launches == [((3, 2, 1), (x, 37, 0.25, True, 64))]
    assert launcher.LAUNCHES["fake"] == before + 2


def test_sizes_of_the_same_kind_share_a_kernel(kernel):
    x = torch.zeros(64)
    for size in (37, 38, 41):
        launch(kernel, x, size)
    assert kernel.compilations == 1
    assert [args[1] for _, args in kernel.launches] == [38, 41]


def test_what_triton_specialises_on_compiles_anew(kernel):
    x = torch.zeros(64)
    cases = [(x, 37), (x, 1), (x, 48), (x, 2**31 + 1), (x, 2**32), (x.half(), 37), (x[1:], 37), (x, None)]
    for case in cases * 2:
        launch(kernel, *case)
    assert kernel.compilations == len(cases)
    launch(kernel, x, 37, block=32)
    assert kernel.compilations == len(cases) + 1


def test_whole_numbers_and_fractions_of_the_same_value_are_two_kernels(kernel):
    for factor in (2, 2.0, 2, 2.0, 2):
        launch(kernel, torch.zeros(64), 37, factor=factor)
    assert kernel.compilations == 2


def test_many_different_sizes_do_not_pile_up(kernel, monkeypatch):
    monkeypatch.setattr(launcher, "_MOST_RECENT", 5)
    monkeypatch.setattr(launcher, "_RECENT", {})
    for size in range(101, 201, 2):
        launch(kernel, torch.zeros(64), size)
    assert len(launcher._RECENT) <= 5
    assert kernel.compilations == 1
