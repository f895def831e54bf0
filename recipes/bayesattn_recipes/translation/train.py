"""Train a translator; a run is decided by its config and the data folder."""

import math
from collections.abc import Callable, Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor, nn

from bayesattn_recipes.baselines import AttentionChoice, with_score_function
from bayesattn_recipes.common import runs
from bayesattn_recipes.common.config import Count, MetricLog, Positive, Seed, Share, config_class, read_config
from bayesattn_recipes.common.loop import Experiment, TrainingConfig, num_steps
from bayesattn_recipes.translation.batches import Corpus, encode_pairs, make_batch, token_batches
from bayesattn_recipes.translation.data import load_splits
from bayesattn_recipes.translation.graphs import Mode
from bayesattn_recipes.translation.model import Translator, evaluation_tokens
from bayesattn_recipes.translation.text import Pairs
from bayesattn_recipes.translation.vocabulary import PAD, Vocabulary

RECIPE = "translation"
CONFIGS = Path(__file__).parent / "configs"


@config_class
class TranslationConfig:
    """Everything that decides a run.

    Args:
        dataset: `multi30k`, `tatoeba` or `iwslt14`.
        attention: Soft, Bayesian, or a rival.
        training: Epochs, KL schedule, clipping, precision; `batch_size` is not used, see `batch_tokens`.
        seed: Initialization, batch order, dropout and attention noise.
        train_size: Training pairs, the first ones; null takes all.
        vocabulary_size: Tokens of the joint byte-pair encoding.
        lowercase: Whether to lower-case all text.
        max_tokens: Training pairs with a longer side are left out, and longer sentences refused.
        batch_tokens: Target (and source) tokens of a batch, padding included.
        pad_to: Above 1, few shapes of batches (`batches.py`); for recorded graphs.
        embedding_dim: Features of a token.
        encoder_dim: Features of each direction of the encoder.
        decoder_dim: Features of a decoder layer.
        attention_dim: Width of the attention's tanh layer.
        num_layers: Layers of encoder and decoder.
        dropout: On embeddings, between layers and before the output.
        learning_rate: Adam's peak rate, reached after `warmup` and falling to 0 along a cosine.
        warmup: Share of the steps in which the learning rate rises.
        decoder_mode: `eager`, `compile`, `cuda-graph` or `auto` (`graphs.py`).
    """

    dataset: str = "multi30k"
    attention: AttentionChoice = field(default_factory=lambda: AttentionChoice("soft"))
    training: TrainingConfig = field(default_factory=lambda: TrainingConfig(epochs=30, clip_norm=5.0))
    seed: Seed = 0
    train_size: Count | None = None
    vocabulary_size: Annotated[int, Field(ge=5)] = 10_000
    lowercase: bool = False
    max_tokens: Count = 125
    batch_tokens: Count = 4096
    pad_to: Count = 1
    embedding_dim: Count = 512
    encoder_dim: Count = 512
    decoder_dim: Count = 768
    attention_dim: Count = 512
    num_layers: Count = 2
    dropout: Share = 0.3
    learning_rate: Positive = 1e-3
    warmup: Share = 0.05
    decoder_mode: Mode = "eager"


def load_config(name: str, settings: Sequence[str] = ()) -> TranslationConfig:
    """Read a config by its name (`multi30k-wc`) or path, with `name=value` settings on top."""
    return read_config(TranslationConfig, name, CONFIGS, settings)


def build_model(config: TranslationConfig, vocabulary_size: int) -> Translator:
    """Build the translator a config describes, with fresh parameters."""
    return Translator(
        config.attention,
        vocabulary_size,
        embedding_dim=config.embedding_dim,
        encoder_dim=config.encoder_dim,
        decoder_dim=config.decoder_dim,
        attention_dim=config.attention_dim,
        num_layers=config.num_layers,
        dropout=config.dropout,
        decoder_mode=config.decoder_mode,
    )


