"""DAQUAR (Malinowski and Fritz, 2014): questions about 1,449 photos of rooms, one answer each.

DATA/daquar/
  all_qa_pairs.txt                                  a question, then its answer, line by line
  train_images_list.txt, test_images_list.txt       the official split: 6,795 and 5,673 questions
  resnet50_7x9_pca512_meta.npz, …_int8.npy.xz       grid features
  images_280x212_q80.tar                            the photos, needed only for pictures of attention
"""

import re
from functools import lru_cache
from pathlib import Path

from bayesattn_recipes.vision.annotations import Question
from bayesattn_recipes.vision.features import StoredRegions, load_grid_features
from bayesattn_recipes.vision.images import ImageSource

FEATURES = "resnet50_7x9_pca512"
IMAGES = "images_280x212_q80.tar"

_IMAGE = re.compile(r"\bimage\s*(\d+)\b")


def read_questions(folder: Path) -> dict[str, list[Question]]:
    """Return the questions of the official `train` and `test` images.

    The reference to the image is taken out of the question. Answers that are lists are sorted: DAQUAR's accuracy compares
    sets.

    Raises:
        ValueError: A file is missing or not in DAQUAR's format, or a question belongs to no split or to two.
    """
    lines = [line.strip() for line in _read(folder / "all_qa_pairs.txt").splitlines() if line.strip()]
    if len(lines) % 2:
        raise ValueError(
            f"{folder / 'all_qa_pairs.txt'} must hold pairs of a question and an answer, got {len(lines)} lines"
        )
    splits = {name: set(_read(folder / f"{name}_images_list.txt").split()) for name in ("train", "test")}
    both = sorted(splits["train"] & splits["test"])
    if both:
        raise ValueError(f"{folder}: {len(both)} images are in both splits, {both[0]!r} first. Each image must be in one")
    questions: dict[str, list[Question]] = {name: [] for name in splits}
    for number, (text, answer) in enumerate(zip(lines[::2], lines[1::2])):
        found = _IMAGE.findall(text)
        if not found:
            raise ValueError(f"{folder / 'all_qa_pairs.txt'}: question {number + 1} names no image: {text!r}")
        image = f"image{found[-1]}"
        owner = next((name for name, images in splits.items() if image in images), None)
        if owner is None:
            raise ValueError(f"{folder}: {image!r} of question {number + 1} is in neither split")
        questions[owner].append(Question(image, _without_image(text), (sort_answer(answer),), question_kind(text)))
    return questions


def sort_answer(answer: str) -> str:
    """Return an answer with the members of a list in alphabetical order."""
    return ", ".join(sorted(part.strip().lower() for part in answer.split(",") if part.strip()))


def is_single(answer: str) -> bool:
    """Whether an answer is one thing and not a list; some published accuracies cover only these questions."""
    return "," not in answer


def question_kind(text: str) -> str:
    """Return `number`, `color` or `object`."""
    if text.startswith("how many"):
        return "number"
    return "color" if re.search(r"\bcolou?rs?\b", text) else "object"


@lru_cache(maxsize=1)
def read_regions(folder: Path) -> StoredRegions:
    """Return the grid features; their images have the names in the lists, without a suffix."""
    regions = load_grid_features(folder / FEATURES)
    regions.names = [Path(name).stem for name in regions.names]
    return regions


def read_images(folder: Path) -> ImageSource:
    """Return the photos, named `image1.jpg` and so on."""
    return ImageSource(folder / IMAGES)


def _without_image(text: str) -> str:
    text = re.sub(r"\s*\b(?:(?:in|of|on)\s+)?(?:(?:the|this)\s+)?image\s*\d+\b", "", text)
    return " ".join(text.split())


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
