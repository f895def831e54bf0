"""The host's part of attention without a GPU: every kernel launch is prepared in full but not made.

    python benchmarks/fake_gpu.py            budget of a layer of a converted BERT, padded, in microseconds by item
    python benchmarks/fake_gpu.py --plain    without padding

Import this before `bayesattn`. Tensors lie on the CPU and are tiny, so that torch's own arithmetic takes next to no time;
launchers look up their kernel and pack its arguments, and the compiled kernel is a function that does nothing. What remains
is Python, autograd and torch's dispatch: all of a step except the driver. Results are meaningless.
"""

import argparse
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

# then kernels are not compiled, and modules treat tensors on the CPU like those on a GPU
os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertModel, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.bert.modeling_bert import BertSelfAttention

from bayesattn import functional, noise
from bayesattn.config import AttentionConfig, Variant
from bayesattn.convert import bayesianize, hosted
from bayesattn.functional import dense, repeated
from bayesattn.integrations.hf import attention as hf
from bayesattn.kl import record_kl
from bayesattn.nn import module
from bayesattn.ops.attention import triton, weibull_node
from bayesattn.ops.common import launch, tape
from bayesattn.ops.prior import triton as prior_ops

VARIANTS: tuple[Variant, ...] = ("soft", "BAM-NOKL", "BAM-WC", "BAM-LC")
LAYERS, BATCH, HEADS, LENGTH, FEATURES = 12, 2, 6, 8, 16


def _triton(*_: object) -> str:
    return "triton"


class _Nothing:
    """A compiled kernel that does nothing; its arguments are packed as for a real one."""

    function, packed_metadata = 0, b""

    @staticmethod
    def run(*args: object) -> None:
        """Take the arguments of a compiled kernel's launcher."""


class _AlwaysCompiled(dict):
    def get(self, key: object, default: object = None) -> Any:
        return _Nothing


class _Driver:
    class active:
        get_current_stream = staticmethod(lambda _index: 0)


@contextmanager
def fake_gpu() -> Iterator[None]:
    """Open a scope in which attention on the CPU takes the path of the kernels, and launches do nothing."""
    with ExitStack() as stack:
        for name, value in (("INTERPRETED", False), ("driver", _Driver), ("_COMPILED", _AlwaysCompiled())):
            stack.enter_context(mock.patch.object(launch, name, value))
        stack.enter_context(mock.patch.object(tape, "INTERPRETED", False))
        stack.enter_context(mock.patch.object(dense, "choose", _triton))
        # a cached launch remembers its compiled kernel
        launch.prepared.cache_clear()
        yield
        launch.prepared.cache_clear()


