"""Ask a trained model for M predictions of the next word, on the words of reference captions, and for its attention.

A caption is a sentence, the report is about classes: here an example is one word of a reference caption, given the words
before it, and its classes are the vocabulary. The first caption of each image is used, for as many images as fit: draws ×
words × vocabulary numbers are kept, at most `MAX_VALUES` a split and method.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from bayesattn.evaluation.runs import Predictions, SplitPredictions
from bayesattn_recipes.captioning.batches import encode_captions, make_batch
from bayesattn_recipes.captioning.data import CaptionData, CaptionSplit, load_data
from bayesattn_recipes.captioning.explain import draw, method_of, prior_weights
from bayesattn_recipes.captioning.model import Att2in
from bayesattn_recipes.captioning.train import CaptioningConfig, load_run
from bayesattn_recipes.common.runs import choose_methods
from bayesattn_recipes.vision.features import add_noise

MAX_VALUES = 2**24
# captions looked at together; every one of them is repeated for each draw
CHUNK = 16


def predict_run(
    folder: Path,
    *,
    num_samples: int = 20,
    noise: tuple[float, ...] = (0.5, 1.0),
    methods: Sequence[str] | None = None,
    seed: int = 0,
    on_progress: Callable[[int, int], Any] = lambda done, total: None,
    data: Path | CaptionData | None = None,
) -> Predictions:
    """Predict the words of the validation and test captions, the latter also with noise on the image features.

    Args:
        folder: The run.
        num_samples: M, at least 2.
        noise: Strengths of the feature noise, in standard deviations of the features.
        methods: `mean` (nothing is drawn), `attention` of a stochastic model, or `dropout` of a soft one. None takes all.
        seed: Of the draws and of the noise.
        on_progress: Called with the number of splits and methods done and to do.
        data: The folder of the data sets, or the run's data set; None for generated images.
    """
    config, model = load_run(folder)
    drawn = method_of(model)
    methods = choose_methods(methods, ["mean", *([drawn] if drawn else [])], num_samples, config.attention.variant)
    if any(not 0.0 <= strength < float("inf") for strength in noise):
        raise ValueError(f"noise is {noise!r}; allowed: finite numbers of at least 0")
    known = data if isinstance(data, CaptionData) else load_data(config.dataset, data)
    strengths = {"validation": 0.0, "test": 0.0, **{f"noise-{level:g}": level for level in noise if level != 0.0}}
    splits = {}
    for index, (name, strength) in enumerate(strengths.items()):
        split = known.splits["validation" if name == "validation" else "test"]
        splits[name] = _predict_split(
            config, model, known, split, strength=strength, methods=methods, num_samples=num_samples, seed=seed,
            with_attention=name == "test",
        )  # fmt: skip
        on_progress(index + 1, len(strengths))
    return Predictions(splits, list(model.vocabulary.words), methods, seed, key_grid=known.regions.grid)


def _predict_split(
    config: CaptioningConfig,
    model: Att2in,
    data: CaptionData,
    split: CaptionSplit,
    *,
    strength: float,
    methods: Sequence[str],
    num_samples: int,
    seed: int,
    with_attention: bool,
) -> SplitPredictions:
    """Predict the words of the first caption of each image, one image after the other until the budget is spent."""
    first = CaptionSplit(split.names, [captions[:1] for captions in split.captions], split.rows)
    captions = encode_captions(first, model.vocabulary, config.max_length)
    budget = MAX_VALUES // (num_samples * len(model.vocabulary))
    chosen = torch.arange(max(1, int((captions.lengths.cumsum(0) <= budget).sum())))
    generator = torch.Generator().manual_seed(seed)
    samples: dict[str, list[Tensor]] = {method: [] for method in methods}
    labels, maps = [], {name: [] for name in ("mean", "std", "prior")}
    for part, indices in enumerate(chosen.split(CHUNK)):
        # one caption an image, so regions and words have the batch's length both, as `predict` wants it
        batch = make_batch(data, first, captions, indices)
        labels.append(batch["targets"])
        inputs = {name: batch[name] for name in ("regions", "region_mask", "words")}
        if strength:
            inputs["regions"] = add_noise(inputs["regions"], strength**2 * data.regions.variance, generator)
        for method in methods:
            drawn, weights = draw(model, inputs, method, num_samples, seed + part)
            samples[method].append(drawn.flatten(1, 2)[:, batch["positions"]])
            if with_attention:
                name, found = ("mean", weights[0]) if method == "mean" else ("std", weights.std(dim=0))
                maps[name].append(found.flatten(0, 1)[batch["positions"]])
        prior = prior_weights(model, inputs["regions"], inputs["region_mask"]) if with_attention else None
        if prior is not None:
            steps = inputs["words"].shape[1]
            maps["prior"].append(prior.repeat_interleave(steps, dim=0)[batch["positions"]])
    probabilities = {method: torch.cat(parts, dim=1) for method, parts in samples.items()}
    # boxes of a detector differ from image to image: only a grid can be drawn by the report
    if not with_attention or data.regions.grid is None:
        return SplitPredictions(probabilities, torch.cat(labels))
    return SplitPredictions(
        probabilities,
        torch.cat(labels),
        _pictures(data, [split.names[int(image)] for image in captions.images[chosen]], captions.lengths[chosen]),
        {name: torch.cat(parts).unsqueeze(1) for name, parts in maps.items() if parts},
        [text for row in chosen for text in _said_before(model.vocabulary.decode(captions.words[row]))],
    )


def _pictures(
    data: CaptionData, names: Sequence[str], lengths: Int[Tensor, " c"]
) -> UInt8[Tensor, "n height width 3"] | None:
    """Return the picture of every word, where pictures are at hand and of one size."""
    if data.images is None:
        return None
    found = [data.picture(name) for name in names]
    if len({picture.shape for picture in found}) > 1:
        return None
    return torch.stack(found).repeat_interleave(lengths, dim=0)


def _said_before(words: Sequence[str]) -> list[str]:
    """Return what stands before each word and before the end."""
    return [" ".join([*words[:step], "…"]) for step in range(len(words) + 1)]
