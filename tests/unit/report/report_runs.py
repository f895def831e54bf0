"""Evaluated run folders made of random numbers: no training needed to test what a report does with them."""

from pathlib import Path

import torch

from bayesattn.evaluation import runs
from bayesattn.evaluation.report import measure_run

HOSTILE = '<script>alert("x")</script>&\'"$\\frac{'


def make_run(
    folder: Path,
    *,
    recipe="digits",
    variant="BAM-WC",
    seed=0,
    class_names=("ant", "bee", "cat", "dog"),
    num_draws=6,
    config=None,
    num_resamples=0,
) -> Path:
    """Write a run whose predictions are right about two times in three, and measure it."""
    generator = torch.Generator().manual_seed(100 + seed)
    num_classes, num_examples = len(class_names), 61

    def split(has_labels: bool, sharpness: float) -> runs.SplitPredictions:
        labels = torch.randint(num_classes, (num_examples,), generator=generator)
        signal = torch.nn.functional.one_hot(labels, num_classes) + torch.randn(
            num_examples, num_classes, generator=generator
        )
        logits = sharpness * signal + torch.randn(num_draws, num_examples, num_classes, generator=generator)
        samples = {"mean": (sharpness * signal).softmax(-1)[None], "attention": logits.softmax(-1)}
        weights = torch.rand(num_examples, 2, 5, generator=generator).softmax(-1)
        attention = {"mean": weights, "std": 0.1 * weights, "prior": weights}
        images = torch.rand(num_examples, 4, 4, generator=generator)
        return runs.SplitPredictions(samples, labels if has_labels else None, images, attention)

    splits = {
        "validation": split(True, 2.0),
        "test": split(True, 2.0),
        "noise-1": split(True, 1.0),
        "strange": split(False, 0.2),
    }
    runs.write_run(
        folder,
        recipe=recipe,
        variant=variant,
        config=config or {"seed": seed, "attention": {"variant": variant}},
        seed=seed,
    )
    runs.write_predictions(folder, runs.Predictions(splits, list(class_names), ["mean", "attention"], 0, (2, 2)))
    measure_run(folder, num_resamples=num_resamples)
    return folder
