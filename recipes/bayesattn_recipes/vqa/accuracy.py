"""How right an answer is when annotators disagree (App. C.2.1), and how close when it is wrong (WUPS)."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from bayesattn.scalars import check_choice
from bayesattn_recipes.vision.annotations import Question
from bayesattn_recipes.vqa.vocabulary import Vocabulary

Form = Literal["paper", "leave_one_out"]


def soft_accuracy(num_same: int, num_annotators: int, form: Form = "paper") -> float:
    """Return the accuracy of an answer that `num_same` of the annotators gave.

        paper           min(n/3, 1)
        leave_one_out   the mean of min(n/3, 1) over all sets of annotators without one: 0, .3, .6, .9, 1 for ten

    With fewer than three annotators the accuracy is the share that gave the answer, so with
    one annotator (DAQUAR) it is exact match.
    """
    if not 0 <= num_same <= num_annotators or num_annotators < 1:
        raise ValueError(
            f"num_same must be from 0 to the number of annotators, of which there must be one, got {num_same!r} of "
            f"{num_annotators!r}"
        )
    check_choice("form", form, ("paper", "leave_one_out"))
    if num_annotators < 3:
        return num_same / num_annotators
    if form == "paper":
        return min(num_same / 3.0, 1.0)
    left_out_other = (num_annotators - num_same) * min(num_same / 3.0, 1.0)
    left_out_same = num_same * min((num_same - 1) / 3.0, 1.0)
    return (left_out_other + left_out_same) / num_annotators


def soft_targets(questions: Sequence[Question], vocabulary: Vocabulary, form: Form) -> Float[Tensor, "b c"]:
    """Return the accuracy of every known answer to every question; an answer outside the vocabulary has no column."""
    targets = torch.zeros(len(questions), len(vocabulary.answers))
    for row, question in enumerate(questions):
        for answer, count in Counter(question.answers).items():
            column = vocabulary.answer_index.get(answer)
            if column is not None:
                targets[row, column] = soft_accuracy(count, len(question.answers), form)
    return targets


def wordnet() -> Any:
    """Return nltk's WordNet reader, or raise ValueError with the reason WUPS cannot be computed."""
    try:
        from nltk.corpus import wordnet as reader  # type: ignore[import-not-found]

        reader.ensure_loaded()
    except ModuleNotFoundError:
        raise ValueError("WUPS needs the package 'nltk'. Install it with: pip install nltk") from None
    except LookupError:
        raise ValueError("WUPS needs WordNet. Get it with: python -m nltk.downloader wordnet") from None
    return reader


def wups(predicted: Sequence[str], answers: Sequence[str], threshold: float, reader: Any) -> float:
    """Return the mean WUPS of predicted answers (Malinowski and Fritz, 2014); answers are sets, separated by commas.

        WUPS(A, T) = min(Π_{a ∈ A} max_{t ∈ T} μ(a, t), Π_{t ∈ T} max_{a ∈ A} μ(a, t))

    μ is the Wu-Palmer similarity of the best pair of noun senses, multiplied by 0.1 below the threshold.
    """
    cache: dict[tuple[str, str], float] = {}

    def similarity(first: str, second: str) -> float:
        if (first, second) not in cache:
            value = 1.0 if first == second else _wu_palmer(first, second, reader)
            cache[first, second] = value if value >= threshold else 0.1 * value
        return cache[first, second]

    total = 0.0
    for guess, truth in zip(predicted, answers, strict=True):
        ours, theirs = _members(guess), _members(truth)
        forth = math.prod(max(similarity(a, t) for t in theirs) for a in ours)
        back = math.prod(max(similarity(a, t) for a in ours) for t in theirs)
        total += min(forth, back)
    return total / max(len(answers), 1)


def _members(answer: str) -> list[str]:
    return [part.strip() for part in answer.split(",") if part.strip()] or [answer]


def _wu_palmer(first: str, second: str, reader: Any) -> float:
    senses = [reader.synsets(word.replace(" ", "_"), pos="n") for word in (first, second)]
    return max((a.wup_similarity(b) or 0.0 for a in senses[0] for b in senses[1]), default=0.0)
