"""VQA-v2 (Goyal et al., 2017) from its official files, with bottom-up features, for those who have them.

    DATA/vqa2/
      v2_OpenEnded_mscoco_train2014_questions.json, v2_mscoco_train2014_annotations.json, and the same for val2014
      features/      one npz per image (`COCO_train2014_000000000009.jpg.npz`), in subfolders or not; or
      features.h5    all images (see `H5Regions`), ids being COCO's numbers
      images/        the photos, if pictures of attention are wanted

The paper trains on train2014 and tests on val2014, because the answers to the test questions are not public.
"""

import json
from pathlib import Path
from typing import Any

from bayesattn_recipes.vision.annotations import Question
from bayesattn_recipes.vision.features import H5Regions, NpzFolder, Regions
from bayesattn_recipes.vision.ids import coco_number
from bayesattn_recipes.vision.images import ImageSource
from bayesattn_recipes.vqa.vocabulary import normalize_answer

# our split: COCO's
SPLITS = {"train": "train2014", "test": "val2014"}


def read_questions(folder: Path) -> dict[str, list[Question]]:
    """Return the questions of train2014 as `train` and of val2014 as `test`, with the answers of their annotators.

    Raises:
        ValueError: A file is missing or not in the official format, or questions and annotations disagree.
    """
    return {name: _read_split(folder, coco) for name, coco in SPLITS.items()}


def _read_split(folder: Path, coco: str) -> list[Question]:
    asked_path = folder / f"v2_OpenEnded_mscoco_{coco}_questions.json"
    answered_path = folder / f"v2_mscoco_{coco}_annotations.json"
    try:
        asked = {int(entry["question_id"]): entry for entry in _read(asked_path)["questions"]}
        answered = {int(entry["question_id"]): entry for entry in _read(answered_path)["annotations"]}
        if asked.keys() != answered.keys():
            apart = sorted(asked.keys() ^ answered.keys())
            raise ValueError(
                f"{asked_path.name} and {answered_path.name} must have the same question ids, but differ in {len(apart)}, "
                f"{apart[0]} first"
            )
        questions = []
        for number, entry in asked.items():
            annotation = answered[number]
            if int(annotation["image_id"]) != int(entry["image_id"]):
                raise ValueError(f"question {number} has image {entry['image_id']} but annotation {annotation['image_id']}")
            answers = tuple(normalize_answer(str(answer["answer"])) for answer in annotation["answers"])
            if not answers:
                raise ValueError(f"question {number} must have at least one answer, got none")
            name = f"COCO_{coco}_{int(entry['image_id']):012d}.jpg"
            questions.append(Question(name, str(entry["question"]), answers, str(annotation["answer_type"])))
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"{asked_path} or {answered_path} is not in VQA-v2's format: {error!r}") from None
    return questions


def read_regions(folder: Path) -> Regions:
    """Return the features, named as COCO names its images."""
    packed, files = folder / "features.h5", folder / "features"
    if packed.is_file():
        return H5Regions(packed)
    if files.is_dir():
        return NpzFolder([files, *sorted(path for path in files.rglob("*") if path.is_dir())])
    raise ValueError(f"{folder} has no features. It needs features.h5, or a folder features with one npz file per image")


def feature_name(image: str, regions: Regions) -> str:
    """Return the name of an image in the features: COCO's file name, or its number if the features are named by numbers."""
    number = coco_number(image) if regions.names[0].isdigit() else None
    return image if number is None else number


def read_images(folder: Path) -> ImageSource:
    """Return the photos."""
    return ImageSource(folder / "images")


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from None
