"""Evaluated run folders made of random numbers: no training needed to test what a report does with them."""

import dataclasses
from pathlib import Path

import torch

from bayesattn.doubt import Uncertainty
from bayesattn.evaluation import runs
from bayesattn.evaluation.report import measure_run

HOSTILE = '<script>alert("x")</script>&\'"$\\frac{'


# what stands at the keys of four doubtful examples
WORDS = [["[CLS]", HOSTILE, "b"], ["a"], ["a"] * 5, ["$x", "y"]]


def make_doubtful(words=None) -> runs.DoubtfulExamples:
    """Return the doubt of four examples in two layers, of which the second has fewer heads."""
    generator = torch.Generator().manual_seed(3)
    heads = {f"layer {n}": torch.rand(4, size, generator=generator) for n, size in enumerate((3, 2))}
    total = torch.cat(list(heads.values()), dim=1).sum(dim=1)
    by_token = torch.rand(4, 5, generator=generator)
    found = Uncertainty(
        value=torch.tensor([0.1, 0.5, 0.9, 1.0]),
        std=total.sqrt(),
        by_layer={name: part.sum(1) for name, part in heads.items()},
        by_head=heads,
        by_token=by_token / by_token.sum(1, keepdim=True) * total[:, None],
    )
    return runs.DoubtfulExamples.from_uncertainty(torch.tensor([7, 0, 60, 3]), found, words)


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
    doubtful=None,
) -> Path:
    """Write a run whose predictions are right about two times in three, and measure it; `doubtful` is of its test split."""
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
    splits["test"] = dataclasses.replace(splits["test"], doubtful=doubtful)
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
