"""Train a digit classifier with soft or Bayesian attention."""

from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from bayesattn_recipes.baselines import with_score_function
from bayesattn_recipes.common.loop import Experiment, num_steps
from bayesattn_recipes.common.runs import Training, load_parameters
from bayesattn_recipes.digits.config import DigitsConfig
from bayesattn_recipes.digits.data import load_splits
from bayesattn_recipes.digits.model import DigitClassifier

CONFIGS = Path(__file__).parent / "configs"


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


# the images come with scikit-learn, not from the folder of the data sets
TRAINING = Training("digits", DigitsConfig, CONFIGS, lambda config, data: DigitsExperiment(config), lambda config: True)
load_config, fit, train_run = TRAINING.load_config, TRAINING.fit, TRAINING.train_run


def load_run(folder: Path) -> tuple[DigitsConfig, DigitClassifier]:
    """Read a run folder back: its config and the trained model, in eval mode."""
    config = TRAINING.load_run_config(folder)
    model = DigitClassifier(config)
    load_parameters(folder, model)
    return config, model
