"""Draw M predictions of the next word from a trained model, along reference captions, with its attention.

The report is about classes, so here an example is one word of a reference caption, given the words
before it, and its classes are the vocabulary. The first caption of each image is used, for as many images as fit: draws ×
words × vocabulary numbers are kept, at most `MAX_VALUES` per split and method.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from bayesattn.evaluation.runs import Predictions, SplitPredictions
from bayesattn_recipes.captioning.batches import encode_captions, make_batch
from bayesattn_recipes.captioning.data import CaptionData, CaptionSplit, load_data
from bayesattn_recipes.captioning.explain import draw, method_of, prior_weights
from bayesattn_recipes.captioning.model import Att2in
from bayesattn_recipes.captioning.train import CaptioningConfig, load_run
from bayesattn_recipes.common.prediction import PredictRun
from bayesattn_recipes.vision.features import add_noise

MAX_VALUES = 2**24
# captions per batch; each of them is repeated for every draw
CHUNK = 16


@dataclass(frozen=True)
class CaptioningPredictor:
    """A run of the recipe, and its data set, or the folder of the data sets."""

    config: CaptioningConfig
    model: Att2in
    data: Path | CaptionData | None

    @cached_property
    def images(self) -> CaptionData:
        """The run's data set."""
        return self.data if isinstance(self.data, CaptionData) else load_data(self.config.dataset, self.data)

    @property
    def variant(self) -> str:
        """What the run was trained with."""
        return self.config.attention.variant

    @property
    def methods(self) -> list[str]:
        """How it can be drawn."""
        drawn = method_of(self.model)
        return ["mean", *([drawn] if drawn else [])]

    def conditions(self, noise: tuple[float, ...], num_samples: int) -> dict[str, tuple[CaptionSplit, float]]:
        """Return the validation and test captions, the test captions also with noise of these strengths on the features."""
        if any(not 0.0 <= strength < float("inf") for strength in noise):
            raise ValueError(f"noise must be finite numbers of at least 0, got {noise!r}")
        test = self.images.splits["test"]
        noisy = {f"noise-{level:g}": (test, level) for level in noise if level != 0.0}
        return {"validation": (self.images.splits["validation"], 0.0), "test": (test, 0.0), **noisy}

    def assemble(self, splits: dict[str, SplitPredictions], methods: list[str], seed: int) -> Predictions:
        """Add the words and the grid of the regions."""
        return Predictions(splits, list(self.model.vocabulary.words), methods, seed, key_grid=self.images.regions.grid)

    def predict(
        self, name: str, condition: tuple[CaptionSplit, float], methods: Sequence[str], num_samples: int, seed: int
    ) -> SplitPredictions:
        """Predict the words of the first caption of each image, one image after the other until the budget is spent."""
        (split, strength), with_attention = condition, name == "test"
        first = CaptionSplit(split.names, [captions[:1] for captions in split.captions], split.rows)
        captions = encode_captions(first, self.model.vocabulary, self.config.max_length)
        budget = MAX_VALUES // (num_samples * len(self.model.vocabulary))
        chosen = torch.arange(max(1, int((captions.lengths.cumsum(0) <= budget).sum())))
        generator = torch.Generator().manual_seed(seed)
        samples: dict[str, list[Tensor]] = {method: [] for method in methods}
        labels, maps = [], {name: [] for name in ("mean", "std", "prior")}
        for part, indices in enumerate(chosen.split(CHUNK)):
            # one caption per image, so regions and words have the same batch size, as `predict` requires
            batch = make_batch(self.images, first, captions, indices)
            labels.append(batch["targets"])
            inputs = {name: batch[name] for name in ("regions", "region_mask", "words")}
            if strength:
                inputs["regions"] = add_noise(inputs["regions"], strength**2 * self.images.regions.variance, generator)
            for method in methods:
                drawn, weights = draw(self.model, inputs, method, num_samples, seed + part)
                samples[method].append(drawn.flatten(1, 2)[:, batch["positions"]])
                if with_attention:
                    name, found = ("mean", weights[0]) if method == "mean" else ("std", weights.std(dim=0))
                    maps[name].append(found.flatten(0, 1)[batch["positions"]])
            prior = prior_weights(self.model, inputs["regions"], inputs["region_mask"]) if with_attention else None
            if prior is not None:
                steps = inputs["words"].shape[1]
                maps["prior"].append(prior.repeat_interleave(steps, dim=0)[batch["positions"]])
        probabilities = {method: torch.cat(parts, dim=1) for method, parts in samples.items()}
        # a detector's boxes differ from image to image: the report can draw only a grid
        if not with_attention or self.images.regions.grid is None:
            return SplitPredictions(probabilities, torch.cat(labels))
        return SplitPredictions(
            probabilities,
            torch.cat(labels),
            _pictures(self.images, [split.names[int(image)] for image in captions.images[chosen]], captions.lengths[chosen]),
            {name: torch.cat(parts).unsqueeze(1) for name, parts in maps.items() if parts},
            [text for row in chosen for text in _said_before(self.model.vocabulary.decode(captions.words[row]))],
        )


predict_run = PredictRun(lambda folder, data: CaptioningPredictor(*load_run(folder), data))


def _pictures(
    data: CaptionData, names: Sequence[str], lengths: Int[Tensor, " c"]
) -> UInt8[Tensor, "n height width 3"] | None:
    """Return the picture of every word, if pictures are available and of one size."""
    if data.images is None:
        return None
    found = [data.picture(name) for name in names]
    if len({picture.shape for picture in found}) > 1:
        return None
    return torch.stack(found).repeat_interleave(lengths, dim=0)


def _said_before(words: Sequence[str]) -> list[str]:
    """Return the words before each word and before the end."""
    return [" ".join([*words[:step], "…"]) for step in range(len(words) + 1)]
