"""What a training step costs: every variant on the same batch, in one run, as multiples of soft attention's."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bayesattn.bench.harness import Row, Suite
from bayesattn.evaluation.threads import one_thread
from bayesattn.kl import record_kl
from bayesattn_recipes.baselines import with_score_function
from bayesattn_recipes.translation.batches import make_batch
from bayesattn_recipes.translation.model import Translator
from bayesattn_recipes.translation.train import TranslationConfig, build_model
from bayesattn_recipes.translation.vocabulary import END, PAD


def random_batch(num_sentences: int, length: int, vocabulary_size: int) -> dict[str, Any]:
    """Return sentence pairs of random tokens; all have `length` tokens, their end included, on both sides."""
    rows = torch.randint(END + 1, vocabulary_size, (2, num_sentences, length - 1)).tolist()
    return make_batch(*([[*row, END] for row in side] for side in rows))


def training_step(model: Translator, batch: dict[str, Any], *, precision: str = "fp32") -> Callable[[], None]:
    """Return a call that makes one optimiser step: forward, backward, clipping and Adam, as in training."""
    device = next(model.parameters()).device
    batch = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    labels = sum(batch["target_lengths"])

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"), record_kl() as kl:
            loss = with_score_function(model, lambda: model(**batch), batch["target_out"] != PAD).sum()
        total = loss + kl.total() * len(batch["source_lengths"])
        (total / labels).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure_costs(
    configs: Sequence[tuple[str, TranslationConfig]],
    *,
    num_sentences: int,
    length: int,
    vocabulary_size: int,
    device: str,
    rounds: int = 11,
) -> tuple[list[Row], dict[str, int]]:
    """Time a training step of every config on one batch; returns the rows and the number of parameters, by name.

    Args:
        configs: Named, all with one `decoder_mode`, each timed in its own precision; ratios are to the first.
        num_sentences: Of the batch.
        length: Tokens of every sentence.
        vocabulary_size: Tokens.
        device: `cpu` or `cuda`.
        rounds: Turns of every config.
    """
    suite, parameters, calls = Suite("translation", device), {}, {}
    batch = random_batch(num_sentences, length, vocabulary_size)
    for name, config in configs:
        torch.manual_seed(0)
        model = build_model(config, vocabulary_size).to(device).train()
        parameters[name] = sum(parameter.numel() for parameter in model.parameters())
        calls[name] = training_step(model, batch, precision=config.training.precision)
    decoder_mode = configs[0][1].decoder_mode
    mode = "train step" if decoder_mode == "eager" else f"train step, {decoder_mode}"
    # on a CPU one thread, its processor time, in turn: neither drift nor other programs enter the ratios
    with one_thread():
        suite.compare(f"{num_sentences} x {length} tokens", mode, calls, rounds=rounds)
    return suite.rows, parameters