class TranslationExperiment(Experiment):
    """Encoded sentence pairs, a fresh model, and Adam with warm-up and cosine decay.

    Args:
        config: The run.
        splits: At least `train` and `validation`.
    """

    model: Translator

    def __init__(self, config: TranslationConfig, splits: dict[str, Pairs]) -> None:
        self.config = config
        train = splits["train"]
        if config.train_size is not None:
            train = Pairs(train.sources[: config.train_size], train.targets[: config.train_size])
        self.vocabulary = Vocabulary.learn(
            [*train.sources, *train.targets], config.vocabulary_size, lowercase=config.lowercase
        )
        self.train = encode_pairs(train, self.vocabulary, config.max_tokens)
        if not self.train.sources:
            raise ValueError(f"max_tokens must be large enough for at least one training pair, got {config.max_tokens}")
        self.validation = encode_pairs(splits["validation"], self.vocabulary)
        self.num_examples = len(self.train.sources)
        self.model = build_model(config, len(self.vocabulary))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=config.learning_rate, fused=True)
        total = num_steps(self, config.training)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: _share_of_rate(step, total, config.warmup)
        )

    def write_files(self, folder: Path) -> None:
        """Write the vocabulary."""
        self.vocabulary.save(folder)

    def batches(self, config: TrainingConfig, generator: torch.Generator) -> list[Int[Tensor, " b"]]:
        """Return batches of similar lengths, `batch_tokens` each, in random order."""
        return token_batches(self.train, self.config.batch_tokens, generator, pad_to=self.config.pad_to)

    def collate(self, indices: Int[Tensor, " b"]) -> dict[str, Any]:
        """Return padded tokens."""
        chosen = indices.tolist()
        corpus = self.train
        return make_batch(
            [corpus.sources[i] for i in chosen], [corpus.targets[i] for i in chosen], pad_to=self.config.pad_to
        )

    def num_labels(self, batch: dict[str, Any]) -> int:
        """Return the target tokens of a batch."""
        return sum(batch["target_lengths"])

    def nll(self, model: nn.Module, batch: dict[str, Any]) -> Float[Tensor, ""]:
        """Return the summed loss of all target tokens."""
        return with_score_function(model, lambda: model(**batch), batch["target_out"] != PAD).sum()

    def validate(self, model: nn.Module) -> dict[str, float]:
        """Return the mean loss per validation token, and its exponential."""
        nll = corpus_nll(model, self.validation, max(self.config.batch_tokens, evaluation_tokens(self.model)))
        return {"validation_nll": nll, "validation_perplexity": math.exp(min(nll, 700.0))}


def _share_of_rate(step: int, total: int, warmup: float) -> float:
    rising = warmup * total
    if step < rising:
        return (step + 1) / (rising + 1)
    return 0.5 * (1.0 + math.cos(math.pi * (step - rising) / max(total - rising, 1.0)))


@torch.no_grad()
def corpus_nll(model: nn.Module, corpus: Corpus, batch_tokens: int) -> float:
    """Return the mean loss of a target token in the model's current mode; it waits for the device once, at the end."""
    device = next(model.parameters()).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for indices in token_batches(corpus, batch_tokens):
        chosen = indices.tolist()
        batch = make_batch([corpus.sources[i] for i in chosen], [corpus.targets[i] for i in chosen])
        total += model(**{k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}).sum()
    return float(total) / sum(map(len, corpus.targets))


def build_experiment(config: TranslationConfig, data: Path | None = None) -> TranslationExperiment:
    """Return the experiment of a config; its texts are under `data`."""
    return TranslationExperiment(config, load_splits(config.dataset, data))


train_run = runs.TrainRun(RECIPE, build_experiment)


def train_on(
    config: TranslationConfig,
    splits: dict[str, Pairs],
    out: Path,
    on_progress: Callable[[int, int], Any] = lambda done, total: None,
    *,
    resume: bool = False,
) -> MetricLog:
    """Train on given splits, and write a run folder."""
    return runs.train_run(RECIPE, config, lambda: TranslationExperiment(config, splits), out, on_progress, resume=resume)


def load_run(folder: Path) -> tuple[TranslationConfig, Vocabulary, Translator]:
    """Read a run folder back: its config, vocabulary and trained model, in eval mode."""
    config = runs.load_run_config(folder, TranslationConfig, RECIPE)
    vocabulary = Vocabulary.load(folder)
    model = build_model(config, len(vocabulary))
    runs.load_parameters(folder, model)
    return config, vocabulary, model
