"""What a conversion costs: the same encoder before and after `bayesianize`, in eval mode and in a training step."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification

from bayesattn.bench.harness import Row, Suite, recorded
from bayesattn.config import AttentionConfig
from bayesattn.convert import bayesianize
from bayesattn.kl import record_kl


@dataclass(frozen=True)
class Case:
    """An encoder from its config, and the batches it is given.

    Attributes:
        name: For the table.
        family: `model_type` of transformers.
        sizes: What its config says other than by default.
        batch: Examples.
        length: Tokens.
        padding: Tokens missing at the end of every second example.
        dropout: Of the attention weights, of the original and the converted model.
        rounds: Repetitions of a training step.
    """

    name: str
    family: str
    sizes: dict[str, int]
    batch: int
    length: int
    padding: int = 0
    dropout: float = 0.0
    rounds: int = 15

    def __str__(self) -> str:
        return f"{self.name} b{self.batch} n{self.length} dropout {self.dropout:g}"

    def build(self) -> nn.Module:
        """Return the model with random weights."""
        config = AutoConfig.for_model(self.family, **self.sizes, attention_probs_dropout_prob=self.dropout)
        return cast(nn.Module, AutoModelForSequenceClassification.from_config(config))


# 11 million parameters
MINI = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
SMALL = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 1536}
ALBERT_BASE = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
BERT_MINI = Case("bert-mini", "bert", MINI, batch=8, length=128, padding=32)
CASES = {
    "cpu": [replace(BERT_MINI, dropout=0.1), BERT_MINI],
    "cuda": [
        Case("albert-base", "albert", ALBERT_BASE, batch=16, length=512),
        Case("albert-base padded", "albert", ALBERT_BASE, batch=16, length=512, padding=128),
        Case("e5-small", "bert", SMALL, batch=32, length=128),
        Case("e5-small padded", "bert", SMALL, batch=32, length=128, padding=32),
    ],
}


def run(device: str, cases: list[Case] | None = None) -> list[Row]:
    """Compare original and converted models; on a GPU in bfloat16.

    On a CPU one thread runs and its CPU time counts (`measure_in_turn`); the original appears twice in eval mode, and its
    second ratio says how far 1 is from 1 in this run.
    """
    suite = Suite("conversion", device)
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
    original = case.build().to(suite.device)
    converted, without_kl = (bayesianize(copy.deepcopy(original), AttentionConfig(v)) for v in ("BAM-WC", "BAM-NOKL"))
    mask = torch.ones(case.batch, case.length, dtype=torch.long, device=suite.device)
    mask[::2, case.length - case.padding :] = 0
    ids = torch.randint(0, 30_000, (case.batch, case.length), device=suite.device)
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids[:, 0] % 2}
    if not _is_equal(original, converted, inputs):
        raise RuntimeError(f"{case}: the converted model differs from the original in eval mode; nothing was timed")
    calls = {
        "original": _evaluation(original, inputs),
        "converted, not sampling": _evaluation(converted, inputs),
        "original, again": _evaluation(original, inputs),
    }
    suite.compare(str(case), "eval", calls, rounds=2 * case.rounds)
    for model in (original, converted, without_kl):
        model.train()
    calls = {
        "original": training_step(original, inputs, with_kl=False),
        "BAM-NOKL": training_step(without_kl, inputs, with_kl=False),
        "BAM-WC with KL": training_step(converted, inputs, with_kl=True),
    }
    suite.compare(str(case), "train step", calls, rounds=case.rounds)
    if suite.device == "cuda" and not case.padding:
        del inputs["attention_mask"]
        # while launches are recorded transformers cannot look at a mask and makes one of ones; here there is none to look at
        with mock.patch("transformers.masking_utils.is_tracing", return_value=False):
            replays = {name: recorded(call) for name, call in calls.items()}
        suite.compare(str(case), "train step, CUDA graph", replays, rounds=case.rounds)


@torch.no_grad()
def _is_equal(original: nn.Module, converted: nn.Module, inputs: dict[str, Tensor]) -> bool:
    return torch.equal(original.eval()(**inputs).logits, converted.eval()(**inputs).logits)


def _evaluation(model: nn.Module, inputs: dict[str, Tensor]) -> Callable[[], None]:
    def call() -> None:
        with torch.no_grad(), _autocast(inputs):
            model(**inputs)

    return call


def _autocast(inputs: dict[str, Tensor]) -> torch.autocast:
    device = inputs["input_ids"].device.type
    return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")


def training_step(model: nn.Module, inputs: dict[str, Tensor], *, with_kl: bool) -> Callable[[], None]:
    """Return a call that runs forward, loss and backward once; without an optimiser, which costs both models the same."""

    def step() -> None:
        with _autocast(inputs), record_kl() as kl:
            loss = model(**inputs).loss
        if with_kl:
            loss = loss + 1e-3 * kl.total()
        loss.backward()
        model.zero_grad(set_to_none=True)

    return step
