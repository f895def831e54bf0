"""What doubt in closed form costs: `ba.uncertainty` against one plain pass of the same model in eval mode."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification

from bayesattn.convert import bayesianize, restore
from bayesattn.doubt import uncertainty
from bayesattn.doubt.temporary import DEFAULT
from bayesattn.ops.attention import score_gradients
from bayesattn_recipes.bench.harness import Row, Suite


@dataclass(frozen=True)
class Case:
    """A BERT built from its config, and its batch.

    Attributes:
        name: For the table.
        sizes: Config values that differ from the defaults, which are BERT-base.
        batch: Examples.
        length: Tokens; every second example has a quarter of padding, unless there is one example.
        rounds: Repetitions.
    """

    name: str
    sizes: dict[str, int]
    batch: int
    length: int
    rounds: int = 11

    def __str__(self) -> str:
        return f"{self.name} b{self.batch} n{self.length}"

    def build(self, device: str) -> nn.Module:
        """Return the model with random weights; on a GPU in bfloat16."""
        config = AutoConfig.for_model("bert", **self.sizes, max_position_embeddings=max(self.length, 512))
        model = cast(nn.Module, AutoModelForSequenceClassification.from_config(config)).eval().to(device)
        return model.bfloat16() if device == "cuda" else model

    def inputs(self, device: str) -> dict[str, Tensor]:
        """Return tokens and mask."""
        ids = torch.randint(1000, 30_000, (self.batch, self.length), device=device)
        mask = torch.ones_like(ids)
        if self.batch > 1:
            mask[::2, -self.length // 4 :] = 0
        return {"input_ids": ids, "attention_mask": mask}


MINI = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
CASES = {
    "cpu": [Case("bert-mini", MINI, batch=8, length=128)],
    "cuda": [
        Case("bert-base", {}, batch=32, length=128),
        Case("bert-base", {}, batch=32, length=512),
        Case("bert-base", {}, batch=1, length=16_384, rounds=3),
    ],
}


def run(device: str, cases: list[Case] | None = None) -> list[Row]:
    """Compare on a CPU with one thread, or on a GPU in bfloat16 with and without the kernels.

    The mode `time` has one plain pass as its baseline; `memory` has a forward pass that keeps what a backward pass needs,
    without gradients of parameters, and its ratio is that of the peaks.
    """
    suite = Suite("doubt", device)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for case in CASES[device] if cases is None else cases:
            _run_case(suite, case)
    finally:
        torch.set_num_threads(threads)
    return suite.rows


def _run_case(suite: Suite, case: Case) -> None:
    torch.manual_seed(0)
    model, inputs = case.build(suite.device), case.inputs(suite.device)
    measured = partial(uncertainty, model, inputs)
    if suite.device == "cuda":
        doubts = {"doubt, kernels": measured, "doubt, torch": _without_kernels(measured)}
    else:
        doubts = {"doubt": measured}
    # the first call of a plain model searches it for attention; the next ones are timed
    suite.compare(str(case), "time", {"plain pass": _plain(model, inputs), **doubts}, rounds=case.rounds)
    _compare_memory(suite, case, _keeping(model, inputs))
    bayesianize(model, DEFAULT)
    converted = {f"{name}, converted": call for name, call in doubts.items()}
    suite.compare(str(case), "time, converted", {"plain pass": _plain(model, inputs), **converted}, rounds=case.rounds)
    restore(model)


def _compare_memory(suite: Suite, case: Case, baseline: Callable[[], Any]) -> None:
    """Add the rows of the mode `memory`: the peaks of the doubts that were timed, as multiples of the baseline's."""
    timed = [row for row in suite.rows if row.case == str(case) and row.provider.startswith("doubt")]
    first = suite.run(str(case), "forward, graph kept", "memory", baseline)
    for row in timed:
        ratio = row.peak_mib / first.peak_mib
        suite.rows.append(replace(row, mode="memory", ratio=ratio))
        print(f"{row.case:24s} {'memory':10s} {row.provider:22s} {row.peak_mib:9.1f} MiB  x{ratio:6.3f}", flush=True)


def _plain(model: nn.Module, inputs: dict[str, Tensor]) -> Callable[[], Any]:
    def call() -> None:
        with torch.no_grad():
            model(**inputs)

    return call


def _keeping(model: nn.Module, inputs: dict[str, Tensor]) -> Callable[[], Any]:
    """Return a forward pass with the graph of a training step in which embeddings, and nothing after them, are learned."""

    def call() -> None:
        needed = [parameter.requires_grad for parameter in model.parameters()]
        model.requires_grad_(False)
        hook = model.get_submodule("bert.embeddings").register_forward_hook(lambda *args: args[-1].requires_grad_())
        try:
            model(**inputs)
        finally:
            hook.remove()
            for parameter, was in zip(model.parameters(), needed, strict=True):
                parameter.requires_grad_(was)

    return call


def _without_kernels(call: Callable[[], Any]) -> Callable[[], Any]:
    def torch_alone() -> Any:
        with mock.patch.object(score_gradients, "why_not_kernel", return_value="the torch version is measured"):
            return call()

    return torch_alone