class Operators(TorchDispatchMode):
    """Counts the operators that reach a device, without autograd's share."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def autograd_nodes(loss: Tensor) -> Counter[str]:
    """Return how many nodes of each kind a backward pass from `loss` runs."""
    found: Counter[str] = Counter()
    seen, open_nodes = set(), [loss.grad_fn]
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found[node.name()] += 1
        open_nodes += [child for child, _ in node.next_functions]
    return found


class Stopwatch:
    """Own time of chosen functions, without that of other chosen functions inside them."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._inner: list[int] = []

    def timed(self, label: str, function: Callable) -> Callable:
        """Return the function with its time counted under a label."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0)
            start = time.thread_time_ns()
            try:
                return function(*args, **kwargs)
            finally:
                total = time.thread_time_ns() - start
                self.spent[label] += total - self._inner.pop()
                self.calls[label] += 1
                if self._inner:
                    self._inner[-1] += total

        return call

    @contextmanager
    def watching(self, items: dict[str, list[tuple[Any, str]]]) -> Iterator[None]:
        """Time functions, given as (holder, name), by label."""
        with ExitStack() as stack:
            for label, places in items.items():
                for holder, name in places:
                    found = vars(holder)[name] if isinstance(holder, type) else getattr(holder, name)
                    is_static = isinstance(found, staticmethod)
                    if isinstance(found, property):
                        assert found.fget is not None
                        stack.enter_context(mock.patch.object(holder, name, property(self.timed(label, found.fget))))
                        continue
                    timed = self.timed(label, found.__func__ if is_static else found)
                    stack.enter_context(mock.patch.object(holder, name, staticmethod(timed) if is_static else timed))
            yield


class Attention:
    """The attention calls of a step of a small BERT, one per layer, on tensors like those from a linear layer."""

    def __init__(self, variant: Variant, padded: bool) -> None:
        torch.manual_seed(0)
        sizes: dict[str, Any] = {"hidden_size": HEADS * FEATURES, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
        model = BertModel(BertConfig(**sizes, intermediate_size=16, vocab_size=16, attention_probs_dropout_prob=0.0)).train()
        if variant != "soft":
            bayesianize(model, AttentionConfig(variant))
        self.is_soft, self.modules = (
            variant == "soft",
            [module for module in model.modules() if isinstance(module, BertSelfAttention)],
        )
        self.inputs = [torch.randn(BATCH, LENGTH, HEADS, FEATURES, dtype=torch.bfloat16) for _ in range(3)]
        self.leaves = [x.requires_grad_() for x in self.inputs] + [p for n, p in model.named_parameters() if "bayes" in n]
        self.keys = torch.ones(BATCH, LENGTH, dtype=torch.bool) if padded else None
        if self.keys is not None:
            self.keys[0, LENGTH // 2 :] = False
        self.grad = torch.ones(BATCH, LENGTH, HEADS, FEATURES, dtype=torch.bfloat16)

    def forward(self) -> list[Tensor]:
        """Return the outputs of all layers, and the KL if there is one."""
        query, key, value = (x.transpose(1, 2) for x in self.inputs)
        mask = None
        if self.keys is not None:
            make = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
            sizes = {"batch_size": BATCH, "q_length": LENGTH, "kv_length": LENGTH, "allow_is_causal_skip": False}
            mask = make(**sizes, mask_function=masking_utils.bidirectional_mask_function, attention_mask=self.keys)
        attend = sdpa_attention_forward if self.is_soft else hf.bayesian_attention
        with torch.autocast("cpu", torch.bfloat16), record_kl() as kl:
            scale: dict[str, Any] = {"dropout": 0.0, "scaling": FEATURES**-0.5}
            outputs = [attend(module, query, key, value, mask, **scale)[0] for module in self.modules]
        total = None if self.is_soft else kl.total()
        return outputs if total is None or not total.requires_grad else [*outputs, total]

    def backward(self, results: list[Tensor]) -> None:
        """Run the backward pass in the caller's thread, and forget the gradients."""
        grads = [self.grad if x.ndim else torch.ones(()) for x in results]
        with torch.autograd.set_multithreading_enabled(False):
            torch.autograd.backward(results, grads)
        for x in self.leaves:
            x.grad = None


