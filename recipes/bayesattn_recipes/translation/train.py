"""Train a translator; a run is decided by its config and the data folder."""

import math
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bayesattn_recipes.baselines import with_score_function
from bayesattn_recipes.common.loop import Experiment, TrainingConfig, num_steps
from bayesattn_recipes.common.runs import Training, load_parameters
from bayesattn_recipes.translation.batches import Corpus, encode_pairs, make_batch, token_batches
from bayesattn_recipes.translation.config import TranslationConfig
from bayesattn_recipes.translation.data import load_splits
from bayesattn_recipes.translation.model import Translator, evaluation_tokens
from bayesattn_recipes.translation.text import Pairs
from bayesattn_recipes.translation.vocabulary import PAD, Vocabulary

CONFIGS = Path(__file__).parent / "configs"


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
        self.model = Translator(config, len(self.vocabulary))
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


def build_experiment(config: TranslationConfig, data: Path | dict[str, Pairs] | None = None) -> TranslationExperiment:
    """Return the experiment of a config; `data` is the folder of the data sets, or splits that are loaded already."""
    return TranslationExperiment(config, data if isinstance(data, dict) else load_splits(config.dataset, data))


TRAINING = Training("translation", TranslationConfig, CONFIGS, build_experiment)
load_config, train_run = TRAINING.load_config, TRAINING.train_run


def load_run(folder: Path) -> tuple[TranslationConfig, Vocabulary, Translator]:
    """Read a run folder back: its config, vocabulary and trained model, in eval mode."""
    config = TRAINING.load_run_config(folder)
    vocabulary = Vocabulary.load(folder)
    model = Translator(config, len(vocabulary))
    load_parameters(folder, model)
    return config, vocabulary, model
