"""The three data sets as splits of questions, each tied to the features of its images."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bayesattn_recipes.common.config import Count, Share, config_class
from bayesattn_recipes.common.sources import explained
from bayesattn_recipes.vision.annotations import Question
from bayesattn_recipes.vision.features import Regions
from bayesattn_recipes.vision.ids import positions
from bayesattn_recipes.vision.images import Pictures
from bayesattn_recipes.vision.shapes import make_shapes_world
from bayesattn_recipes.vqa import daquar, vqa2
from bayesattn_recipes.vqa.vocabulary import Vocabulary

DatasetName = Literal["shapes", "daquar", "vqa2"]
# folders inside the data folder
FOLDERS: dict[str, Any] = {"daquar": daquar, "vqa2": vqa2}
# one split for all seeds and variants: runs differ in initialization, batch order and noise, never in their data
SPLIT_SEED = 20200
SHAPES_SEEDS = {"train": 1, "validation": 2, "test": 3}
SHAPES_TEST_IMAGES = 250


@config_class
class DataConfig:
    """Which questions, and which words and answers of them are known.

    Args:
        dataset: `shapes` needs no file, `daquar` and `vqa2` need the data folder.
        train_images: Pictures of the shapes world to train on; the other sets have theirs.
        validation_share: Share of the training *images* held out for validation (shapes has its own); 0 holds out none.
        word_min_count: Rarer words of training questions are unknown.
        answer_min_count: Rarer answers of the training questions cannot be given.
        max_words: Longest question; the rest is cut off.
        scale_features: Whether to divide the features by their standard deviation (over all channels together).
        word_vectors: A file of pretrained vectors in GloVe's text format, `model.word_dim` numbers each, to initialize
            the embeddings with; a relative path begins in the data folder, if there is one. None: they begin at random.
    """

    dataset: DatasetName = "shapes"
    train_images: Count = 1200
    validation_share: Share = 0.1
    word_min_count: Count = 1
    answer_min_count: Count = 1
    max_words: Count = 14
    scale_features: bool = True
    word_vectors: str | None = None


@dataclass(frozen=True)
class Split:
    """Questions with the features of their images.

    Attributes:
        questions: The questions.
        regions: Features of all images of the data set.
        places: Position of each question's image in `regions`.
        pictures: The images, by name; None if there are none.
    """

    questions: list[Question]
    regions: Regions
    places: Int[Tensor, " n"]
    pictures: Pictures | None = None

    def __len__(self) -> int:
        return len(self.questions)

    def gather(self, indices: Int[Tensor, " b"]) -> tuple[Float[Tensor, "b r d"], Bool[Tensor, "b r"]]:
        """Return features and mask of the images of these questions."""
        return self.regions.gather(self.places[indices])

    def subset(self, indices: Sequence[int]) -> "Split":
        """Return some of the questions."""
        chosen = [self.questions[index] for index in indices]
        return Split(chosen, self.regions, self.places[torch.tensor(list(indices), dtype=torch.int64)], self.pictures)


def load_splits(config: DataConfig, data: Path | None) -> dict[str, Split]:
    """Return the splits `train`, `test` and, unless its share is 0, `validation`; no image is in two of them.

    Args:
        config: The data set and its settings.
        data: The folder of the data sets; shapes are generated and need none.

    Raises:
        ValueError: Files are missing or broken, or annotations and features disagree on the images.
    """
    if config.dataset == "shapes":
        return _shapes(config.train_images)
    with explained(config.dataset, data):
        if data is None:
            raise ValueError(
                f"{config.dataset} needs data, the folder that holds {config.dataset}/. Give it with --data or the variable "
                "BAYESATTN_DATA"
            )
        reader, folder = FOLDERS[config.dataset], data / config.dataset
        questions: dict[str, list[Question]] = reader.read_questions(folder)
        regions: Regions = reader.read_regions(folder)
    pictures = find_pictures(config.dataset, folder)
    splits = {}
    for name, members in _with_validation(questions, config.validation_share).items():
        wanted = [question.image for question in members]
        if config.dataset == "vqa2":
            wanted = [vqa2.feature_name(image, regions) for image in wanted]
        where = positions(wanted, regions.names, what=f"{name} questions", where="features")
        splits[name] = Split(members, regions, where, pictures)
    return splits


def find_pictures(dataset: str, folder: Path) -> Pictures | None:
    """Return the images of a data set, or None if there are none: only pictures of attention need them."""
    place = folder / (daquar.IMAGES if dataset == "daquar" else "images")
    if not place.exists():
        return None
    return Pictures(FOLDERS[dataset].read_images(folder), ".jpg" if dataset == "daquar" else "")


def build_vocabulary(questions: Sequence[Question], config: DataConfig) -> Vocabulary:
    """Return the words of training questions, and their most frequent answers counted once per question."""
    return Vocabulary.build(
        (question.text for question in questions),
        (Counter(question.answers).most_common(1)[0][0] for question in questions),
        word_min_count=config.word_min_count,
        answer_min_count=config.answer_min_count,
        max_words=config.max_words,
    )


@lru_cache(maxsize=2)
def _shapes(train_images: int) -> dict[str, Split]:
    counts = {"train": train_images, "validation": SHAPES_TEST_IMAGES, "test": SHAPES_TEST_IMAGES}
    splits = {}
    for name, count in counts.items():
        world = make_shapes_world(count, SHAPES_SEEDS[name])
        where = positions([q.image for q in world.questions], world.names, what=f"{name} questions", where="features")
        splits[name] = Split(world.questions, world.regions, where, Pictures(dict(zip(world.names, world.images))))
    return splits


def _with_validation(questions: dict[str, list[Question]], share: float) -> dict[str, list[Question]]:
    """Hold out a share of the training images, with all their questions."""
    images = sorted({question.image for question in questions["train"]})
    held_out = set(random.Random(SPLIT_SEED).sample(images, round(share * len(images))))
    if not held_out:
        return questions
    return {
        "train": [question for question in questions["train"] if question.image not in held_out],
        "validation": [question for question in questions["train"] if question.image in held_out],
        "test": questions["test"],
    }
