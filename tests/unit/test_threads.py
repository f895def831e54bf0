"""Two threads with a model each do not see each other: KL, keyed noise, sampling switches."""

import threading

import pytest
import torch
from torch import nn

import bayesattn as ba
from bayesattn.noise.keyed import example_seeds, keyed_noise
from bayesattn.prediction import sampling

STEPS = 30


def model(seed, dropout=0.0):
    torch.manual_seed(seed)
    config = ba.AttentionConfig("BAM-WC", weibull_k=2.0)
    layer = ba.nn.TransformerEncoderLayer(6, 2, 12, dropout=dropout, batch_first=True, config=config)
    return nn.TransformerEncoder(layer, 2)


def in_threads(*functions):
    """Run functions at the same time and raise what they raise."""
    errors = []

    def guarded(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def losses(module, inputs, seed, results, barrier=None):
    """Train for some steps with noise that belongs to this model alone, and note loss and KL of every step."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    for step in range(STEPS):
        if barrier is not None:
            barrier.wait()
        with keyed_noise(example_seeds(seed, step, torch.arange(len(inputs)))):
            with ba.record_kl(module) as kl:
                nll = module(inputs).square().mean()
            assert len(kl) == 2
            total = kl.total()
            (nll + total).backward()
        optimizer.step()
        optimizer.zero_grad()
        results.append((float(nll.detach()), float(total.detach())))


def test_record_kl_in_two_threads_counts_each_model_alone():
    inputs = [torch.randn(3, 5, 6), torch.randn(4, 7, 6)]
    together, alone = ([], []), ([], [])
    barrier = threading.Barrier(2, timeout=60)
    modules = [model(0), model(1)]
    in_threads(*(lambda i=i: losses(modules[i], inputs[i], i, together[i], barrier) for i in range(2)))
    for i, module in enumerate((model(0), model(1))):
        losses(module, inputs[i], i, alone[i])
    assert together == alone


def test_sampling_in_one_thread_leaves_the_other_model_deterministic():
    sampled, plain, x = model(0).eval(), model(1).eval(), torch.randn(3, 5, 6)
    with torch.no_grad():
        expected = plain(x)
    barrier, draws = threading.Barrier(2, timeout=60), []

    def draw():
        with sampling(sampled), torch.no_grad():
            for _ in range(STEPS):
                barrier.wait()
                draws.append(sampled(x))

    def stay():
        with torch.no_grad():
            for _ in range(STEPS):
                barrier.wait()
                assert torch.equal(plain(x), expected)

    in_threads(draw, stay)
    assert len({tuple(output.flatten().tolist()) for output in draws}) == STEPS


def test_torchs_switch_is_off_while_any_thread_samples_dropout_and_then_back():
    """The scopes of two threads overlap: the first to end must not switch the fused layers on under the other."""
    assert torch.backends.mha.get_fastpath_enabled()
    modules = [model(0, dropout=0.5).eval(), model(1, dropout=0.5).eval()]
    first_is_in, second_is_in, first_is_out = threading.Event(), threading.Event(), threading.Event()
    seen = []

    def first():
        with sampling(modules[0], dropout=True):
            first_is_in.set()
            assert second_is_in.wait(60)
        first_is_out.set()

    def second():
        assert first_is_in.wait(60)
        with sampling(modules[1], dropout=True):
            second_is_in.set()
            assert first_is_out.wait(60)
            seen.append(torch.backends.mha.get_fastpath_enabled())

    in_threads(first, second)
    assert seen == [False]
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_scope_of_another_thread_records_nothing_here():
    module, x = model(0), torch.randn(3, 5, 6)
    with ba.record_kl() as kl:
        in_threads(lambda: module(x))
    assert len(kl) == 0
    with pytest.raises(RuntimeError, match="nothing was recorded"):
        kl.total()
