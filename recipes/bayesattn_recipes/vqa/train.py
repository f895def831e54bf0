"""Train MCAN with soft or Bayesian attention."""

from dataclasses import field
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from bayesattn.files import RunError, read_tensors
from bayesattn_recipes.baselines import AttentionChoice, with_score_function
from bayesattn_recipes.common.config import Count, Positive, Seed, config_class
from bayesattn_recipes.common.folders import CHECKPOINT_FILE
from bayesattn_recipes.common.loop import Experiment, TrainingConfig, num_steps
from bayesattn_recipes.common.replay import is_recordable
from bayesattn_recipes.common.runs import Training, load_parameters
from bayesattn_recipes.vqa.accuracy import soft_targets
from bayesattn_recipes.vqa.data import DataConfig, Split, build_vocabulary, load_splits
from bayesattn_recipes.vqa.model import MCAN, MCANSize
from bayesattn_recipes.vqa.vectors import load_vectors
from bayesattn_recipes.vqa.vocabulary import Vocabulary

CONFIGS = Path(__file__).parent / "configs"


@config_class
class VQAConfig:
    """Everything that decides a run; with the same values and data it repeats exactly on the same machine.

    The learning rate rises over the first epochs, min((epoch + 1) / warmup_epochs, 1), and is multiplied by `decay_factor`
    at epoch `decay_from` and every `decay_every` epochs after it: MCAN's own schedule.

    Args:
        attention: Soft or Bayesian attention, or a rival of it (docs/recipes/rivals.md).
        training: Epochs, batch size, KL schedule.
        data: Which data set, words and answers.
        model: Sizes.
        seed: Initialization, batch order, dropout and attention noise.
        learning_rate: Learning rate after warm-up.
        warmup_epochs: Epochs until it is reached.
        decay_from: First epoch, counted from 0, with a lower rate.
        decay_every: Epochs between further reductions.
        decay_factor: Factor of the learning rate at each reduction.
    """

    attention: AttentionChoice = field(default_factory=lambda: AttentionChoice("soft"))
    training: TrainingConfig = field(default_factory=TrainingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: MCANSize = field(default_factory=MCANSize)
    seed: Seed = 0
    learning_rate: Positive = 1e-4
    warmup_epochs: Count = 4
    decay_from: Count = 10
    decay_every: Count = 2
    decay_factor: Positive = 0.2

    def __post_init__(self) -> None:
        self.attention.check_layers()


def learning_rate_factor(config: VQAConfig, epoch: int) -> float:
    """Return the factor of the learning rate in an epoch, counted from 0."""
    rise = min((epoch + 1) / config.warmup_epochs, 1.0)
    reductions = 0 if epoch < config.decay_from else 1 + (epoch - config.decay_from) // config.decay_every
    return rise * config.decay_factor**reductions


class VQAExperiment(Experiment):
    """Questions, a fresh model and Adam with MCAN's schedule.

    Args:
        config: The run.
        data: The folder of the data sets, or splits that are already loaded.

    Attributes:
        num_skipped: Training questions left out because none of their answers is in the vocabulary.
        num_vectors: Words whose embeddings begin with a pretrained vector; None if the config names no vectors.
    """

    model: MCAN

    def __init__(self, config: VQAConfig, data: Path | dict[str, Split] | None) -> None:
        splits = data if isinstance(data, dict) else load_splits(config.data, data)
        whole = splits["train"]
        vocabulary = build_vocabulary(whole.questions, config.data)
        answers = vocabulary.answer_index.keys()
        known = [index for index, question in enumerate(whole.questions) if not answers.isdisjoint(question.answers)]
        self.train_split = whole.subset(known)
        self.validation = splits.get("validation")
        self.num_examples, self.num_skipped = len(known), len(whole) - len(known)
        self.vocabulary = vocabulary
        scale = whole.regions.variance**-0.5 if config.data.scale_features else 1.0
        self.model = build_model(config, vocabulary, whole.regions.dim, scale)
        self.num_vectors: int | None = None
        if config.data.word_vectors is not None:
            path = (data if isinstance(data, Path) else Path()) / config.data.word_vectors
            self.num_vectors = load_vectors(self.model.embedding.weight, path, vocabulary.word_index)
        self.is_recordable = is_recordable(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=config.learning_rate, betas=(0.9, 0.98), eps=1e-9)
        steps_per_epoch = num_steps(self, config.training) // config.training.epochs
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: learning_rate_factor(config, step // steps_per_epoch)
        )

    def collate(self, indices: Int[Tensor, " b"]) -> dict[str, Tensor]:
        """Return words, regions, their masks and the soft targets."""
        questions = [self.train_split.questions[index] for index in indices.tolist()]
        targets = soft_targets(questions, self.vocabulary, "leave_one_out")
        return {**model_inputs(self.train_split, indices, self.vocabulary), "targets": targets}

    def nll(self, model: nn.Module, batch: dict[str, Tensor]) -> Float[Tensor, ""]:
        """Return the binary cross-entropy, summed over answers and questions."""
        targets = batch["targets"]
        inputs = {name: value for name, value in batch.items() if name != "targets"}

        def run() -> Float[Tensor, " b"]:
            return F.binary_cross_entropy_with_logits(model(**inputs).float(), targets, reduction="none").sum(dim=1)

        return with_score_function(model, run).sum()

    def validate(self, model: nn.Module) -> dict[str, float | int]:
        """Return NLL and accuracy (min(n/3, 1)) of the posterior mean on the validation questions, and what was skipped."""
        counts: dict[str, float | int] = {"skipped_questions": self.num_skipped}
        if self.num_vectors is not None:
            counts["words_with_vectors"] = self.num_vectors
        if self.validation is None:
            return counts
        device, count = next(model.parameters()).device, len(self.validation)
        nll = accuracy = 0.0
        for indices in torch.arange(count).split(256):
            inputs = model_inputs(self.validation, indices, self.vocabulary)
            logits = model(**{name: value.to(device) for name, value in inputs.items()}).float().cpu()
            questions = [self.validation.questions[index] for index in indices.tolist()]
            targets = soft_targets(questions, self.vocabulary, "paper")
            nll += float(F.binary_cross_entropy_with_logits(logits, targets, reduction="sum"))
            accuracy += float(targets.gather(1, logits.argmax(dim=1, keepdim=True)).sum())
        return {"validation_nll": nll / count, "validation_accuracy": accuracy / count, **counts}


def model_inputs(split: Split, indices: Int[Tensor, " b"], vocabulary: Vocabulary) -> dict[str, Tensor]:
    """Return the model's arguments for some questions of a split."""
    words, word_mask = vocabulary.encode([split.questions[index].text for index in indices.tolist()])
    regions, region_mask = split.gather(indices)
    return {"words": words, "word_mask": word_mask, "regions": regions, "region_mask": region_mask}


def build_model(config: VQAConfig, vocabulary: Vocabulary, region_dim: int, feature_scale: float = 1.0) -> MCAN:
    """Build the model a config describes, with fresh parameters."""
    return MCAN(config.attention, vocabulary, region_dim=region_dim, size=config.model, feature_scale=feature_scale)


TRAINING = Training("vqa", VQAConfig, CONFIGS, VQAExperiment, lambda config: True)
load_config, fit, train_run = TRAINING.load_config, TRAINING.fit, TRAINING.train_run


def load_run(folder: Path) -> tuple[VQAConfig, MCAN]:
    """Read a run folder back: its config and the trained model with its vocabulary, in eval mode."""
    config = TRAINING.load_run_config(folder)
    tensors, _ = read_tensors(folder / CHECKPOINT_FILE)
    missing = sorted({"vocabulary_bytes", "region_proj.weight"} - tensors.keys())
    if missing:
        raise RunError(f"{folder / CHECKPOINT_FILE} must be a checkpoint of recipe 'vqa', but lacks {missing}")
    vocabulary = Vocabulary.from_tensor(tensors["vocabulary_bytes"])
    model = build_model(config, vocabulary, tensors["region_proj.weight"].shape[1])
    load_parameters(folder, model)
    return config, model
