"""Train Att2in by maximum likelihood, with soft, hard, Gaussian or Bayesian attention."""

from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bayesattn.files import RunError, read_tensors
from bayesattn_recipes.baselines import AttentionChoice, build_step_attention, with_score_function
from bayesattn_recipes.baselines.config import IN_LAYERS
from bayesattn_recipes.captioning.batches import encode_captions, make_batch, pad_batch, step_nll
from bayesattn_recipes.captioning.data import CaptionData, CaptionSplit, DatasetName, load_data
from bayesattn_recipes.captioning.decoding import beam_search
from bayesattn_recipes.captioning.model import Att2in
from bayesattn_recipes.captioning.scoring import CorpusBleu
from bayesattn_recipes.captioning.vocabulary import Vocabulary
from bayesattn_recipes.common.config import (
    Count,
    MetricLog,
    Positive,
    Seed,
    Share,
    config_class,
)
from bayesattn_recipes.common.folders import CHECKPOINT_FILE
from bayesattn_recipes.common.loop import Experiment, TrainingConfig, num_steps
from bayesattn_recipes.common.runs import Training, load_parameters

CONFIGS = Path(__file__).parent / "configs"


@config_class
class CaptioningConfig:
    """Everything that decides a run. The defaults are the paper's settings for COCO where it gives them (App. C.3).

    Args:
        dataset: `shapes`, `flickr8k` or `coco`.
        attention: Soft or Bayesian attention, or one of their rivals.
        training: Epochs, batch size in captions (those of an image stay together), KL schedule.
        seed: Initialization, batch order, dropout and attention noise.
        width: Features of words, regions and states.
        attention_dim: Width of the attention's tanh layer.
        dropout: On words, regions and states.
        min_count: Occurrences in the training captions that make a word known.
        max_length: Words of a caption; longer ones are cut.
        learning_rate: Adam's, at first.
        learning_rate_decay: Factor of the learning rate after every `decay_epochs`.
        decay_epochs: Epochs between two decays.
        clip_value: Largest absolute value of a gradient's entry; None does not clip.
        num_beams: Beams of the captions that are scored; 1 is greedy search, the paper's.
        length_penalty: Length penalty of the beam search.
        decoder_mode: `auto` records training steps as CUDA graphs, one for every shape of batch, if one process trains on
            a GPU and the noise of all words can be drawn before the first (soft, BAM, hard with REINFORCE, noise on the
            context); `eager` never does. Both compute the same.
    """

    dataset: DatasetName = "shapes"
    attention: AttentionChoice = field(default_factory=lambda: AttentionChoice(variant="soft"))
    training: TrainingConfig = field(default_factory=lambda: TrainingConfig(epochs=30, batch_size=50))
    seed: Seed = 0
    width: Count = 512
    attention_dim: Count = 512
    dropout: Share = 0.5
    min_count: Count = 5
    max_length: Count = 16
    learning_rate: Positive = 5e-4
    learning_rate_decay: Positive = 0.8
    decay_epochs: Count = 3
    clip_value: Positive | None = 0.1
    num_beams: Count = 1
    length_penalty: float = 0.0
    decoder_mode: Literal["auto", "eager"] = "auto"

    def __post_init__(self) -> None:
        choice = self.attention
        if choice.is_variational and choice.variant != "variational-exact":
            choices = ", ".join(map(repr, (*IN_LAYERS, "variational-exact")))
            raise ValueError(f"captions have no inference network for variant {choice.variant!r}. Choose one of {choices}")


def build_model(config: CaptioningConfig, vocabulary: Vocabulary, feature_dim: int) -> Att2in:
    """Build the model a config describes, with fresh parameters."""
    choice, top_keys = config.attention, 0
    if choice.is_variational:
        choice, top_keys = AttentionChoice("soft"), choice.top_keys
    attention = build_step_attention(choice, config.width, config.width, config.attention_dim)
    sizes = {"feature_dim": feature_dim, "width": config.width, "dropout": config.dropout}
    return Att2in(attention, vocabulary, **sizes, top_keys=top_keys)


