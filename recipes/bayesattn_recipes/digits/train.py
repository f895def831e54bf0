"""Train a digit classifier with soft or Bayesian attention."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from bayesattn.evaluation.threads import one_thread
from bayesattn_recipes.baselines import with_score_function
from bayesattn_recipes.common import runs
from bayesattn_recipes.common.config import MetricLog, read_config
from bayesattn_recipes.common.loop import Experiment, num_steps
from bayesattn_recipes.digits.config import DigitsConfig
from bayesattn_recipes.digits.data import load_splits
from bayesattn_recipes.digits.model import DigitClassifier

RECIPE = "digits"
CONFIGS = Path(__file__).parent / "configs"


def load_config(name: str, settings: Sequence[str] = ()) -> DigitsConfig:
    """Read a config by its name (`wc`) or path, with `name=value` settings on top."""
    return read_config(DigitsConfig, name, CONFIGS, settings)


class DigitsExperiment(Experiment):
    """The digits, a fresh model and AdamW with a one-cycle schedule."""

    model: DigitClassifier

    def __init__(self, config: DigitsConfig) -> None:
        splits = load_splits(config.train_size, config.dataset)
        self.train, self.validation = splits["train"], splits["validation"]
        self.num_examples = config.train_size
        self.model = DigitClassifier(config)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
        )
        total = num_steps(self, config.training)
        # torch divides by the length of the rise, which is 0 for a tenth of ten steps
        rise = 0.2 if total == 10 else 0.1
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, config.learning_rate, total_steps=total, pct_start=rise
        )

    def collate(self, indices: Int[Tensor, " b"]) -> dict[str, Tensor]:
        """Return images and labels."""
        assert self.train.labels is not None
        return {"images": self.train.images[indices], "labels": self.train.labels[indices]}

    def nll(self, model: nn.Module, batch: dict[str, Tensor]) -> Float[Tensor, ""]:
        """Return the summed cross-entropy."""

        def run() -> Float[Tensor, " b"]:
            return F.cross_entropy(model(batch["images"]), batch["labels"], reduction="none")

        return with_score_function(model, run).sum()

    def validate(self, model: nn.Module) -> dict[str, float]:
        """Return NLL and accuracy of the posterior mean on the validation images."""
        assert self.validation.labels is not None
        device = next(model.parameters()).device
        logits, labels = model(self.validation.images.to(device)), self.validation.labels.to(device)
        accuracy = (logits.argmax(dim=-1) == labels).float().mean()
        return {"validation_nll": float(F.cross_entropy(logits, labels)), "validation_accuracy": float(accuracy)}


@one_thread()
def fit(
    config: DigitsConfig, on_progress: Callable[[int, int], Any] = lambda done, total: None
) -> tuple[DigitClassifier, MetricLog]:
    """Train a model and return it with its log, without a run folder."""
    return runs.fit(config, lambda: DigitsExperiment(config), on_progress)


def build_experiment(config: DigitsConfig, data: Path | None = None) -> DigitsExperiment:
    """Return the experiment of a config; the images come with scikit-learn, not from the folder of the data sets."""
    return DigitsExperiment(config)


train_run = one_thread()(runs.TrainRun(RECIPE, build_experiment))


def load_run(folder: Path) -> tuple[DigitsConfig, DigitClassifier]:
    """Read a run folder back: its config and the trained model, in eval mode."""
    config = runs.load_run_config(folder, DigitsConfig, RECIPE)
    model = DigitClassifier(config)
    runs.load_parameters(folder, model)
    return config, model
