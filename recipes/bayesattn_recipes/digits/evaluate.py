"""Draw M predictions from a trained digit classifier on every test split, with the attention behind them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from bayesattn.doubt import uncertainty
from bayesattn.evaluation.runs import DoubtfulExamples, Predictions, SplitPredictions
from bayesattn.evaluation.threads import one_thread
from bayesattn.prediction import predict
from bayesattn_recipes.common.attention import layer_maps
from bayesattn_recipes.common.doubt import most_doubtful, with_noise
from bayesattn_recipes.common.prediction import PredictRun, drawing_methods
from bayesattn_recipes.digits.config import DigitsConfig
from bayesattn_recipes.digits.data import GRID, LOOKS, Split, evaluation_splits
from bayesattn_recipes.digits.model import DigitClassifier
from bayesattn_recipes.digits.train import load_run

# draws per forward pass: larger is slower, because the activations leave the cache
CHUNK_SIZE = 2


@dataclass(frozen=True)
class DigitsPredictor:
    """A run of the recipe."""

    config: DigitsConfig
    model: DigitClassifier

    @property
    def variant(self) -> str:
        """What the run was trained with."""
        return self.config.attention.variant

    @property
    def methods(self) -> list[str]:
        """How it can be drawn."""
        return available_methods(self.config)

    def conditions(self, noise: tuple[float, ...], num_samples: int) -> dict[str, Split]:
        """Return the evaluation splits."""
        return evaluation_splits(self.config.train_size, noise, self.config.dataset)

    def predict(self, name: str, condition: Split, methods: Sequence[str], num_samples: int, seed: int) -> SplitPredictions:
        """Predict a split; keep the attention for the test images."""
        samples = {method: draw(self.model, condition.images, method, num_samples, seed) for method in methods}
        if name != "test":
            return SplitPredictions(samples, condition.labels)
        maps = attention_maps(self.model, condition, num_samples, seed)
        doubtful = None if self.config.attention.is_rival else doubtful_examples(self.model, condition.images)
        return SplitPredictions(samples, condition.labels, condition.images, maps, doubtful=doubtful)

    def assemble(self, splits: dict[str, SplitPredictions], methods: list[str], seed: int) -> Predictions:
        """Add the names of the classes and the grid of the patches."""
        return Predictions(splits, list(LOOKS[self.config.dataset].class_names), methods, seed, key_grid=(GRID, GRID))


# no data folder is needed: the images come with scikit-learn
predict_run = one_thread()(PredictRun(lambda folder, data: DigitsPredictor(*load_run(folder))))


def available_methods(config: DigitsConfig) -> list[str]:
    """Return how predictions can be drawn from a model, the usual way second."""
    drops = config.dropout > 0.0 or config.attention.variant == "mc-dropout"
    return drawing_methods(is_stochastic=config.attention.is_stochastic, drops=drops)


def doubtful_examples(model: DigitClassifier, images: Float[Tensor, "n side side *channels"]) -> DoubtfulExamples:
    """Return the images with the most doubt in closed form."""
    with with_noise(model):
        found = most_doubtful(lambda places: uncertainty(model, images[list(places)]), [range(len(images))])
    return DoubtfulExamples.from_uncertainty(*found)


@torch.no_grad()
def draw(
    model: DigitClassifier, images: Float[Tensor, "n side side *channels"], method: str, num_samples: int, seed: int
) -> Float[Tensor, "s n c"]:
    """Return class probabilities, draws first; one "draw" for method `mean`."""
    if method == "mean":
        return torch.softmax(model(images), dim=-1).unsqueeze(0)
    has_dropout = method.endswith("dropout")
    return predict(model, images, num_samples, seed, CHUNK_SIZE, batch_dims=0, dropout=has_dropout).samples


def attention_maps(
    model: DigitClassifier, split: Split, num_samples: int, seed: int
) -> dict[str, Float[Tensor, "n heads keys"]]:
    """Return what the readout token of the last layer attends to: mean weights and, if drawn, deviation and prior Ψ."""
    return layer_maps(
        model, model.last_attention, lambda: model(split.images), lambda weights, _: weights[:, :, 0], num_samples, seed
    )
