"""Inside keyed_noise() an example's draws belong to the example: not to its neighbors, its place or its process."""

import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import bayesattn as ba
from bayesattn import functional, record_kl
from bayesattn.noise.keyed import derive_seeds, example_seeds, keyed_noise

CONFIG = ba.AttentionConfig("BAM-WC", weibull_k=1.0)
TOKENS, WIDTH = 5, 6


def layer(seed=0):
    torch.manual_seed(seed)
    return ba.nn.MultiheadAttention(WIDTH, 2, batch_first=True, config=CONFIG, dtype=torch.float64)


def inputs(count=7):
    return torch.randn(count, TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def attend(module, x):
    return module(x, x, x, need_weights=False)[0]


def test_an_example_gets_its_noise_wherever_it_stands():
    module, x, seeds = layer(), inputs(), example_seeds(3, 11, torch.arange(7))
    order = torch.tensor([4, 0, 6])
    with keyed_noise(seeds):
        whole = attend(module, x)
    torch.manual_seed(99)
    with keyed_noise(seeds[order]):
        some = attend(module, x[order])
    # the same float64 numbers in matrix products of another size
    torch.testing.assert_close(some, whole[order], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("change", ["seed", "step", "example"])
def test_another_seed_step_or_example_gets_other_noise(change):
    at = {"seed": 3, "step": 11, "example": 0}
    outputs = []
    for shift in (0, 1):
        values = {**at, change: at[change] + shift}
        seeds = example_seeds(values["seed"], values["step"], torch.arange(7) + 100 * values["example"])
        with keyed_noise(seeds):
            outputs.append(attend(layer(), inputs()))
    assert bool((outputs[0] != outputs[1]).all(dim=-1).all())


def test_every_call_of_a_module_gets_other_noise():
    module, x = layer(), inputs()
    with keyed_noise(example_seeds(0, 0, torch.arange(7))):
        outputs = [attend(module, x) for _ in range(40)]
    assert len({tuple(output.flatten().tolist()) for output in outputs}) == 40


def test_windows_of_an_example_get_noise_of_their_own_that_does_not_depend_on_the_batch():
    module, x, seeds = layer(), inputs(6), example_seeds(0, 0, torch.tensor([8, 2]))
    with keyed_noise(seeds):
        whole = attend(module, x[:1].expand(6, -1, -1))
    with keyed_noise(seeds[1:]):
        second = attend(module, x[:1].expand(3, -1, -1))
    torch.testing.assert_close(second, whole[3:], rtol=1e-12, atol=1e-12)
    assert len({tuple(output.flatten().tolist()) for output in whole}) == 6


def test_a_batch_that_is_no_multiple_of_the_examples_is_refused():
    with (
        keyed_noise(example_seeds(0, 0, torch.arange(3))),
        pytest.raises(ValueError, match=r"3 seeds needs .* a multiple of 3, got a batch of 7"),
    ):
        attend(layer(), inputs())


def test_scopes_do_not_nest():
    seeds = example_seeds(0, 0, torch.arange(3))
    with keyed_noise(seeds), pytest.raises(RuntimeError, match=r"keyed_noise\(\) cannot be nested"), keyed_noise(seeds):
        pass


def test_without_a_scope_torchs_generator_draws():
    module, x = layer(), inputs()
    results = []
    for scope_before in (False, True):
        if scope_before:
            with keyed_noise(example_seeds(0, 0, torch.arange(7))):
                attend(module, x)
        torch.manual_seed(5)
        results.append(attend(module, x))
    assert torch.equal(results[0], results[1])


def test_a_seed_given_by_hand_goes_before():
    q = torch.randn(2, 1, 3, 4)
    outputs = [functional.attention(q, q, q, config=CONFIG, seed=5, need_kl=False)[0]]
    with keyed_noise(example_seeds(0, 0, torch.arange(2))):
        outputs.append(functional.attention(q, q, q, config=CONFIG, seed=5, need_kl=False)[0])
    assert torch.equal(outputs[0], outputs[1])


def test_a_graph_is_one_example():
    from bayesattn.functional import Edges

    edges = Edges.sort(torch.tensor([0, 1, 2, 2, 3]), torch.tensor([1, 1, 0, 3, 3]), 4, 4)
    scores, value = torch.randn(5, 2), torch.randn(4, 2, 3)
    outputs = []
    for example in (3, 3, 4):
        with keyed_noise(example_seeds(0, 0, torch.tensor([example]))):
            outputs.append(functional.edge_attention(scores, value, edges, config=CONFIG, need_kl=False).output)
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_repeats_the_noise(use_reentrant):
    """One module, three calls: backward runs them again in the opposite order."""
    x, seeds = inputs(), example_seeds(0, 0, torch.arange(7))
    gradients = []
    for is_checkpointed in (False, True):
        module = layer()
        torch.manual_seed(5)
        with keyed_noise(seeds):
            y = x.clone().requires_grad_()
            with record_kl() as kl:
                for _ in range(3):
                    if is_checkpointed:
                        y = y + checkpoint(attend, module, y, use_reentrant=use_reentrant)
                    else:
                        y = y + attend(module, y)
            (y.square().sum() + kl.total()).backward()
        gradients.append([parameter.grad for parameter in module.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, plain, rtol=1e-12, atol=1e-12)


def test_two_threads_have_scopes_of_their_own():
    x, results, barrier = inputs(), {}, threading.Barrier(2)

    modules = [layer(number) for number in (0, 1)]
    # modules are built from torch's one generator, so one after the other, before the threads
    threads = []
    for number, module in enumerate(modules):

        def work(number=number, module=module):
            with keyed_noise(example_seeds(number, 0, torch.arange(7))):
                barrier.wait()
                results[number] = [attend(module, x).detach() for _ in range(20)]

        threads.append(threading.Thread(target=work))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, module in enumerate(modules):
        with keyed_noise(example_seeds(number, 0, torch.arange(7))):
            alone = [attend(module, x).detach() for _ in range(20)]
        assert all(torch.equal(first, second) for first, second in zip(results[number], alone, strict=True))


def test_derived_seeds_do_not_collide():
    seeds = example_seeds(7, 3, torch.arange(50))
    derived = derive_seeds(seeds[:, None, None], torch.arange(40)[None, :, None], torch.arange(10)[None, None, :])
    assert derived.shape == (50, 40, 10)
    # 20,000 of 2^63: a collision by chance has a probability of 2e-11
    assert derived.unique().numel() == derived.numel()
    assert bool((derived >= 0).all())


def test_noise_of_many_examples_is_as_random_as_any():
    """Seeds that follow each other give draws that do not: mean, variance and neighbors' correlation of uniforms."""
    from bayesattn.noise.specification import counter_halves, to_uniform

    u = to_uniform(counter_halves(example_seeds(0, 0, torch.arange(4000)), (4000, 1, 1, 8), "cpu"), torch.float64)[..., :8]
    u = u.reshape(4000, 8)
    # 32,000 uniforms: five standard errors
    assert abs(float(u.mean()) - 0.5) < 5 * (1 / 12 / 32000) ** 0.5
    assert abs(float(u.var()) - 1 / 12) < 5 * (1 / 180 / 32000) ** 0.5
    assert abs(float(((u[1:] - 0.5) * (u[:-1] - 0.5)).mean())) < 5 * (1 / 12) / 32000**0.5
