"""A training step of the translation model with soft, Bayesian and rival attention: the paper's cost table."""

import dataclasses

from bayesattn.bench.harness import Row
from bayesattn_recipes.baselines import AttentionChoice
from bayesattn_recipes.baselines.config import Choice
from bayesattn_recipes.common.experiment import TrainingConfig
from bayesattn_recipes.translation.cost import measure_costs
from bayesattn_recipes.translation.train import TranslationConfig

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
    attention = {variant: AttentionChoice(variant, inference_dim=config.encoder_dim) for variant in variants}
    configs = [(variant, dataclasses.replace(config, attention=choice)) for variant, choice in attention.items()]
    sizes = {"num_sentences": num_sentences, "length": 16, "vocabulary_size": vocabulary_size}
    return measure_costs(configs, **sizes, device=device)[0]
