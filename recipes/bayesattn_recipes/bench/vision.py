"""Training steps of the two models that look at images, MCAN and Att2in, with soft and with Bayesian attention.

Random regions, words and targets of the paper's sizes. On a GPU two things are timed. `as it trains` is the recipe's whole
optimizer step: the batch is collated and copied, forward and backward pass are replayed, the gradient is checked, clipped
and used. `train step, CUDA graph` is forward, backward, clipping and Adam in one replay, so only the GPU counts. On a CPU
the plain step is timed. Soft attention is timed first and again last: its second ratio, which should be 1, shows the
measurement error of this run.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Literal

import torch

from bayesattn.evaluation.threads import one_thread
from bayesattn_recipes.bench import timing
from bayesattn_recipes.bench.harness import Row, Suite, recorded
from bayesattn_recipes.captioning import train as captioning
from bayesattn_recipes.captioning.data import CaptionData, CaptionSplit
from bayesattn_recipes.common.config import seed_everything
from bayesattn_recipes.common.experiment import Experiment, TrainingConfig
from bayesattn_recipes.common.loop import training_step
from bayesattn_recipes.vision.annotations import Question
from bayesattn_recipes.vision.features import StoredRegions
from bayesattn_recipes.vqa import train as vqa
from bayesattn_recipes.vqa.data import Split

Precision = Literal["fp32", "bf16"]
PROVIDERS = {"soft": "soft", "BAM-NOKL": "nokl", "BAM-WC": "wc", "soft, again": "soft"}


@dataclass(frozen=True)
class Case:
    """Sizes of a batch; the model is that of the configs `CONFIG-soft`, `CONFIG-nokl` and `CONFIG-wc`.

    Attributes:
        model: `MCAN` or `Att2in`.
        config: First part of the configs' names.
        batch: Questions or captions; five captions share an image.
        words: Words of a question, or of a caption with its end.
        regions: Regions of an image.
        features: Features of a region.
        vocabulary: Size of the vocabulary.
        answers: Classes of MCAN.
        settings: Settings of the config, as on the command line.
    """

    model: str
    config: str
    batch: int
    words: int
    regions: int
    features: int
    vocabulary: int
    answers: int = 0
    settings: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.model} {self.config} b{self.batch} t{self.words} r{self.regions}"


CASES = {
    "cuda": [
        Case("MCAN", "vqa2", 64, 14, 100, 2048, 20_572, 3129),
        Case("Att2in", "coco", 50, 16, 36, 2048, 9488),
        Case("MCAN", "daquar", 128, 24, 63, 512, 1000, 372),
        Case("Att2in", "flickr8k", 250, 20, 49, 512, 2540),
    ],
    "cpu": [Case("MCAN", "shapes", 64, 8, 16, 12, 40, 20), Case("Att2in", "shapes", 100, 16, 16, 12, 60)],
}


def run(device: str, cases: list[Case] | None = None) -> list[Row]:
    """Time every case, in turn: on a GPU as it trains, in bfloat16 and its config's precision, and as a CUDA graph."""
    suite = Suite("vision", device)
    with one_thread():
        for case in CASES[device] if cases is None else cases:
            if device == "cpu":
                steps = {name: whole_step(*build(case, suffix), "cpu") for name, suffix in PROVIDERS.items()}
                suite.compare(str(case), "train step", steps, rounds=11)
                continue
            built = {name: build(case, suffix) for name, suffix in PROVIDERS.items()}
            for precision in dict.fromkeys(("bf16", built["soft"][1].precision)):
                with ExitStack() as stack:
                    steps = {name: stack.enter_context(recipe_step(*found, precision)) for name, found in built.items()}
                    suite.compare(str(case), f"as it trains, {precision}", steps, rounds=11 if case.model == "MCAN" else 21)
            graphs = {name: recorded(whole_step(*build(case, suffix), "cuda")) for name, suffix in PROVIDERS.items()}
            suite.compare(str(case), "train step, CUDA graph", graphs, rounds=11)
    return suite.rows


@contextmanager
def recipe_step(experiment: Experiment, training: TrainingConfig, precision: Precision) -> Iterator[Callable[[], None]]:
    """Return a call that makes one optimizer step as in training, always on the same examples."""
    indices = torch.arange(training.batch_size)
    with training_step(experiment, replace(training, precision=precision), seed=0) as step:
        # the first step of an epoch observes the attention, the first two of a shape load kernels and record
        for _ in range(3):
            step(indices)
        yield lambda: step(indices)


def whole_step(experiment: Experiment, training: TrainingConfig, device: str) -> Callable[[], None]:
    """Return a call that makes one optimizer step with all of its work on the device; it never waits for the device."""
    found = experiment.collate(torch.arange(training.batch_size))
    batch = {name: value.to(device) for name, value in experiment.pad(found).items()}
    model = experiment.model.to(device).train()
    return timing.whole_step(
        model,
        lambda: experiment.nll(model, batch),
        num_labels=experiment.num_labels(found),
        num_examples=training.batch_size,
        autocast=device == "cuda",
        capturable=device == "cuda",
    )


def build(case: Case, suffix: str) -> tuple[Experiment, TrainingConfig]:
    """Return the experiment of a case with random data, and how it trains."""
    seed_everything(0)
    return {"MCAN": _mcan, "Att2in": _att2in}[case.model](case, suffix)


def _mcan(case: Case, suffix: str) -> tuple[Experiment, TrainingConfig]:
    settings = [f"training.batch_size={case.batch}", f"data.max_words={case.words}", "data.answer_min_count=1"]
    config = vqa.load_config(f"{case.config}-{suffix}", [*settings, *case.settings])
    regions, names = _regions(case, case.batch)
    texts = _texts(case, case.words, at_least=max(case.batch, case.answers))
    answers = [f"answer{index}" for index in range(case.answers)]
    questions = [Question(name, text, (answer,), "any") for name, text, answer in zip(cycle(names), texts, cycle(answers))]
    split = Split(questions, regions, torch.arange(len(questions)) % len(names))
    return vqa.VQAExperiment(config, {"train": split}), config.training


def _att2in(case: Case, suffix: str) -> tuple[Experiment, TrainingConfig]:
    settings = [f"training.batch_size={case.batch}", f"max_length={case.words}", "min_count=1"]
    config = captioning.load_config(f"{case.config}-{suffix}", [*settings, *case.settings])
    texts = _texts(case, case.words - 1, at_least=case.batch)
    captions = [texts[first : first + 5] for first in range(0, len(texts), 5)]
    regions, names = _regions(case, len(captions))
    split = CaptionSplit(names, captions, torch.arange(len(names)))
    data = CaptionData(dict.fromkeys(("train", "validation"), split), regions)
    return captioning.CaptioningExperiment(config, data), config.training


def _texts(case: Case, length: int, *, at_least: int) -> list[str]:
    """Return sentences of one length that hold every word of the vocabulary except the two reserved ones."""
    words = cycle(f"word{index}" for index in range(case.vocabulary - 2))
    count = max(at_least, -(-(case.vocabulary - 2) // length))
    return [" ".join(islice(words, length)) for _ in range(count)]


def _regions(case: Case, num_images: int) -> tuple[StoredRegions, list[str]]:
    names = [f"image{index}" for index in range(num_images)]
    return StoredRegions(names, torch.randn(num_images, case.regions, case.features)), names
