"""What a conversion costs: the same BERT before and after `bayesianize`, in eval mode and in a training step."""

import copy
from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from bayesattn.bench.harness import Row, Suite
from bayesattn.config import AttentionConfig
from bayesattn.convert import bayesianize
from bayesattn.recording import record_kl

# BERT-mini: 11 million parameters
SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "vocab_size": 30522,
}


def run(
    device: str,
    *,
    sizes: Mapping[str, int] | None = None,
    batch: int = 8,
    length: int = 128,
    rounds: int = 15,
) -> list[Row]:
    """Compare original and converted model, with BERT's dropout on the attention weights (0.1) and without.

    Half of the examples are padded by a quarter. On a CPU one thread runs and its CPU time counts (`measure_in_turn`); the
    original appears twice in eval mode, and its second ratio says how far 1 is from 1 in this run.
    """
    suite = Suite("conversion", device)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for dropout in (0.1, 0.0):
            settings = {**(SIZES if sizes is None else sizes), "attention_probs_dropout_prob": dropout}
            config = BertConfig.from_dict(settings)
            _run_case(suite, f"bert-mini b{batch} n{length} dropout {dropout:g}", config, batch, length, rounds)
    finally:
        torch.set_num_threads(threads)
    return suite.rows


def _run_case(suite: Suite, case: str, config: BertConfig, batch: int, length: int, rounds: int) -> None:
    torch.manual_seed(0)
    original = cast(nn.Module, BertForSequenceClassification(config)).to(suite.device)
    converted, without_kl = (bayesianize(copy.deepcopy(original), AttentionConfig(v)) for v in ("BAM-WC", "BAM-NOKL"))
    mask = torch.ones(batch, length, dtype=torch.long, device=suite.device)
    mask[::2, -(length // 4) :] = 0
    ids = torch.randint(0, config.vocab_size, (batch, length), device=suite.device)
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids[:, 0] % 2}
    if not _is_equal(original, converted, inputs):
        raise RuntimeError(f"{case}: the converted model differs from the original in eval mode; nothing was timed")
    calls = {
        "original": _evaluation(original, inputs),
        "converted, not sampling": _evaluation(converted, inputs),
        "original, again": _evaluation(original, inputs),
    }
    suite.compare(case, "eval", calls, rounds=2 * rounds)
    for model in (original, converted, without_kl):
        model.train()
    calls = {
        "original": training_step(original, inputs, with_kl=False),
        "BAM-NOKL": training_step(without_kl, inputs, with_kl=False),
        "BAM-WC with KL": training_step(converted, inputs, with_kl=True),
    }
    suite.compare(case, "train step", calls, rounds=rounds)


@torch.no_grad()
def _is_equal(original: nn.Module, converted: nn.Module, inputs: dict[str, Tensor]) -> bool:
    return torch.equal(original.eval()(**inputs).logits, converted.eval()(**inputs).logits)


def _evaluation(model: nn.Module, inputs: dict[str, Tensor]) -> Callable[[], None]:
    def call() -> None:
        with torch.no_grad():
            model(**inputs)

    return call


def training_step(model: nn.Module, inputs: dict[str, Tensor], *, with_kl: bool) -> Callable[[], None]:
    """Return a call that runs forward, loss and backward once; without an optimiser, which costs both models the same."""

    def step() -> None:
        if with_kl:
            with record_kl() as kl:
                loss = model(**inputs).loss
            loss = loss + 1e-3 * kl.total()
        else:
            loss = model(**inputs).loss
        loss.backward()
        model.zero_grad(set_to_none=True)

    return step
