"""Draw M answers of a trained model to every test question, on clean and on noisy features."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from bayesattn.evaluation.runs import Predictions, SplitPredictions
from bayesattn.evaluation.threads import one_thread
from bayesattn.metrics import PredictionTable, tabulate_predictions
from bayesattn.precision import without_autocast
from bayesattn.prediction import predict
from bayesattn.scalars import check_not_negative
from bayesattn_recipes.common.prediction import PredictRun, drawing_methods
from bayesattn_recipes.vision.features import add_noise
from bayesattn_recipes.vqa.accuracy import soft_targets
from bayesattn_recipes.vqa.attend import attention_maps
from bayesattn_recipes.vqa.data import Split, load_splits
from bayesattn_recipes.vqa.model import MCAN
from bayesattn_recipes.vqa.train import VQAConfig, load_run, model_inputs

# the paper's noisy data: variance 5 on every channel of the backbone (App. C.2.3)
PAPER_VARIANCE = 5.0
# questions answered together, and draws at a time
BATCH_SIZE = 128
CHUNK_SIZE = 10
# batches per table: on a GPU a table costs its launches, whatever its length
TABLE_BATCHES = 8
# most values of one split and method in a run's predictions; larger sets keep evenly spaced questions
MAX_VALUES = 2**25
# longest side of the pictures kept for the report
PICTURE_SIDE = 112


@dataclass(frozen=True)
class Condition:
    """A split with noise of some variance on its features."""

    name: str
    split: Split
    variance: float = 0.0


def noisy_conditions(split: Split, strengths: Sequence[float], dataset: str) -> list[Condition]:
    """Return the test split with noise: `noise-S` of S standard deviations of the features, and the paper's variance.

    The paper's absolute variance belongs to features of an ImageNet backbone; the shapes world has none.
    """
    for strength in strengths:
        check_not_negative(strength=strength)
    conditions = [
        Condition(f"noise-{strength:g}", split, strength**2 * split.regions.variance) for strength in strengths if strength
    ]
    if dataset != "shapes":
        conditions.append(Condition("noise-variance-5", split, PAPER_VARIANCE))
    return conditions


@dataclass(frozen=True)
class VQAPredictor:
    """A run of the recipe on its device, and the folder of the data sets."""

    config: VQAConfig
    model: MCAN
    data: Path | None

    @property
    def variant(self) -> str:
        """What the run was trained with."""
        return self.config.attention.variant

    @property
    def methods(self) -> list[str]:
        """How it can be drawn."""
        return available_methods(self.config)

    @cached_property
    def splits(self) -> dict[str, Split]:
        """The questions of the run's data set."""
        return load_splits(self.config.data, self.data)

    def conditions(self, noise: tuple[float, ...], num_samples: int) -> dict[str, Condition]:
        """Return the validation and test questions, the test questions also with noise on the features of their images."""
        limit = max(1, MAX_VALUES // (num_samples * len(self.model.vocabulary.answers)))
        splits = {name: thin(split, limit) for name, split in self.splits.items() if name != "train"}
        clean = [Condition(name, split) for name, split in splits.items()]
        noisy = noisy_conditions(splits["test"], noise, self.config.data.dataset)
        return {condition.name: condition for condition in (*clean, *noisy)}

    def predict(
        self, name: str, condition: Condition, methods: Sequence[str], num_samples: int, seed: int
    ) -> SplitPredictions:
        """Predict the questions of one condition; keep texts, pictures and attention of the test questions."""
        with training_precision(self.config):
            found = draws(self.model, condition, methods, num_samples, seed)
            parts = [{method: part.cpu() for method, part in by_method.items()} for by_method, _ in found]
        samples = {method: torch.cat([part[method] for part in parts], dim=1) for method in methods}
        targets = soft_targets(condition.split.questions, self.model.vocabulary, "paper")
        if name != "test":
            return SplitPredictions(samples, targets)
        return SplitPredictions(samples, targets, **_shown(self.model, condition.split, num_samples, seed))

    def assemble(self, splits: dict[str, SplitPredictions], methods: list[str], seed: int) -> Predictions:
        """Add the test questions by their types, the answers, and their measures."""
        assert splits["test"].labels is not None
        test = thin(self.splits["test"], len(splits["test"].labels))
        return Predictions(
            splits | by_kind(test, splits["test"]), list(self.model.vocabulary.answers), methods, seed,
            key_grid=test.regions.grid, task="multilabel", test="welch",
        )  # fmt: skip


def open_run(folder: Path, data: Path | None) -> VQAPredictor:
    """Read a run; `data` is the folder of the data sets, for runs that read files."""
    config, model = load_run(folder)
    return VQAPredictor(config, model.to(choose_device()), data)


predict_run = one_thread()(PredictRun(open_run))


def available_methods(config: VQAConfig) -> list[str]:
    """Return how answers can be drawn from a model, the usual way second.

    The paper draws attention and dropout together if attention is Bayesian, and dropout alone if it is soft.
    """
    drops = config.model.dropout > 0.0 or config.model.attention_dropout > 0.0 or config.attention.variant == "mc-dropout"
    return drawing_methods(is_stochastic=config.attention.is_stochastic, drops=drops, together_first=True)


def thin(split: Split, limit: int) -> Split:
    """Return at most `limit` questions, evenly spaced."""
    if len(split) <= limit:
        return split
    return split.subset([index * len(split) // limit for index in range(limit)])


@torch.no_grad()
def draws(
    model: MCAN, condition: Condition, methods: Sequence[str], num_samples: int, seed: int
) -> Iterator[tuple[dict[str, Float[Tensor, "_ b c"]], list[int]]]:
    """Yield the probability of every answer by method, draws first, on the model's device, with the questions' indices.

    The feature noise depends on the seed and the question alone, so that it is the same for all methods and models on a
    device.
    """
    split, device = condition.split, next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for number, indices in enumerate(torch.arange(len(split)).split(BATCH_SIZE)):
        inputs = {name: value.to(device) for name, value in model_inputs(split, indices, model.vocabulary).items()}
        if condition.variance:
            inputs["regions"] = add_noise(inputs["regions"], condition.variance, generator)
        found = {}
        for method in methods:
            if method == "mean":
                samples = torch.sigmoid(model(**inputs).float()).unsqueeze(0)
            else:
                samples = predict(
                    model,
                    inputs,
                    num_samples,
                    seed=seed * 1_000_003 + number,
                    chunk_size=CHUNK_SIZE,
                    batch_dims=0,
                    task="multilabel",
                    dropout=method.endswith("dropout"),
                ).samples
            found[method] = samples
        yield found, indices.tolist()


def tabulate(
    model: MCAN, condition: Condition, methods: Sequence[str], num_samples: int, seed: int
) -> dict[str, PredictionTable]:
    """Return by method one row of numbers per question, without keeping the draws."""
    tables: dict[str, list[PredictionTable]] = {method: [] for method in methods}
    found = draws(model, condition, methods, num_samples, seed)
    while parts := list(itertools.islice(found, TABLE_BATCHES)):
        questions = [condition.split.questions[index] for _, indices in parts for index in indices]
        targets = soft_targets(questions, model.vocabulary, "paper")
        for method in methods:
            samples = torch.cat([by_method[method] for by_method, _ in parts], dim=1)
            # on the device of the draws: in full precision, the entropy of a thousand answers is expensive
            with without_autocast(samples.device.type):
                table = tabulate_predictions(samples, targets.to(samples.device), task="multilabel", test="welch")
            tables[method].append(table)
    return {method: _joined(rows) for method, rows in tables.items()}


def _joined(tables: list[PredictionTable]) -> PredictionTable:
    columns = {}
    for field in dataclasses.fields(PredictionTable):
        values = [getattr(table, field.name) for table in tables]
        columns[field.name] = torch.cat(values).cpu() if isinstance(values[0], Tensor) else values[0]
    return PredictionTable(**columns)


def by_kind(split: Split, whole: SplitPredictions) -> dict[str, SplitPredictions]:
    """Return the predictions of each type of question as a split of its own."""
    kinds = [question.kind for question in split.questions]
    found = {}
    for kind in sorted(set(kinds)):
        chosen = torch.tensor([index for index, other in enumerate(kinds) if other == kind])
        assert whole.labels is not None
        samples = {method: value[:, chosen] for method, value in whole.samples.items()}
        found[f"test: {kind}"] = SplitPredictions(samples, whole.labels[chosen])
    return found


def choose_device() -> torch.device:
    """Return the GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def training_precision(config: VQAConfig) -> torch.autocast:
    """Return the context with the training's precision, in which the epoch was chosen."""
    return torch.autocast(choose_device().type, torch.bfloat16, enabled=config.training.precision == "bf16")


def _shown(model: MCAN, split: Split, num_samples: int, seed: int) -> dict[str, Any]:
    """Return the test questions' text, pictures, and attention over the regions, for the report."""
    texts = [f"{question.text} ({', '.join(dict.fromkeys(question.answers))})" for question in split.questions]
    shown: dict[str, Any] = {"texts": texts}
    if split.regions.grid is not None:
        device = next(model.parameters()).device
        maps = []
        for indices in torch.arange(len(split)).split(BATCH_SIZE):
            inputs = {name: value.to(device) for name, value in model_inputs(split, indices, model.vocabulary).items()}
            maps.append({name: value.cpu() for name, value in attention_maps(model, inputs, num_samples, seed).items()})
        shown["attention"] = {name: torch.cat([part[name] for part in maps]) for name in maps[0]}
    if split.pictures is not None:
        pictures = {image: split.pictures.read(image, PICTURE_SIDE) for image in {q.image for q in split.questions}}
        if len({tuple(picture.shape) for picture in pictures.values()}) == 1:
            shown["inputs"] = torch.stack([pictures[question.image] for question in split.questions])
    return shown