def timed_in_turns(calls: dict[str, Attention], rounds: int) -> dict[str, tuple[float, float]]:
    """Return microseconds of CPU time per layer of both passes: the fastest fifth, since the machine is shared."""
    found: dict[str, list[tuple[int, int]]] = {name: [] for name in calls}
    for _ in range(rounds + 10):
        for name, call in calls.items():
            start = time.thread_time_ns()
            results = call.forward()
            middle = time.thread_time_ns()
            call.backward(results)
            found[name].append((middle - start, time.thread_time_ns() - middle))

    def fast(times: Sequence[int]) -> float:
        return sorted(times[10:])[rounds // 5] / LAYERS / 1e3

    return {name: (fast([x for x, _ in times]), fast([x for _, x in times])) for name, times in found.items()}


def items() -> dict[str, list[tuple[Any, str]]]:
    """Return the functions behind every item of the budget, without those that a version of the library lacks."""
    wanted: dict[str, list[tuple[Any, str]]] = {
        "adapter": [(hf, "bayesian_attention"), (hf, "_score_arguments"), (hosted, "as_band")],
        "attend and node": [(hosted.HostedAttention, "attend"), (hosted.HostedAttention, "_attend_fused")],
        "recording": [(hosted.HostedAttention, "record"), (module, "is_recording")],
        "checks and choices": [(functional, "attention"), (triton, "attention"), (hosted, "signature")],
        "seed": [(noise, "draw_seed"), (repeated, "draw_seed")],
        "prior": [(hosted.HostedAttention, "_log_prior")],
        "node": [(triton, "weibull_attention"), (weibull_node, "run"), (triton, "fused_or_plain")],
        "arrays": [(weibull_node, "run_forward"), (triton, "_forward")],
        "launches": [(launch.Launch, "__call__"), (tape.Tape, "replay")],
        "backward: arrays": [(weibull_node, "run_backward"), (triton, "_backward"), (prior_ops, "_backward")],
    }
    return {
        label: [(holder, name) for holder, name in places if holder is not None and hasattr(holder, name)]
        for label, places in wanted.items()
    }


def operator_times(rounds: int) -> dict[str, float]:
    """Return microseconds of CPU time of each operator that a compiled model calls per layer: fast ones, as above."""
    tensors = [x.transpose(1, 2) for x in Attention("soft", False).inputs]
    query, key, value = (x.detach() for x in tensors)
    shapes = [(1, FEATURES, 10), (1, 1, 10), (1, 10, 1), (1, 1, 1)]
    weights, seed = [torch.randn(shape) for shape in shapes], torch.tensor(1)
    valid = torch.ones(BATCH, 1, 1, LENGTH, dtype=torch.bool)
    options = [5.0, 1.0, 0.1, 0.2, FEATURES**-0.5, 0.0], "beta_psi log_softmax row_mean", False, None
    drawn = True, 0.2, FEATURES**-0.5, 0.0, False, None
    inputs, plain = (query, key, value, None, *weights, True, valid, seed), (query, key, value, valid, None, seed)
    out, kl, kept = weibull_node.weibull_forward(*inputs, *options)
    output, lse, *_ = triton.attention_forward(*plain, *drawn, False, False)
    grads, absent = (torch.ones_like(out), torch.ones_like(kl)), (None,) * 4
    calls = {
        "BAM-NOKL forward": lambda: triton.attention_forward(*plain, *drawn, False, False),
        "BAM-NOKL backward": lambda: triton.attention_backward(grads[0], *absent, *plain, output, lse, None, None, *drawn),
        "BAM-WC forward": lambda: weibull_node.weibull_forward(*inputs, *options),
        "BAM-WC backward": lambda: weibull_node.weibull_backward(*grads, *inputs, out, kept, *options),
    }
    found: dict[str, list[int]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.thread_time_ns()
            for _ in range(LAYERS):
                call()
            found[name].append(time.thread_time_ns() - start)
    return {name: sorted(times)[rounds // 5] / LAYERS / 1e3 for name, times in found.items()}


def main() -> None:
    """Print the budget: totals, where the time of all but soft goes, and the operators of a compiled step."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plain", action="store_true", help="no padding")
    parser.add_argument("--rounds", type=int, default=100)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with fake_gpu():
        calls = {variant: Attention(variant, not given.plain) for variant in VARIANTS}
        times = timed_in_turns(calls, given.rounds)
        print(f"{'us per layer':24s} {'forward':>8s} {'backward':>8s} {'x soft':>7s}   operators   nodes")
        for name, call in calls.items():
            forward, backward = times[name]
            with Operators() as counted:
                results = call.forward()
                nodes = autograd_nodes(results[-1] if results[-1].ndim == 0 else results[0])
                call.backward(results)
            ratio, ops = (forward + backward) / sum(times["soft"]), sum(counted.counts.values()) / LAYERS
            print(f"{name:24s} {forward:8.1f} {backward:8.1f} {ratio:7.2f} {ops:11.1f} {sum(nodes.values()) / LAYERS:7.1f}")
        for name in VARIANTS[1:]:
            watch = Stopwatch()
            with watch.watching(items()):
                for _ in range(given.rounds):
                    calls[name].backward(calls[name].forward())
            print(f"{name}, own time by item, us per layer (with some for the watch), calls per layer")
            for label, spent in watch.spent.most_common():
                each = given.rounds * LAYERS
                print(f"  {label:22s} {spent / each / 1e3:8.1f} {watch.calls[label] / each:6.1f}")
        print("operators of a compiled step, us per layer")
        with torch.no_grad():
            for name, spent in operator_times(given.rounds).items():
                print(f"  {name:22s} {spent:8.1f}")


if __name__ == "__main__":
    main()
