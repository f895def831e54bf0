"""A graph layer on the kernels, prior included: every gradient, few operations of the host, and training's surroundings."""

from collections import Counter

import pytest
import torch
from kernel_device import DEVICE, HAS_GPU, MARKS, needs_gpu
from replays import check_replays
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import bayesattn as ba
from bayesattn.integrations.pyg import BayesianGATConv
from bayesattn.noise.keyed import keyed_noise
from bayesattn.ops.common.launch import Launch

pytestmark = MARKS
NODES, IN, OUT, HEADS = 13, 5, 8, 3


CONFIGS = {
    "WC": ba.AttentionConfig("BAM-WC", gamma_beta=0.3),
    "WC paper": ba.AttentionConfig("BAM-WC", preset="paper", prior_per_head=True),
    "WC detached": ba.AttentionConfig("BAM-WC", detach_keys=True),
    "WF": ba.AttentionConfig("BAM-WF"),
    "LC": ba.AttentionConfig("BAM-LC"),
}


def layer_and_inputs(config: ba.AttentionConfig, backend: str, dtype: torch.dtype = torch.float32, **options):
    """A layer, features and edges; node 4 is nobody's source, node 2 nobody's target."""
    torch.manual_seed(1)
    options = {"add_self_loops": False, "backend": backend, **options}
    layer = BayesianGATConv(IN, OUT, heads=HEADS, config=config, **options).to(DEVICE)
    index = torch.randint(0, NODES, (2, 59))
    index[0][index[0] == 4], index[1][index[1] == 2] = 0, 1
    return layer.to(dtype), torch.randn(NODES, IN, device=DEVICE).to(dtype), index.to(DEVICE)


def step(layer: nn.Module, x: torch.Tensor, index: torch.Tensor, upstream: torch.Tensor, call=None) -> list[torch.Tensor]:
    """Return output, KL and the gradients of features and parameters, of one draw that every backend repeats."""
    x = x.detach().requires_grad_()
    with keyed_noise(torch.tensor([9], device=DEVICE)):
        with ba.record_kl() as kl:
            output = (call or layer)(x, index)
        total = kl.total()
        torch.autograd.backward([output, total], [upstream.to(output.dtype), torch.full_like(total, 0.7)])
    gradients = [p.grad for p in layer.parameters()]
    layer.zero_grad()
    return [y.detach().double() for y in (output, total, x.grad, *gradients) if y is not None]


@pytest.mark.parametrize("scope", ["graph", "neighborhood"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_gradient_is_that_of_the_reference(config, scope):
    upstream = torch.randn(NODES, HEADS * OUT, device=DEVICE)
    found = step(*layer_and_inputs(config, "triton", prior_scope=scope), upstream)
    truth = step(*layer_and_inputs(config, "reference", torch.float64, prior_scope=scope), upstream)
    for ours, theirs in zip(found, truth, strict=True):
        # float32 against float64, sums of up to some hundred terms of the size of the largest
        scale = float(theirs.abs().max().clamp(min=1.0))
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=3e-5 * scale)


class Operations(TorchDispatchMode):
    """Counts what the host has to ask the device for: operations that are neither views nor empty tensors."""

    FREE = ("view", "transpose", "t.", "expand", "slice", "select.", "squeeze", "unsqueeze", "detach", "split", "alias")
    FREE = (*FREE, "unbind")

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).removeprefix("aten.")
        if not (name.startswith(self.FREE) or "empty" in name):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def test_the_kl_adds_five_launches_and_two_operations_to_a_step(monkeypatch):
    from bayesattn.integrations.pyg import attention

    launched: Counter[str] = Counter()
    # the interpreter has operations of its own; and on a GPU the same tensor is known to be the same
    monkeypatch.setattr(Launch, "__call__", lambda self, *pointers: launched.update([self.name]))
    monkeypatch.setattr(attention, "_COUNTING_DEVICES", (DEVICE,))
    counts, launches = [], []
    for variant in ("BAM-NOKL", "BAM-WC"):
        layer, x, index = layer_and_inputs(ba.AttentionConfig(variant), "triton")
        upstream, weight = torch.ones(NODES, HEADS * OUT, device=DEVICE), torch.ones((), device=DEVICE)
        for _ in range(2):
            layer.zero_grad()
            launched.clear()
            with Operations() as operations, ba.record_kl() as kl:
                output = layer(x, index)
                if variant == "BAM-NOKL":
                    output.backward(upstream)
                else:
                    torch.autograd.backward([output, kl.total()], [upstream, weight])
        counts.append(operations.found.total())
        launches.append(launched.copy())
    # ops/segment/README.md has these numbers; the two more are the sums of what programs leave, for the KL and the
    # network's gradients
    assert counts == [6, 8]
    assert set(launches[1] - launches[0]) == {"prior_logits", "prior_softmax", "prior_grad", "edge_alpha", "edge_kl"}
    without_kl = ("node_scores", "edge_forward", "edge_prepare", "edge_backward", "edge_pair_grad", "node_grad")
    assert launches[0] == dict.fromkeys(without_kl, 1)


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_activation_checkpointing_repeats_draw_and_kl(is_reentrant):
    layer, x, index = layer_and_inputs(CONFIGS["WC"], "triton")
    upstream = torch.randn(NODES, HEADS * OUT, device=DEVICE)
    plain = step(layer, x, index, upstream)
    again = step(layer, x, index, upstream, lambda x, index: checkpoint(layer, x, index, use_reentrant=is_reentrant))
    # the same kernels on the same numbers; torch adds the scores' gradients in any order on a GPU
    torch.testing.assert_close(again, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, *([torch.bfloat16] if HAS_GPU else [])])
def test_autocast_is_as_close_to_the_truth_as_the_reference_is(dtype):
    upstream = torch.randn(NODES, HEADS * OUT, device=DEVICE)

    def low(backend: str) -> list[torch.Tensor]:
        layer, x, index = layer_and_inputs(CONFIGS["WC"], backend)

        def call(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            with torch.autocast(DEVICE, dtype):
                return layer(x, index)

        return step(layer, x, index, upstream, call)

    truth = step(*layer_and_inputs(CONFIGS["WC"], "reference", torch.float64), upstream)
    for ours, theirs, exact in zip(low("triton"), low("reference"), truth, strict=True):
        # rounding the features turns units of the prior's network on or off, and a gradient by per cents, in both alike
        allowed = 2.0 * (theirs - exact).norm() + torch.finfo(dtype).eps * exact.norm() + 1e-4
        assert (ours - exact).norm() <= allowed


def test_the_prior_is_reachable_from_the_output():
    layer, x, index = layer_and_inputs(CONFIGS["WC"], "triton")
    with ba.record_kl():
        output = layer(x, index)
    # as DDP with `find_unused_parameters=True` looks for parameters
    seen, waiting = set(), [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [next_node for next_node, _ in node.next_functions]
    leaves = {id(node.variable) for node in seen if hasattr(node, "variable")}
    assert all(id(parameter) in leaves for parameter in layer.parameters())


@needs_gpu
def test_a_cuda_graph_replays_layer_and_kl():
    layer, x, index = layer_and_inputs(CONFIGS["WC"], "triton")
    held: list[torch.Tensor] = []

    def call() -> None:
        with ba.record_kl() as kl:
            output = layer(x, index)
        total = kl.total()
        (output.square().sum() + total).backward()
        held[:] = [output.detach(), total.detach(), layer.lin.weight.grad]
        layer.zero_grad()

    check_replays(call, held)
