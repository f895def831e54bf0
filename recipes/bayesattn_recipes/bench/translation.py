"""A training step of the translation model with soft, Bayesian and rival attention: the paper's cost table."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from bayesattn.evaluation.threads import one_thread
from bayesattn_recipes.baselines import AttentionChoice, with_score_function
from bayesattn_recipes.baselines.config import Choice
from bayesattn_recipes.bench.harness import Row, Suite
from bayesattn_recipes.bench.timing import whole_step
from bayesattn_recipes.common.experiment import TrainingConfig
from bayesattn_recipes.translation.batches import make_batch
from bayesattn_recipes.translation.config import TranslationConfig
from bayesattn_recipes.translation.model import Translator
from bayesattn_recipes.translation.vocabulary import END, PAD

VARIANTS: tuple[Choice, ...] = (
    "soft",
    "BAM-NOKL",
    "BAM-LC",
    "BAM-WC",
    "hard-reinforce",
    "hard-gumbel",
    "gaussian-context",
    "mc-dropout",
    "variational-exact",
    "variational-enum",
    "variational-sample",
    "variational-dirichlet",
)
SMALL = TranslationConfig(embedding_dim=128, encoder_dim=128, decoder_dim=192, attention_dim=128)


def run(device: str) -> list[Row]:
    """Time the paper's size on a GPU (256 sentences of 16 tokens, bfloat16), a quarter of it on a CPU (32 of 16)."""
    if device == "cpu":
        return _rows(VARIANTS, SMALL, 32, 2000, device)
    plain = TranslationConfig(training=TrainingConfig(epochs=1, precision="bf16"))
    recorded = dataclasses.replace(plain, decoder_mode="cuda-graph")
    return [row for config in (plain, recorded) for row in _rows(VARIANTS, config, 256, 10_000, device)]


def _rows(
    variants: tuple[Choice, ...], config: TranslationConfig, num_sentences: int, vocabulary_size: int, device: str
) -> list[Row]:
    attention = {str(variant): AttentionChoice(variant, inference_dim=config.encoder_dim) for variant in variants}
    attention["variational-exact, top 4"] = AttentionChoice("variational-exact", top_keys=4)
    configs = {variant: dataclasses.replace(config, attention=choice) for variant, choice in attention.items()}
    return measure_costs(configs, num_sentences=num_sentences, length=16, vocabulary_size=vocabulary_size, device=device)


def measure_costs(
    configs: Mapping[str, TranslationConfig],
    *,
    num_sentences: int,
    length: int,
    vocabulary_size: int,
    device: str,
    rounds: int = 11,
) -> list[Row]:
    """Time a training step of every config on one batch of random tokens.

    Args:
        configs: By name, all with one `decoder_mode`, each timed in its own precision; ratios are to the first.
        num_sentences: Sentences of the batch.
        length: Tokens of every sentence.
        vocabulary_size: Tokens of the vocabulary.
        device: `cpu` or `cuda`.
        rounds: Turns of every config.
    """
    suite, calls = Suite("translation", device), {}
    batch = random_batch(num_sentences, length, vocabulary_size)
    for name, config in configs.items():
        torch.manual_seed(0)
        model = Translator(config, vocabulary_size).to(device).train()
        calls[name] = training_step(model, batch, config.training.precision)
    decoder_mode = next(iter(configs.values())).decoder_mode
    mode = "train step" if decoder_mode == "eager" else f"train step, {decoder_mode}"
    # on a CPU: the processor time of one thread, in turns, so neither drift nor other programs affect the ratios
    with one_thread():
        suite.compare(f"{num_sentences} x {length} tokens", mode, calls, rounds=rounds)
    return suite.rows


def training_step(model: Translator, batch: dict[str, Any], precision: str) -> Callable[[], None]:
    """Return a call that makes one optimizer step on a batch."""
    device = next(model.parameters()).device
    moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
    return whole_step(
        model,
        lambda: with_score_function(model, lambda: model(**moved), moved["target_out"] != PAD).sum(),
        num_labels=sum(batch["target_lengths"]),
        num_examples=len(batch["source_lengths"]),
        autocast=precision == "bf16",
    )


def random_batch(num_sentences: int, length: int, vocabulary_size: int) -> dict[str, Any]:
    """Return sentence pairs of random tokens; all have `length` tokens, their end included, on both sides."""
    rows = torch.randint(END + 1, vocabulary_size, (2, num_sentences, length - 1)).tolist()
    return make_batch(*([[*row, END] for row in side] for side in rows))