class CaptioningExperiment(Experiment):
    """Captions of the training images, a fresh model, and Adam with a stepwise decay. An example is a caption."""

    model: Att2in

    def __init__(self, config: CaptioningConfig, data: CaptionData) -> None:
        self.config, self.data = config, data
        train_split = data.splits["train"]
        sentences = (caption for captions in train_split.captions for caption in captions)
        vocabulary = Vocabulary.build(sentences, config.min_count)
        self.train = encode_captions(train_split, vocabulary, config.max_length)
        self.validation = encode_captions(data.splits["validation"], vocabulary, config.max_length)
        self.bleu = CorpusBleu(data.splits["validation"].captions)
        self.num_examples = len(self.train.words)
        self.model = build_model(config, vocabulary, data.regions.dim)
        # rivals that draw inside the loop over words train without recording
        self.is_recordable = config.decoder_mode == "auto" and self.model.attention.draws_ahead
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=config.learning_rate)
        if config.clip_value is not None:
            clip_value = config.clip_value
            self.optimizer.register_step_pre_hook(
                lambda optimizer, args, kwargs: nn.utils.clip_grad_value_(self.model.parameters(), clip_value)
            )
        steps_per_decay = config.decay_epochs * num_steps(self, config.training) // config.training.epochs
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, steps_per_decay, config.learning_rate_decay)

    def batches(self, config: TrainingConfig, generator: torch.Generator) -> Sequence[Int[Tensor, " c"]]:
        """Shuffle the images; the captions of an image stay together, so that its features are read once."""
        place = torch.randperm(len(self.data.splits["train"]), generator=generator)
        return place[self.train.images].argsort(stable=True).split(config.batch_size)

    def collate(self, indices: Int[Tensor, " c"]) -> dict[str, Tensor]:
        """Return regions, words and targets."""
        return make_batch(self.data, self.data.splits["train"], self.train, indices)

    def pad(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the batch padded to the number of steps of the longest caption."""
        return pad_batch(batch, self.train.words.shape[1])

    def num_labels(self, batch: dict[str, Tensor]) -> int:
        """Return the words to predict, ends included."""
        return int(batch["lengths"].sum())

    def nll(self, model: nn.Module, batch: dict[str, Tensor]) -> Float[Tensor, ""]:
        """Return the cross-entropy summed over words; hard attention adds its score-function gradient, of value 0."""
        steps = torch.arange(batch["words"].shape[1], device=batch["words"].device) < batch["lengths"][:, None]
        return with_score_function(model, lambda: step_nll(model, batch), steps).sum()

    def validate(self, model: nn.Module) -> dict[str, float]:
        """Return NLL per word and BLEU-4 of the captions, both of the posterior mean, on the validation images."""
        device = next(model.parameters()).device
        split, total, labels = self.data.splits["validation"], torch.zeros((), device=device), 0
        for indices in torch.arange(len(self.validation.words)).split(VALIDATION_BATCH):
            batch = make_batch(self.data, split, self.validation, indices)
            labels += self.num_labels(batch)
            total += self.nll(model, {name: value.to(device) for name, value in batch.items()})
        captions = caption_split(self.model, self.data, split, **search_options(self.config))
        return {
            "validation_nll": float(total) / labels,
            "validation_bleu": self.bleu(captions),
            "skipped_captions": self.train.num_skipped + self.validation.num_skipped,
        }


# captions, and images, in one forward pass where no gradient is needed
VALIDATION_BATCH = 2000


def search_options(config: CaptioningConfig) -> dict[str, Any]:
    """Return the search options of a run, as `beam_search` takes them."""
    return {"num_beams": config.num_beams, "max_length": config.max_length, "length_penalty": config.length_penalty}


@torch.no_grad()
def caption_split(
    model: Att2in,
    data: CaptionData,
    split: CaptionSplit,
    *,
    num_beams: int = 1,
    **options: Any,
) -> list[str]:
    """Return a caption for every image of a split; options as for `beam_search`.

    The words of all batches are copied from the device at once.
    """
    device, found = next(model.parameters()).device, []
    for rows in split.rows.split(max(1, VALIDATION_BATCH // num_beams)):
        regions, mask = data.regions.gather(rows)
        found.append(beam_search(model, regions.to(device), mask.to(device), num_beams=num_beams, **options).words)
    return [" ".join(model.vocabulary.decode(words)) for words in torch.cat(found).tolist()]


def build_experiment(config: CaptioningConfig, data: Path | CaptionData | None = None) -> CaptioningExperiment:
    """Return the experiment of a config; `data` is the folder of the data sets, or a data set that is already loaded."""
    return CaptioningExperiment(config, data if isinstance(data, CaptionData) else load_data(config.dataset, data))


# the generated world's tensors are small
TRAINING = Training(
    "captioning", CaptioningConfig, CONFIGS, build_experiment, is_small=lambda config: config.dataset == "shapes"
)
load_config, fit, train_run = TRAINING.load_config, TRAINING.fit, TRAINING.train_run


def kept_row(config: CaptioningConfig, log: MetricLog) -> dict[str, Any]:
    """Return the measures of the epoch whose parameters were kept."""
    return log.rows[-1] if config.training.keep == "last" else [row for row in log.rows if row["is_best"]][-1]


def load_run(folder: Path) -> tuple[CaptioningConfig, Att2in]:
    """Read a run folder back: its config and the trained model with its vocabulary, in eval mode; needs no data."""
    config = TRAINING.load_run_config(folder)
    tensors, _ = read_tensors(folder / CHECKPOINT_FILE)
    try:
        vocabulary = Vocabulary.from_tensor(tensors["vocabulary_bytes"])
        feature_dim = tensors["region_embed.weight"].shape[1]
    except (KeyError, ValueError) as error:
        raise RunError(f"{folder / CHECKPOINT_FILE} does not belong to a captioning model: {error}") from None
    model = build_model(config, vocabulary, feature_dim)
    load_parameters(folder, model)
    return config, model
