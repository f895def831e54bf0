"""Fine-tune an encoder with soft or Bayesian attention, write the run, and read it back."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from bayesattn.convert import conversion_report
from bayesattn.evaluation.runs import read_run
from bayesattn.files import RunError
from bayesattn_recipes.baselines import AttentionChoice
from bayesattn_recipes.common import runs
from bayesattn_recipes.common.config import Count, MetricLog, Seed, Share, config_class
from bayesattn_recipes.language.features import Collator
from bayesattn_recipes.language.fit import FineTuning, LanguageTraining, quiet
from bayesattn_recipes.language.model import build_model, encoder_config, load_pretrained, load_tokenizer, set_up
from bayesattn_recipes.language.prepare import Prepared, prepare
from bayesattn_recipes.language.tasks import Task, find_task

CONFIGS = Path(__file__).parent / "configs"
TOKENIZER_FOLDER = "tokenizer"
# the answers behind the predictions of a span task; written by `evaluate`
ANSWERS_FILE = "answers.json"


@config_class
class LanguageConfig:
    """Everything that decides a run.

    Args:
        task: One of `tasks.TASKS`.
        encoder: `e5-small`, a folder, a name on the hub, or `tiny`.
        attention: Soft or Bayesian attention, or a rival of it (docs/recipes/rivals.md).
        training: How long and how fast.
        seed: Seed of the head's initialization, batch order, dropout and noise.
        max_length: Tokens per text, pair or window; longer texts lose their end, longer paragraphs get more windows.
        dropout: Dropout rate of the encoder's hidden states; null keeps the encoder's own rate.
        attention_dropout: Dropout rate of the attention weights; null keeps the encoder's rate for soft attention and
            switches it off for a sampled one, whose noise takes its place.
        classifier_dropout: Dropout rate before the head; null keeps the encoder's rate.
        train_size: Largest number of training examples; null takes all.
        source: `files` of the data folder, or the hub's copy through the package `datasets`.
    """

    task: str = "mrpc"
    encoder: str = "e5-small"
    attention: AttentionChoice = field(default_factory=lambda: AttentionChoice("soft"))
    training: LanguageTraining = field(default_factory=LanguageTraining)
    seed: Seed = 0
    max_length: Annotated[int, Field(ge=8, le=512)] = 128
    dropout: Share | None = None
    attention_dropout: Share | None = None
    classifier_dropout: Share | None = None
    train_size: Count | None = None
    source: Literal["files", "datasets"] = "files"

    def __post_init__(self) -> None:
        self.attention.check_layers()
        kept = ("last", "validation_loss", *(f"validation_{name}" for name in self._validation_metrics))
        if self.training.keep not in kept:
            raise ValueError(f"training.keep must be one of {', '.join(map(repr, kept))}, got {self.training.keep!r}")

    @property
    def _validation_metrics(self) -> tuple[str, ...]:
        task = find_task(self.task)
        return () if task.kind == "spans" else task.metrics

    @property
    def dropout_rates(self) -> dict[str, float | None]:
        """The three rates as used; None keeps the encoder's."""
        attention = self.attention_dropout
        if attention is None and self.attention.is_stochastic:
            attention = 0.0
        return {"dropout": self.dropout, "attention_dropout": attention, "classifier_dropout": self.classifier_dropout}


@dataclass(frozen=True)
class Fitted:
    """A trained model with its data and log."""

    model: PreTrainedModel
    prepared: Prepared
    log: MetricLog


@dataclass(frozen=True)
class LoadedRun:
    """A run folder, read.

    Attributes:
        folder: Its path.
        config: Config of the run.
        task: Its task.
        model: In eval mode, on a GPU if there is one.
        tokenizer: Its tokenizer.
        class_names: One per class.
        num_texts: Texts per example, one or two.
        data: The data folder it was trained from, as given; None if none was.
    """

    folder: Path
    config: LanguageConfig
    task: Task
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    class_names: tuple[str, ...]
    num_texts: int
    data: Path | None


def prepare_run(config: LanguageConfig, data: Path | None) -> Prepared:
    """Read and tokenize the data of a config."""
    return prepare(config.task, config.encoder, config.max_length, config.train_size, config.source, data)


def make_collator(config: LanguageConfig, tokenizer: Any) -> Collator:
    """Return the collator of a run."""
    return Collator(tokenizer.pad_token_id or 0, max_length=config.max_length)


