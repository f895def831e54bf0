"""The launcher finds a compiled kernel again, and only for arguments it was compiled for; without a GPU, with a fake one."""

import pytest
import torch

from bayesattn.ops.common import launch as launcher

STREAM = 7


class FakeKernel:
    """Counts compilations, and remembers what its compiled kernels were called with."""

    arg_names = ("X", "size", "factor", "WIDE", "BLOCK")

    def __init__(self):
        self.fn = type("fake_kernel", (), {})
        self.compilations, self.observed, self.launches = 0, 0, []

    def __getitem__(self, grid):
        def compile_and_launch(*args, **constants):
            self.compilations += 1
            return FakeCompiled(self, args)

        return compile_and_launch


class FakeCompiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self, kernel, args):
        # in place of a tensor comes its address
        self.kernel, self.kinds = kernel, [int if isinstance(x, torch.Tensor) else type(x) for x in args]

    def run(self, x, y, z, *args):
        assert args[:6] == (STREAM, self.function, self.packed_metadata, None, None, None)
        self._remember((x, y, z), args[6:])

    def __getitem__(self, grid):
        def run(*args, stream):
            assert stream == STREAM
            self.kernel.observed += 1
            self._remember(grid, args)

        return run

    def _remember(self, grid, args):
        assert [int if isinstance(x, torch.Tensor) else type(x) for x in args[: len(self.kinds)]] == self.kinds
        self.kernel.launches.append((grid, args))


class Elsewhere(torch.Tensor):
    """A tensor that says to lie on a GPU."""

    def get_device(self):
        return 0


class FakeDriver:
    class active:
        get_current_stream = staticmethod(lambda index: STREAM)


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launcher, "INTERPRETED", False)
    monkeypatch.setattr(launcher, "driver", FakeDriver)
    return FakeKernel()


def launch(kernel, x, size, factor=0.5, block=64):
    launcher.prepared(kernel, (3, 2), size, factor, BLOCK=block, WIDE=True, num_warps=4)(x)


def test_the_second_launch_goes_to_the_compiled_kernel_with_everything_by_position(kernel):
    x = torch.zeros(64)
    before = launcher.LAUNCHES["fake"]
    launch(kernel, x, 37)
    launch(kernel, x, 37, factor=0.25)
    assert kernel.compilations == 1
    assert kernel.launches == [((3, 2, 1), (x.data_ptr(), 37, 0.25, True, 64))]
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


def test_a_tensor_elsewhere_goes_to_triton_which_looks_at_it_and_not_by_its_address_to_the_kernel(kernel):
    x = torch.zeros(64)
    both = launcher.prepared(kernel, (3,), 37, 0.5, BLOCK=64, WIDE=True)
    both(x, x)
    both(x, x)
    assert kernel.compilations == 1
    both(x, x.as_subclass(Elsewhere))
    assert kernel.compilations == 2
    assert len(kernel.launches) == 1


def test_whole_numbers_and_fractions_of_the_same_value_are_two_kernels(kernel):
    for factor in (2, 2.0, 2, 2.0, 2):
        launch(kernel, torch.zeros(64), 37, factor=factor)
    assert kernel.compilations == 2


def test_equal_arguments_find_the_same_launch_and_other_types_another(kernel):
    assert launcher.prepared(kernel, (3,), 2, BLOCK=64) is launcher.prepared(kernel, (3,), 2, BLOCK=64)
    assert launcher.prepared(kernel, (3,), 2, BLOCK=64) is not launcher.prepared(kernel, (3,), 2.0, BLOCK=64)


def test_a_profiler_that_listens_hears_of_every_launch(kernel):
    def listen(metadata):
        raise AssertionError("the fake kernel calls no hooks")

    x = torch.zeros(64)
    launch(kernel, x, 37)
    launch(kernel, x, 37)
    assert kernel.observed == 0
    hooks = launcher.knobs.runtime.launch_enter_hook
    hooks.add(listen)
    try:
        launch(kernel, x, 37)
    finally:
        hooks.remove(listen)
    assert (kernel.compilations, kernel.observed, len(kernel.launches)) == (1, 1, 2)
