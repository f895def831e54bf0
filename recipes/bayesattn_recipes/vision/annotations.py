"""One question about one image, with the answers of its annotators."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Question:
    """A question and its answers.

    Attributes:
        image: Name of the image.
        text: The question.
        answers: One answer per annotator (ten in VQA-v2, one in DAQUAR).
        kind: Type of the question, by which results are listed.
    """

    image: str
    text: str
    answers: tuple[str, ...]
    kind: str