def make_model(config: LanguageConfig, prepared: Prepared) -> PreTrainedModel:
    """Build the model of a config with its encoder's weights; the head is drawn from torch's generator."""
    with quiet():
        settings = encoder_config(prepared.encoder, prepared.tokenizer)
        set_up(settings, prepared.task.kind, len(prepared.class_names), config.dropout_rates)
        return load_pretrained(prepared.encoder, settings, prepared.task.kind, config.attention)


class LanguageExperiment(FineTuning):
    """The texts of a task, an encoder with a fresh head, and the files of its run.

    Args:
        config: The run.
        data: The data folder, or what `prepare_run` read from it before.
    """

    def __init__(self, config: LanguageConfig, data: Path | Prepared | None) -> None:
        self.data = data if isinstance(data, Path) else None
        self.prepared = data if isinstance(data, Prepared) else prepare_run(config, data)
        collator = make_collator(config, self.prepared.tokenizer)
        model = make_model(config, self.prepared)
        super().__init__(model, self.prepared.task, self.prepared.splits, collator, config.training)

    def write_files(self, folder: Path) -> None:
        """Write the tokenizer: with it the folder needs neither data nor encoder; `serve.load` reads it alone."""
        (folder / ANSWERS_FILE).unlink(missing_ok=True)
        self.prepared.tokenizer.save_pretrained(folder / TOKENIZER_FOLDER)

    def facts(self) -> dict[str, Any]:
        """Return what describes the model, and what it was trained on."""
        return describe(self.model, self.prepared, self.data)


def describe(model: PreTrainedModel, prepared: Prepared, data: Path | None) -> dict[str, Any]:
    """Return what `run.json` says about a model and its data."""
    return {
        "task": prepared.task.name,
        "class_names": list(prepared.class_names),
        "num_texts": prepared.num_texts,
        "model_config": model.config.to_dict(),
        "data": None if data is None else str(data),
        "data_note": prepared.note,
        "skipped_rows": prepared.skipped,
        "num_examples": {name: len(split.questions or split.rows) for name, split in prepared.splits.items()},
        "num_truncated": {name: split.num_truncated for name, split in prepared.splits.items()},
        "added_parameters": conversion_report(model).added_parameters,
    }


TRAINING = runs.Training("language", LanguageConfig, CONFIGS, LanguageExperiment)
load_config, train_run = TRAINING.load_config, TRAINING.train_run


def train_model(
    config: LanguageConfig,
    data: Path | None,
    on_progress: Callable[[int, int], Any] = lambda done, total: None,
    prepared: Prepared | None = None,
) -> Fitted:
    """Train a model without writing anything.

    Args:
        config: The run.
        data: The data folder.
        on_progress: Called with the optimizer steps done and to do.
        prepared: From `prepare_run`, where that was done before; None does it now.
    """
    prepared = prepare_run(config, data) if prepared is None else prepared
    model, log = TRAINING.fit(config, prepared, on_progress)
    return Fitted(model, prepared, log)


def write_record(out: Path, config: LanguageConfig, fitted: Fitted, data: Path | None) -> None:
    """Write `run.json` of a trained model."""
    facts = describe(fitted.model, fitted.prepared, data)
    runs.write_record(out, TRAINING.recipe, config, fitted.model, fitted.log, **facts)


def load_run(folder: Path) -> LoadedRun:
    """Read a run folder back; only the folder is needed."""
    config = TRAINING.load_run_config(folder)
    run = read_run(folder)
    task = find_task(config.task)
    if not (folder / TOKENIZER_FOLDER / "tokenizer.json").is_file():
        raise RunError(f"{folder / TOKENIZER_FOLDER} has no tokenizer.json. Give a run folder as it was written")
    with quiet():
        tokenizer = load_tokenizer(str(folder / TOKENIZER_FOLDER), list)
        try:
            class_names, num_texts = tuple(run["class_names"]), int(run["num_texts"])
            model = build_model(AutoConfig.for_model(**run["model_config"]), task.kind, config.attention)
        except Exception as error:
            # transformers and torch raise many kinds of errors if a size is missing, of the wrong type or negative
            raise RunError(f"{folder} does not describe a model that can be built: {error}") from error
    runs.load_parameters(folder, model)
    if torch.cuda.is_available():
        torch.nn.Module.cuda(model)
    data: Any = run.get("data")
    return LoadedRun(folder, config, task, model, tokenizer, class_names, num_texts, None if data is None else Path(data))
